"""Owns what is put right after a job failed: its memory is free, the numbers shown are true.

Must never hide the failure: it is raised again. The surprising fact: an error holds every local of
every call it came through, activations included, for as long as somebody means to show its words.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .jobs import let_go
from .problems import is_out_of_memory
from .studio import Studio

__all__ = ["recovering"]


@contextmanager
def recovering(studio: Studio) -> Iterator[None]:
    """After a failure the snapshot is right, and memory that was freed serves the next request."""
    try:
        yield
    except BaseException as error:
        let_go(error)
        studio.refresh()
        if is_out_of_memory(error):
            studio.recover_from_out_of_memory()
        raise
