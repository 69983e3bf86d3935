"""Owns eager breaks: how a forward says "run this eagerly", and what a break returned.

Must never know CUDA or models. The surprising fact: a break's body never runs during a capture
(its inputs hold garbage then); the capture hands out buffers of the layout seen in the warm-up,
and only replays run the body.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor

from .buffers import copy_layout, empty_layout, skew_bytes
from .errors import BreakFailed, CaptureAborted, ConfigError, Reason
from .tree import UnknownLeaf, freeze, map_tensors

__all__ = [
    "BreakHandler",
    "BreakResult",
    "BreakSite",
    "RecordedBreak",
    "active_handler",
    "break_graph",
    "call_break",
    "eager_on_graph",
    "handling_breaks",
    "left_in",
]

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class BreakSite:
    """Where a break is: `kind` is "function", "module" or "op"; `name` is its path."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class Reach(Protocol):
    """The Python values a break's body can reach, as they were at some moment."""

    def again(self) -> Reach: ...

    def changed(self) -> list[str]: ...

    def restore(self) -> list[str]: ...


class BreakHandler(Protocol):
    """Whoever watches the forward now: an observer or a capture."""

    def run_break(
        self,
        site: BreakSite,
        fn: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object: ...


_active: ContextVar[BreakHandler | None] = ContextVar("dit_graphs_break_handler", default=None)


def active_handler() -> BreakHandler | None:
    """The handler of the capture or observation this thread is in, or None."""
    return _active.get()


@contextmanager
def handling_breaks(handler: BreakHandler | None) -> Iterator[None]:
    """Inside, breaks go to `handler`; with None they are plain calls (a nested break)."""
    token = _active.set(handler)
    try:
        yield
    finally:
        _active.reset(token)


def call_break(
    site: BreakSite,
    fn: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    """`fn(*args, **kwargs)`, as a break if a forward is being observed or captured."""
    handler = _active.get()
    if handler is None:
        return fn(*args, **kwargs)
    result = handler.run_break(site, fn, args, kwargs)
    with suppress(UnknownLeaf):  # made by ops of the forward's own: a watch sees who keeps one
        return map_tensors(result, torch.ops.aten.alias)
    return result


def eager_on_graph(fn: Callable[P, R]) -> Callable[P, R]:
    """Marks a function as a break: captured graphs end before it and go on after it.

    Its body runs eagerly on every replay, on live arguments. Outside a capture it is `fn`.
    A replay in which its result has another shape, dtype, stride or Python value than recorded
    is discarded and the whole call runs eagerly. Raises `ConfigError` for anything but a function
    or method that returns its result: a class, a module, a generator.
    """
    is_function = inspect.isroutine(fn) and callable(fn)
    if not is_function or inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn):
        raise ConfigError(
            "eager_on_graph: expected a function or method that returns its result, got "
            f"{fn!r}; for a module mark its forward"
        )
    site = BreakSite("function", f"{fn.__module__}.{fn.__qualname__}")

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if _active.get() is None:
            return fn(*args, **kwargs)
        return call_break(site, fn, args, kwargs)  # type: ignore[return-value]

    return wrapper


def break_graph() -> None:
    """An empty break: the segment before it ends here. Outside a capture it does nothing."""
    if _active.get() is not None:
        call_break(BreakSite("function", "break_graph"), _nothing, (), {})


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class BreakResult:
    """The layout of what a break returned: `template` holds meta tensors in place of data."""

    structure: Hashable
    template: object

    @classmethod
    def of(cls, result: object) -> BreakResult:
        """Raises `CaptureAborted` where the result cannot be rebuilt from its parts."""
        try:
            structure = freeze(result, [])
            template = map_tensors(result, _meta)
        except UnknownLeaf as leaf:
            raise CaptureAborted(
                Reason.UNSUPPORTED_OUTPUT, f"a break returned a {leaf.kind}"
            ) from None
        return cls(structure, template)

    def allocate(self, device: torch.device) -> object:
        """The result with fresh buffers of the recorded layouts on `device`."""

        def buffer(meta: Tensor) -> Tensor:
            return empty_layout(meta, int(meta.storage_offset()), device)

        return map_tensors(self.template, buffer)

    def copy_into(self, buffers: list[Tensor], result: object) -> None:
        """`buffers` hold `result`. Raises `BreakFailed` where it differs from the recording."""
        try:
            tensors: list[Tensor] = []
            structure = freeze(result, tensors)
        except UnknownLeaf as leaf:
            raise BreakFailed(Reason.BREAK_VALUE_CHANGED, f"now a {leaf.kind}") from None
        if structure != self.structure:
            raise BreakFailed(
                Reason.BREAK_VALUE_CHANGED, f"recorded {self.structure}, got {structure}"
            )
        for buffer, tensor in zip(buffers, tensors, strict=True):
            if (
                buffer.shape != tensor.shape
                or buffer.dtype != tensor.dtype
                or buffer.stride() != tensor.stride()
            ):
                raise BreakFailed(
                    Reason.BREAK_SHAPE_CHANGED,
                    f"recorded {tuple(buffer.shape)} {buffer.stride()} {buffer.dtype}, got "
                    f"{tuple(tensor.shape)} {tensor.stride()} {tensor.dtype}",
                )
            copy_layout(buffer, tensor)


@dataclass(frozen=True, slots=True)
class RecordedBreak:
    """One break of an observed forward, in the order they ran.

    `reach` and `given`: what its body left in the Python values it can reach and in the containers
    it was given. The code behind the break was recorded with that.
    """

    site: BreakSite
    result: BreakResult
    reach: Reach | None = None
    given: Hashable = ()


class BoundBreak:
    """A break inside a recording: its body, its live arguments and its boundary buffers."""

    __slots__ = ("args", "buffers", "fn", "fresh", "has_containers", "kwargs", "recorded", "site")

    def __init__(
        self,
        recorded: RecordedBreak,
        fn: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
        buffers: list[Tensor],
        fresh: Callable[[object], object] | None = None,
    ) -> None:
        self.site = recorded.site
        self.recorded = recorded
        self.fn = fn
        self.args = args
        self.kwargs = kwargs
        self.buffers = buffers
        self.fresh = fresh
        values = (*args, *kwargs.values())
        self.has_containers = any(isinstance(value, (list, dict, tuple)) for value in values)

    def _fresh(self, given: A) -> A:
        """`given` in containers of its own: a body may pop from what it gets."""
        if self.fresh is not None:
            return cast(A, self.fresh(given))
        if not self.has_containers:
            return given
        return cast(A, map_tensors(given, _same, keep_unknown=True))

    def run(self) -> None:
        """Runs the body; its result lies in the boundary buffers. Raises `BreakFailed`."""
        reach = self.recorded.reach
        before = reach.again() if reach is not None else None
        given, named = self._fresh(self.args), self._fresh(self.kwargs)
        try:
            result = self.fn(*given, **named)
        except BreakFailed:
            raise
        except Exception as error:
            detail = f"{self.site}: {type(error).__name__}: {error}"
            raise BreakFailed(Reason.BREAK_RAISED, detail) from error
        changed = reach.changed() if reach is not None else []
        if self.has_containers and left_in((*given, *named.values())) != self.recorded.given:
            changed.append("other values in a container that it was given")
        if changed:
            if before is not None:
                before.restore()
            detail = f"{self.site} sets {', '.join(changed[:3])}"
            raise BreakFailed(Reason.BREAK_VALUE_CHANGED, detail)
        self.recorded.result.copy_into(self.buffers, result)


def left_in(given: Iterable[object]) -> Hashable:
    """What the lists and dicts among a break's arguments hold now, tensors aside."""
    return tuple(_frozen(value) for value in given if isinstance(value, (list, dict)))


def _frozen(value: object) -> Hashable:
    try:
        return freeze(value, [])
    except UnknownLeaf:
        return None


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _meta(tensor: Tensor) -> Tensor:
    lead = skew_bytes(tensor) // tensor.element_size()
    return empty_layout(tensor, lead, torch.device("meta"))
