"""Owns the one error a wrong request raises, so that every front end words it the same way.

Must never know how a request was typed. The surprising fact: `option` is the field's own word
(`num_frames`); a command line shows it as `--num-frames`, a JSON line as `"num_frames"`.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["InputError", "is_out_of_memory", "listed"]


class InputError(ValueError):
    """A value the user gave cannot be used; nothing was generated or written.

    `option` is the request or model field, or several with commas between; `problem` is the rest
    of the sentence.
    """

    def __init__(self, option: str, problem: str) -> None:
        super().__init__(f"{option}: {problem}")
        self.option = option
        self.problem = problem


def listed(names: Iterable[object]) -> str:
    """`a, b or c`: how an error names the allowed values."""
    words = [str(name) for name in names]
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} or {words[-1]}"


def is_out_of_memory(error: BaseException) -> bool:
    """Of the device, which has an error of its own, or of the host."""
    if type(error).__name__ in ("OutOfMemoryError", "MemoryError"):
        return True
    return any(words in str(error) for words in ("allocate memory", "Storage size calculation"))
