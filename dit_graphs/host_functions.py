"""Owns the table of torch functions that touch host memory below dispatch, with what each does.

Must never know graphs. The surprising fact: `x[[0, -1]]` hides a host-to-device copy of the list
and `x.tolist()` a device-to-host one; neither shows in a dispatch mode.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from .buffers import overlaps
from .op_traits import fills_masks
from .tree import UnknownLeaf, tensor_leaves
from .watch import Args, Function, Handler, Kwargs, Watch

__all__ = ["HANDLERS"]


def _device_of(value: object) -> torch.device | None:
    if isinstance(value, torch.device):
        return value
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        return torch.device(value)
    return None


def _default_device() -> torch.device:
    return torch.get_default_device()


def _factory(watch: Watch, func: Function, args: Args, kwargs: Kwargs) -> object:
    """torch.tensor, as_tensor, asarray, Tensor.new_tensor: a constant if it lands on the device."""
    owner = args[0] if func is Tensor.new_tensor else None
    given = args[1:] if owner is not None else args
    data = given[0] if given else kwargs.get("data", kwargs.get("obj"))
    held = _device_tensors(watch, data)
    if held and not isinstance(data, Tensor):  # numbers are read out of the tensors in a list
        return _reading(watch, held, func, args, kwargs)
    device = _device_of(kwargs.get("device"))
    if device is None and len(given) > 2:  # as_tensor(data, dtype, device)
        device = _device_of(given[2])
    if device is None:
        device = owner.device if isinstance(owner, Tensor) else None
    if device is None:
        device = data.device if isinstance(data, Tensor) else _default_device()
    if device.type != watch.device.type or held:
        return func(*args, **kwargs)
    host, kept = {**kwargs, "device": "cpu"}, args[: len(args) - len(given[2:])]
    return watch.constant(
        lambda: _as_tensor(func(*args, **kwargs)), lambda: _as_tensor(func(*kept, **host))
    )


def _as_tensor(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def _device_tensors(watch: Watch, data: object) -> list[Tensor]:
    try:
        return [tensor for tensor in tensor_leaves(data) if watch.is_device(tensor)]
    except UnknownLeaf:
        return []


def _transfer(watch: Watch, func: Function, args: Args, kwargs: Kwargs) -> object:
    """Tensor.to, .cuda, .type: a constant when it brings a host tensor to the device."""
    source = args[0]
    if watch.device.type == "cpu" or not isinstance(source, Tensor):
        return func(*args, **kwargs)
    if source.device.type != "cpu" or _target(watch, func, args, kwargs) != watch.device.type:
        return func(*args, **kwargs)
    return watch.constant(lambda: _as_tensor(func(*args, **kwargs)), lambda: source)


def _target(watch: Watch, func: Function, args: Args, kwargs: Kwargs) -> str:
    if func is Tensor.cuda:
        return "cuda"
    for value in (*args[1:], *kwargs.values()):
        if isinstance(value, Tensor):
            return value.device.type
        if isinstance(value, str) and value.startswith("torch.cuda"):
            return "cuda"
        if isinstance(value, str) and value.startswith("torch."):
            continue
        device = _device_of(value)
        if device is not None:
            return device.type
    return "cpu"


def _copy_in(watch: Watch, func: Function, args: Args, kwargs: Kwargs) -> object:
    """Tensor.copy_ from a host tensor: the source becomes a constant, the copy stays a kernel."""
    target = args[0]
    source = args[1] if len(args) > 1 else kwargs.get("src", kwargs.get("other"))
    if watch.device.type == "cpu" or not (
        isinstance(target, Tensor) and isinstance(source, Tensor)
    ):
        return func(*args, **kwargs)
    if target.device.type != watch.device.type or source.device.type != "cpu":
        return func(*args, **kwargs)
    moved = watch.constant(lambda: source.to(target.device), lambda: source)
    return func(target, moved)


def _indexed(watch: Watch, func: Function, args: Args, kwargs: Kwargs) -> object:
    """Indexing with a Python list or a host tensor: the list becomes a constant index tensor."""
    target, index = args[0], args[1]
    if not isinstance(target, Tensor) or target.device.type != watch.device.type:
        return func(*args, **kwargs)
    if len(args) > 2 and _is_choice(watch, target, index, args[2]):
        _choose(target, index, args[2])
        return None
    given = index if isinstance(index, tuple) else (index,)
    parts = given if _is_masked_fill(args) else _without_known_masks(watch, given)
    moved = tuple(_index_part(watch, part, target.device) for part in parts)
    is_masked = any(isinstance(part, Tensor) and part.dtype is torch.bool for part in moved)
    rest = tuple(_moved_value(watch, value, target, is_masked) for value in args[2:])
    old = (*given, *args[2:])
    if len(moved) == len(given) and all(map(operator.is_, (*moved, *rest), old)):
        return func(*args, **kwargs)
    is_tuple = isinstance(index, tuple) or len(moved) > 1
    return func(target, moved if is_tuple else moved[0], *rest, **kwargs)


def _is_choice(watch: Watch, target: Tensor, mask: object, value: object) -> bool:
    """Whether each place under a device mask gets the same tensor, however many there are."""
    if not (isinstance(mask, Tensor) and mask.dtype is torch.bool and watch.is_device(mask)):
        return False
    if not (isinstance(value, Tensor) and value.device == target.device == mask.device):
        return False
    below = target.shape[mask.dim() :]
    return (
        not watch.is_known(mask)
        and value.dtype is target.dtype
        and mask.shape == target.shape[: mask.dim()]
        and value.dim() <= len(below)
        and all(a in (1, b) for a, b in zip(reversed(value.shape), reversed(below), strict=False))
        and not overlaps(target)
    )


def _choose(target: Tensor, mask: object, value: object) -> None:
    """`target[mask] = value` without asking where the mask is; the same values in every place."""
    assert isinstance(mask, Tensor) and isinstance(value, Tensor)
    places = mask.reshape(*mask.shape, *[1] * (target.dim() - mask.dim()))
    target.copy_(torch.where(places, value, target))


def _is_masked_fill(args: Args) -> bool:
    """A write of one value that the host knows: under a mask it needs no size there."""
    return len(args) > 2 and (not isinstance(args[2], Tensor) or fills_masks(args[2]))


def _without_known_masks(watch: Watch, parts: tuple[object, ...]) -> tuple[object, ...]:
    """A mask that the signature determines becomes the places it marks, one index per side."""
    found: list[object] = []
    for part in parts:
        found.extend(_places(watch, part))
    return tuple(found)


def _places(watch: Watch, part: object) -> tuple[object, ...]:
    if not (isinstance(part, Tensor) and part.dtype is torch.bool and part.dim()):
        return (part,)
    if not (watch.is_device(part) and watch.is_known(part)):
        return (part,)
    places = watch.known_read("mask", lambda: part.nonzero(as_tuple=True))
    assert isinstance(places, tuple)
    return places


def _moved_value(watch: Watch, value: object, target: Tensor, is_masked: bool) -> object:
    """What is written into a device tensor, on the device: a host tensor becomes a constant.

    A number too: torch would bring it over as a CPU tensor. Not one value under a mask, whose fill
    wants it on the host.
    """
    device = target.device
    if device.type == "cpu":
        return value
    if isinstance(value, Tensor) and value.device.type == "cpu":
        if is_masked and fills_masks(value):
            return value
        return watch.constant(lambda: value.to(device), lambda: value)
    if isinstance(value, (bool, int, float, complex)) and not is_masked:
        return torch.full((), value, dtype=target.dtype, device=device)
    return value


def _index_part(watch: Watch, part: object, device: torch.device) -> object:
    if isinstance(part, (list, range)) and part and _is_int_list(part):
        values = list(part)
        return watch.constant(
            lambda: torch.tensor(values, device=device), lambda: torch.tensor(values, device="cpu")
        )
    if isinstance(part, Tensor) and part.dim() and part.device.type == "cpu" != device.type:
        source = part if part.dtype is not torch.bool else part.nonzero().flatten()
        if part.dtype is torch.bool and part.dim() > 1:
            return part
        return watch.constant(lambda: source.to(device), lambda: source)
    return part


def _is_int_list(values: object) -> bool:
    if isinstance(values, (list, range)):
        return all(_is_int_list(item) for item in values)
    return isinstance(values, int) and not isinstance(values, bool)


def _host_read(watch: Watch, func: Function, args: Args, kwargs: Kwargs) -> object:
    """tolist, numpy, cpu, printing: reads of a device tensor that no op shows."""
    return _reading(watch, _device_tensors(watch, args[0]), func, args, kwargs)


def _split(watch: Watch, func: Function, args: Args, kwargs: Kwargs) -> object:
    """tensor_split reads the places from a tensor, if they are one."""
    places = args[1] if len(args) > 1 else kwargs.get("tensor_indices_or_sections")
    held = _device_tensors(watch, places) if isinstance(places, Tensor) else []
    return _reading(watch, held, func, args, kwargs)


def _reading(
    watch: Watch, sources: list[Tensor], func: Function, args: Args, kwargs: Kwargs
) -> object:
    """The call, which reads `sources` on the host."""
    owner = "torch" if func in (torch.tensor, torch.as_tensor, torch.asarray) else "Tensor"
    name = f"{owner}.{getattr(func, '__name__', 'read')}"
    if sources and watch.is_known(*sources):
        return watch.known_read(name, lambda: func(*args, **kwargs))
    if sources:
        watch.host_read(name)
    return func(*args, **kwargs)


_TABLE: dict[Function, Handler] = {
    torch.tensor: _factory,
    torch.as_tensor: _factory,
    torch.asarray: _factory,
    Tensor.new_tensor: _factory,
    Tensor.to: _transfer,
    Tensor.cuda: _transfer,
    Tensor.type: _transfer,
    Tensor.copy_: _copy_in,
    Tensor.__getitem__: _indexed,
    Tensor.__setitem__: _indexed,
    torch.tensor_split: _split,
    Tensor.tensor_split: _split,
    Tensor.tolist: _host_read,
    Tensor.numpy: _host_read,
    Tensor.cpu: _host_read,
    Tensor.__array__: _host_read,
    Tensor.__repr__: _host_read,
}

HANDLERS: Mapping[Function, Handler] = MappingProxyType(_TABLE)
