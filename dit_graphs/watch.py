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
from contextvars import ContextVar, Token
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
from .op_traits import (
    Args,
    Kwargs,
    OpTraits,
    fills_masks,
    iter_tensors,
    storage_key,
    storage_parts,
    tensors_of,
    traits_of,
)
from .origins import Origin, Origins

__all__ = [
    "Args",
    "BreakPolicy",
    "EachOp",
    "Handler",
    "Kwargs",
    "OpTraits",
    "Watch",
    "assume_known",
    "iter_tensors",
    "load_modes",
    "storage_key",
    "storage_parts",
    "traits_of",
    "unwatched",
]

Function = Callable[..., object]
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
        if not traits.is_plain or traits.writes:
            return False
        return any(word in traits.name for word in self.op_words)


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


class EachOp(TorchDispatchMode):
    """Inside, every op goes to `on_op(func, args, kwargs)`."""

    def __init__(self, on_op: Callable[[torch._ops.OpOverload, Args, Kwargs], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_op = on_op

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        return self._on_op(func, args, kwargs or {})


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
        self.origins = Origins()
        self._modes: tuple[EachOp, _Functions] | None = None
        self._token: Token[Watch | None] | None = None

    def __enter__(self) -> Watch:
        self._token = _watching.set(self)
        self._modes = (EachOp(self.on_op), _Functions(self))
        self._modes[0].__enter__()  # type: ignore[no-untyped-call]
        self._modes[1].__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._modes is not None and self._token is not None
        _watching.reset(self._token)
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
    def known_read(self, name: str, read: Callable[[], object]) -> object:
        """`read()` gives values of the device that the signature determines."""

    @abstractmethod
    def ran(self, traits: OpTraits, given: list[Tensor], made: list[Tensor]) -> None:
        """An op of a segment has run."""

    @abstractmethod
    def gave(self, traits: OpTraits, made: list[Tensor]) -> None:
        """An op that is an eager break gave these to the forward."""

    def about_to_run(  # noqa: B027
        self, traits: OpTraits, args: Args, kwargs: Kwargs, written: Iterable[Tensor]
    ) -> None:
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
        traits, given = traits_of(func), tensors_of(args, kwargs)
        if not self.in_break and self._waits_for_device(traits, args, kwargs, given):
            if self.is_known(*given):
                return self.known_read(traits.name, lambda: func(*args, **kwargs))
            self.host_read(traits.name)
        written = traits.written(args, kwargs)
        self.about_to_run(traits, args, kwargs, written)
        if not self.in_break and self.policy.op_words and self.policy.is_op_break(traits):
            site = BreakSite("op", traits.name)
            result = call_break(site, func, args, kwargs)
            made = list(iter_tensors((result,)))
            self.gave(traits, made)  # no mode sees what is done in here
        else:
            result = func(*args, **kwargs)
            made = [result] if isinstance(result, Tensor) else list(iter_tensors((result,)))
            self.ran(traits, given, made)
        self.origins.note(traits, given, written, made)
        return result

    def _waits_for_device(
        self, traits: OpTraits, args: Args, kwargs: Kwargs, given: list[Tensor]
    ) -> bool:
        """Whether the host waits for a device value here; reports copies to the device."""
        reads = traits.reads_host and self._is_host_read(traits, args, kwargs, given)
        is_device = self.device.type != "cpu"
        return (is_device and self._check_devices(traits, args, kwargs, given)) or reads

    def is_device(self, tensor: Tensor) -> bool:
        """Whether reading this tensor's values on the host would wait for the device.

        On a CPU run, device tensors are those that depend on inputs, weights or randomness.
        """
        if self.device.type != "cpu":
            return tensor.device.type == self.device.type
        return self.origins.of(tensor) is not Origin.HOST

    def is_known(self, *tensors: Tensor) -> bool:
        """Whether Python and the signature determine these tensors' values."""
        return all(self.origins.of(tensor) is not Origin.DEVICE for tensor in tensors)

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

    def _is_host_read(
        self, traits: OpTraits, args: Args, kwargs: Kwargs, given: list[Tensor]
    ) -> bool:
        name = traits.name
        if name in ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"):
            return self._is_bool_index(args, name != "aten::index")
        if name == "aten::repeat_interleave" and kwargs.get("output_size") is not None:
            return False
        return any(map(self.is_device, given))

    def _is_bool_index(self, args: Args, is_write: bool) -> bool:
        indices = args[1]
        assert isinstance(indices, (list, tuple))
        masks = [t for t in iter_tensors(indices) if t.dtype in (torch.bool, torch.uint8)]
        if not any(self.is_device(mask) for mask in masks):
            return False
        return not (is_write and isinstance(args[2], Tensor) and fills_masks(args[2]))

    def _check_devices(
        self, traits: OpTraits, args: Args, kwargs: Kwargs, given: list[Tensor]
    ) -> bool:
        """Whether the op copies to the host by itself; copies to the device are reported."""
        here = self.device.type
        on_host = [t for t in given if t.is_cpu]
        target = kwargs.get("device")
        leaves = isinstance(target, torch.device) and target.type == "cpu"
        if leaves and any(t.device.type == here for t in given):
            return True
        if not on_host:
            return False
        arrives = isinstance(target, torch.device) and target.type == here
        mixed = len(on_host) < len(given)
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
        return False


_watching: ContextVar[Watch | None] = ContextVar("dit_graphs_watch", default=None)


def assume_known(*tensors: Tensor) -> None:
    """Host reads of these tensors, and of what follows from them alone, belong to the recording.

    Whoever calls this inside a forward puts what is read of them into the signature. Outside an
    observation or capture it does nothing.
    """
    watch = _watching.get()
    if watch is not None:
        for tensor in tensors:
            watch.origins.set(tensor, Origin.KNOWN)
