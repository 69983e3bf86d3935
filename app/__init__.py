"""Command line, web interface, server and the bundled model."""
