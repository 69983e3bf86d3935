"""Owns the two torch modes that see everything one forward does: `Watch` and its two kinds.

`Observer` (observer.py) records during an eager pass; `Guard` refuses during a capture. Must
never know CUDA graphs. The surprising fact: a dispatch mode alone is blind, because
`torch.tensor`, `.tolist()` and list indexing reach the device below dispatch, so a function mode
stands on top of it.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import FrameType, MappingProxyType, TracebackType
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .breaks import BreakSite, call_break
from .constants import Occurrences, caller_location

__all__ = [
    "BreakPolicy",
    "Handler",
    "OpTraits",
    "Watch",
    "iter_tensors",
    "load_modes",
    "storage_key",
    "storage_parts",
    "traits_of",
    "unwatched",
]

Function = Callable[..., object]
Args = tuple[object, ...]
Kwargs = dict[str, object]
Handler = Callable[["Watch", Function, Args, Kwargs], object]


@dataclass(frozen=True, slots=True)
class BreakPolicy:
    """Which functions, ops and submodules run as eager breaks.

    `op_words`: an op whose full name contains one of them is a break. `modules`: paths.
    """

    functions: tuple[Function, ...] = ()
    op_words: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()

    def is_op_break(self, traits: OpTraits) -> bool:
        """Only ops without any alias annotation may be broken out of a segment."""
        if not traits.is_plain:
            return False
        return any(word in traits.name for word in self.op_words)


@dataclass(frozen=True, slots=True)
class OpTraits:
    """What the schema says of one ATen op, computed once per op."""

    name: str
    is_view: bool
    is_plain: bool
    writes: tuple[int | str, ...]
    reads_host: bool
    is_random: bool
    is_allocation: bool

    @property
    def launches(self) -> bool:
        """Whether the op does device work: views and bare allocations do none."""
        return not (self.is_view or self.is_allocation)

    def written(self, args: Args, kwargs: Kwargs) -> Iterable[Tensor]:
        """The tensors this call writes in place."""
        for place in self.writes:
            if isinstance(place, str):
                yield from iter_tensors((kwargs.get(place),))
            elif place < len(args):
                yield from iter_tensors((args[place],))


_HOST_READ_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_NEVER_HOST_READ = ("aten::nonzero_static",)
_ALLOCATIONS = frozenset(
    f"aten::{name}"
    for name in (
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
    )
)
_ORDINARY = (Tensor, nn.Parameter, nn.Buffer)
_traits: dict[object, OpTraits] = {}


def traits_of(func: torch._ops.OpOverload) -> OpTraits:
    """The cached traits of an op."""
    found = _traits.get(func)
    if found is None:
        _traits[func] = found = _read_traits(func)
    return found


def _read_traits(func: torch._ops.OpOverload) -> OpTraits:
    schema = func._schema
    writes: list[int | str] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes.append(argument.name if argument.kwarg_only else position)
    aliased = any(a.alias_info is not None for a in (*schema.arguments, *schema.returns))
    reads = any(tag in func.tags for tag in _HOST_READ_TAGS)
    return OpTraits(
        name=schema.name,
        is_view=aliased and not writes,
        is_plain=not aliased,
        writes=tuple(writes),
        reads_host=reads and schema.name not in _NEVER_HOST_READ,
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        is_allocation=schema.name in _ALLOCATIONS,
    )


def iter_tensors(values: Iterable[object]) -> Iterable[Tensor]:
    """Tensors among op arguments: direct, or in lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from iter_tensors(value)


def storage_key(tensor: Tensor) -> int:
    """The address of a tensor's storage; 0 for an empty one."""
    return tensor.untyped_storage().data_ptr()


def storage_parts(tensor: Tensor) -> Iterable[Tensor]:
    """The tensors that own its memory: itself, or what a subclass (a quantised weight) wraps."""
    flatten = None if type(tensor) in _ORDINARY else getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        yield from storage_parts(getattr(tensor, name))


