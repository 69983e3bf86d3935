"""Prints what README.md tells a newcomer to type, so that CI types exactly that.

Owns the reading of fenced blocks; knows nothing of what the commands do.

    python .ci/readme.py install          every `pip install -e …` line of the bash blocks
    python .ci/readme.py pytest           every pytest line that needs no GPU and no browser
    python .ci/readme.py generate         every `dit-graphs generate …` line
    python .ci/readme.py snippets FOLDER  writes the python blocks into FOLDER, one file each

A python block with `<!-- ci: skip, REASON -->` on the line before its fence is not written; the
reason is printed. Exits 1 when what was asked for is not in the README.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCK = re.compile(
    r"(?:<!-- ci: skip, (?P<reason>[^>]+) -->\n)?```(?P<language>\w+)\n(?P<body>.*?)```", re.S
)
ELSEWHERE = re.compile(r"\b(multi)?gpu\b|\bbrowser\b")


def _lines(start: str) -> list[str]:
    """The commands of the bash blocks that begin with `start`; `a && b` is two commands."""
    bodies = (block["body"] for block in BLOCK.finditer(README.read_text()))
    commands = (
        command.strip()
        for body in bodies
        for line in body.splitlines()
        for command in line.removeprefix("$ ").split("  #")[0].split(" && ")
    )
    return [command for command in dict.fromkeys(commands) if re.match(start, command)]


def _write_snippets(folder: Path) -> list[str]:
    names = []
    for number, block in enumerate(BLOCK.finditer(README.read_text())):
        if block["language"] != "python":
            continue
        line = README.read_text()[: block.start("body")].count("\n") + 1
        if block["reason"]:
            print(f"README.md:{line}: not run: {block['reason']}", file=sys.stderr)
            continue
        path = folder / f"snippet_{number:02d}_line_{line}.py"
        path.write_text(block["body"])
        names.append(str(path))
    return names


def main(arguments: list[str]) -> int:
    """Print one result per line; the exit status says whether there was any."""
    match arguments:
        case ["install"]:
            found = _lines(r"pip install -e ")
        case ["pytest"]:
            found = [c for c in _lines(r"(python -m )?pytest\b") if not ELSEWHERE.search(c)]
        case ["generate"]:
            found = _lines(r"dit-graphs generate ")
        case ["snippets", folder]:
            found = _write_snippets(Path(folder))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    print("\n".join(found))
    if not found:
        print(f"README.md has no {arguments[0]} lines", file=sys.stderr)
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
