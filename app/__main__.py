"""`python -m dit_graphs.app`: the command line without its installed script."""

import sys

from dit_graphs.app.cli import main

if __name__ == "__main__":
    sys.exit(main())