@contextmanager
def unwatched() -> Iterator[None]:
    """Inside, our own bookkeeping runs below every mode, so that none of it is seen."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def load_modes() -> None:
    """torch's dispatch modes are ready: their first use imports Dynamo, which takes a second.

    Inside an observed forward that import would also keep the forward's frames, and with them its
    tensors, alive until the collector runs.
    """
    import_module("torch._dynamo")


class _Functions(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        return self.watch.on_function(func, args, kwargs or {})


class _Dispatch(TorchDispatchMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watch = watch

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        return self.watch.on_op(func, args, kwargs or {})


class Watch(ABC):
    """Sees one forward of `module` on `device`. Use as a context manager around the call."""

    handlers: ClassVar[Mapping[Function, Handler]] = MappingProxyType({})

    def __init__(self, module: nn.Module, device: torch.device, policy: BreakPolicy) -> None:
        self.module = module
        self.device = device
        self.policy = policy
        self.occurrences = Occurrences()
        self.in_break = 0
        self._paths = {id(child): path for path, child in module.named_modules()}
        self._host_only: set[int] = set()
        self._modes: tuple[_Dispatch, _Functions] | None = None

    def __enter__(self) -> Watch:
        self._modes = (_Dispatch(self), _Functions(self))
        self._modes[0].__enter__()  # type: ignore[no-untyped-call]
        self._modes[1].__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._modes is not None
        dispatch, functions = self._modes
        self._modes = None  # no cycle: a dead watch must not keep tensors until the collector runs
        functions.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        dispatch.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    # What the two kinds decide.
    @abstractmethod
    def host_read(self, name: str) -> None:
        """A device value is about to be read on the host."""

    @abstractmethod
    def host_copy(self, name: str) -> None:
        """A copy between host and device that no constant explains is about to run."""

    @abstractmethod
    def constant(self, build: Callable[[], Tensor], source: Callable[[], Tensor]) -> Tensor:
        """`build()` makes a device tensor from the host tensor that `source()` computes."""

    @abstractmethod
    def ran(self, traits: OpTraits, args: Args, kwargs: Kwargs, result: object) -> None:
        """An op of a segment has run."""

    def about_to_run(self, traits: OpTraits, args: Args, kwargs: Kwargs) -> None:  # noqa: B027
        """An op, of a segment or of a break, is next; what it writes still holds old values."""

    # Function level.
    def on_function(self, func: Function, args: Args, kwargs: Kwargs) -> object:
        if self.in_break:
            return func(*args, **kwargs)
        if func in self.policy.functions:
            name = getattr(func, "__name__", "function")
            return call_break(BreakSite("op", name), func, args, kwargs)
        handler = self.handlers.get(func)
        if handler is None:
            return func(*args, **kwargs)
        return handler(self, func, args, kwargs)

    # Dispatch level.
    def on_op(self, func: torch._ops.OpOverload, args: Args, kwargs: Kwargs) -> object:
        traits = traits_of(func)
        if not self.in_break:
            if traits.reads_host and self._is_host_read(traits, args, kwargs):
                self.host_read(traits.name)
            if self.device.type != "cpu":
                self._check_devices(traits, args, kwargs)
        self.about_to_run(traits, args, kwargs)
        if not self.in_break and self.policy.op_words and self.policy.is_op_break(traits):
            site = BreakSite("op", traits.name)
            result = call_break(site, func, args, kwargs)
        else:
            result = func(*args, **kwargs)
            self.ran(traits, args, kwargs, result)
        if self.device.type == "cpu":
            self._note_origin(traits, args, kwargs, result)
        return result

    def is_device(self, tensor: Tensor) -> bool:
        """Whether reading this tensor's values on the host would wait for the device.

        On a CPU run, device tensors are those that depend on inputs, weights or randomness.
        """
        if self.device.type != "cpu":
            return tensor.device.type == self.device.type
        return storage_key(tensor) not in self._host_only

    def location(self) -> tuple[str, str]:
        """(path of the innermost watched submodule, `file:line`) of the running code."""
        frame: FrameType | None = sys._getframe(1)
        code = nn.Module._call_impl.__code__
        while frame is not None:
            if frame.f_code is code:
                path = self._paths.get(id(frame.f_locals.get("self")))
                if path is not None:
                    return path, caller_location()
            frame = frame.f_back
        return "", caller_location()

    def _is_host_read(self, traits: OpTraits, args: Args, kwargs: Kwargs) -> bool:
        name = traits.name
        if name in ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"):
            return self._is_bool_index(args, name != "aten::index")
        if name == "aten::repeat_interleave" and kwargs.get("output_size") is not None:
            return False
        return any(self.is_device(t) for t in iter_tensors((*args, *kwargs.values())))

    def _is_bool_index(self, args: Args, is_write: bool) -> bool:
        indices = args[1]
        assert isinstance(indices, (list, tuple))
        masks = [t for t in iter_tensors(indices) if t.dtype in (torch.bool, torch.uint8)]
        if not any(self.is_device(mask) for mask in masks):
            return False
        # a masked write of one value is a masked fill: no size is needed on the host
        return not (is_write and isinstance(args[2], Tensor) and args[2].numel() == 1)

    def _check_devices(self, traits: OpTraits, args: Args, kwargs: Kwargs) -> None:
        tensors = list(iter_tensors((*args, *kwargs.values())))
        here = self.device.type
        on_host = [t for t in tensors if t.device.type == "cpu"]
        target = kwargs.get("device")
        leaves = isinstance(target, torch.device) and target.type == "cpu"
        if leaves and any(t.device.type == here for t in tensors):
            self.host_read(traits.name)
            return
        if not on_host:
            return
        arrives = isinstance(target, torch.device) and target.type == here
        mixed = len(on_host) < len(tensors)
        copies = traits.name in ("aten::copy_", "aten::copy") or (
            traits.name.startswith("aten::index_put") and any(t.dim() for t in on_host)
        )
        if arrives or (mixed and copies):
            if traits.name == "aten::copy_" and on_host[0] is args[0]:
                self.host_read(traits.name)
            else:
                self.host_copy(traits.name)
        elif mixed:
            for scalar in on_host:
                self.constant(lambda s=scalar: s, lambda s=scalar: s)  # type: ignore[misc]

    def _note_origin(self, traits: OpTraits, args: Args, kwargs: Kwargs, result: object) -> None:
        inputs = list(iter_tensors((*args, *kwargs.values())))
        keys = {storage_key(t) for t in inputs}
        fresh = traits.name in ("aten::lift_fresh", "aten::lift_fresh_copy")
        pure = fresh or (not traits.is_random and keys <= self._host_only)
        outputs = [result] if isinstance(result, Tensor) else result
        if not isinstance(outputs, (list, tuple)):
            return
        for tensor in iter_tensors(outputs):
            key = storage_key(tensor)
            if pure:
                self._host_only.add(key)
            else:
                self._host_only.discard(key)
