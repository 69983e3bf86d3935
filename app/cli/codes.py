"""Owns the exit codes. The surprising fact: 130 is what a shell expects after Ctrl-C."""

__all__ = ["BAD_INPUT", "FAILED", "INTERRUPTED"]

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130
