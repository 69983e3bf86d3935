"""Owns one wrapped call and what a runner is told about its method.

Must never know graphs. The surprising fact: a module's device is asked of its weights each time it
matters, because `pipe.to("cuda")` may come after `accelerate`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor, nn

from .config import BackendName
from .errors import CaptureAborted, Reason
from .glance import Glance
from .request_scope import Request
from .signature import Signature, registered_leaves
from .tree import UnknownLeaf, freeze
from .watch import BreakPolicy

__all__ = [
    "Call",
    "Carried",
    "Eager",
    "Family",
    "Padding",
    "RunnerOptions",
    "check_tensors",
    "device_of",
    "resolve_backend",
    "signature_source",
]

Eager = Callable[..., object]


class Carried(Protocol):
    """What one module hands from call to call. A state is a tree of tensors and plain values."""

    def begin(self) -> object | None:
        """The state the next call starts from; None where nothing is carried now."""

    def put(self, state: object) -> None:
        """The forward will find `state`."""

    def take(self) -> object:
        """The state the forward left."""

    def end(self, state: object) -> None:
        """The call is over and left `state`."""

    def branch(self) -> Hashable:
        """What this call is expected to decide on the host, or has decided."""

    def deciding(self) -> AbstractContextManager[None]:
        """Inside, decisions of the forward are eager breaks, or were made beforehand."""


class Family(Protocol):
    """What one family of models needs for its forward to be recorded. Plain calls never see it."""

    def open(self) -> None:
        """The module is served from now on."""

    def close(self) -> None:
        """The module is as it was before `open`."""

    def prepare(self, named: dict[str, object]) -> dict[str, object]:
        """The arguments a graph is recorded over, made from those of the call."""

    def facts(self) -> Hashable:
        """What the forward reads of the arguments prepared last; a part of the signature."""

    def run(self, eager: Eager, named: dict[str, object]) -> object:
        """The forward's result for prepared arguments."""


class Padding(Protocol):
    """What makes calls of other sizes one signature, at the price of other bits."""

    def pad(self, named: dict[str, object], eager: Eager) -> dict[str, object]:
        """The arguments of the padded call; eager calls get them as well."""

    def report(self) -> list[dict[str, object]]:
        """What padding was measured to change, JSON-serialisable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """What a runner is told about its method besides the config."""

    component: str = "module"
    label: str = ""
    key: Callable[[], Hashable] | None = None
    ignore: tuple[str, ...] = ()
    policy: BreakPolicy = field(default_factory=BreakPolicy)
    guard: Callable[[], tuple[Reason, str] | None] | None = None
    describe: Callable[[Signature], str] | None = None
    carried: Carried | None = None
    family: Family | None = None
    padding: Padding | None = None


@dataclass(slots=True)
class Call:
    """One call: as the caller wrote it (`args`, `kwargs`), and normalised (`positional`, `named`).

    `arguments`: the tree of it that was signed; `tensors`: the tensor leaves of that, in order.
    `names_generators`: its signature tells one random generator from another. `has_turned`: a
    decision inside it has already led to another graph than the expected one. `must_look`: whether
    the module is as `glance` stands for it, for which the call was signed, is still to be looked
    at; where it is not, `given` is called anew.
    """

    given: tuple[tuple[object, ...], dict[str, object]]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    positional: tuple[object, ...]
    named: dict[str, object]
    arguments: object
    tensors: list[Tensor]
    request: Request | None
    names_generators: bool
    must_look: bool
    glance: Glance | None
    has_turned: bool = False

    def is_whole(self, signature: Signature) -> bool:
        """Whether its containers still hold what was signed: an eager forward may empty them."""
        keys, named = registered_leaves(), self.names_generators
        try:
            now = freeze(self.arguments, [], keys, names_generators=named)
        except UnknownLeaf:  # it put something there
            return False
        return now == signature.structure


def device_of(module: nn.Module) -> torch.device:
    """Where the module's weights lie; the current device for a module without any."""
    for tensor in chain(module.parameters(), module.buffers()):  # the first, asked in every call
        return tensor.device
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def resolve_backend(name: BackendName, device: torch.device) -> str:
    """What "auto" means on this device; "none" where no graph is possible."""
    if name == "off":
        return "off"
    if device.type == "cuda":
        return name
    return name if name in ("recorded", "debug") else "none"


def signature_source(module: nn.Module, eager: Eager) -> Eager:
    """The function whose parameters a call of `eager` fills."""
    called = getattr(eager, "__wrapped__", eager)
    if getattr(called, "__func__", None) is nn.Module._call_impl:
        return module.forward
    return eager


def check_tensors(tensors: list[Tensor], device: torch.device) -> None:
    """Raises `CaptureAborted` for a tensor that no static buffer on `device` can stand for."""
    for tensor in tensors:
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
            raise CaptureAborted(Reason.TENSOR_SUBCLASS, type(tensor).__name__)
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            raise CaptureAborted(Reason.UNSUPPORTED_ARGUMENT, str(tensor.layout))
        if tensor.device != device and tensor.device.type != "cpu":
            raise CaptureAborted(Reason.OTHER_DEVICE, str(tensor.device))
