"""A wrapped module beside its untouched copy: every call goes to both and is compared bit for bit.

Owns the comparison of results, of arguments written in place, of buffers and of the random stream.
Before each call the outputs of every recording are poisoned, so a replay that does nothing shows
up as NaN and not as yesterday's right answer. The surprising fact: the copy is called second, from
the same random state, and must end at the same one.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import random
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

import dit_graphs
from dit_graphs.runner import GraphRunner
from dit_graphs.wrapping import runner_of

__all__ = ["Twin", "Where", "difference", "random_state", "set_random_state"]


@dataclasses.dataclass(frozen=True, slots=True)
class Where:
    """A backend and the device it runs on."""

    backend: str
    device: torch.device

    def randn(self, *shape: int, seed: int = 0) -> Tensor:
        """Seeded normal values, equal on every device."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator).to(self.device)


def difference(left: object, right: object, path: str = "result") -> str | None:
    """None where both trees have the same types, values, layouts and bits; else what differs."""
    if type(left) is not type(right):
        return f"{path}: {type(left).__name__} against {type(right).__name__}"
    if isinstance(left, Tensor):
        assert isinstance(right, Tensor)
        return _tensor_difference(left, right, path)
    if isinstance(left, Mapping):
        assert isinstance(right, Mapping)
        if list(left) != list(right):
            return f"{path}: keys {list(left)} against {list(right)}"
        pairs = [(f"{path}[{key!r}]", left[key], right[key]) for key in left]
    elif isinstance(left, (list, tuple)):
        assert isinstance(right, (list, tuple))
        if len(left) != len(right):
            return f"{path}: {len(left)} items against {len(right)}"
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(left, right, strict=True))]
    elif dataclasses.is_dataclass(left):
        names = [field.name for field in dataclasses.fields(left)]
        pairs = [(f"{path}.{name}", getattr(left, name), getattr(right, name)) for name in names]
    else:
        return None if left == right else f"{path}: {left!r} against {right!r}"
    found = (difference(a, b, where) for where, a, b in pairs)
    return next((text for text in found if text is not None), None)


def _tensor_difference(left: Tensor, right: Tensor, path: str) -> str | None:
    mine = (left.dtype, tuple(left.shape), left.stride(), left.device)
    theirs = (right.dtype, tuple(right.shape), right.stride(), right.device)
    if mine != theirs:
        return f"{path}: {mine} against {theirs}"
    if _bytes(left) != _bytes(right):
        wrong = (left != right).float().mean().item()
        return f"{path}: {wrong:.0%} of {left.numel()} elements differ"
    return None


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def random_state(device: torch.device) -> list[Tensor]:
    """The default generators' states: the host's, and the device's where that is another."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def set_random_state(device: torch.device, states: list[Tensor]) -> None:
    """The default generators continue from `states`."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def _host_streams() -> tuple[object, bytes]:
    return random.getstate(), pickle.dumps(np.random.get_state())


def _set_host_streams(states: tuple[object, bytes]) -> None:
    random.setstate(states[0])
    np.random.set_state(pickle.loads(states[1]))


class Twin:
    """`module` wrapped, and a copy of it that never was."""

    def __init__(self, module: nn.Module, where: Where, **overrides: object) -> None:
        self.where = where
        self.module = module.to(where.device).eval()
        self.plain = copy.deepcopy(self.module)
        dit_graphs.wrap(self.module, **{"backend": where.backend, **overrides})

    @property
    def runner(self) -> GraphRunner:
        runner = runner_of(self.module)
        assert runner is not None
        return runner

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The wrapped module's result, which is the copy's; so are all traces of the call.

        What the model raises is raised, if both raise the same.
        """
        given = copy.deepcopy((args, kwargs))
        before, hosts = random_state(self.where.device), _host_streams()
        self.poison()
        result, error = _attempt(self.module, args, kwargs)
        after, hosts_after = random_state(self.where.device), _host_streams()
        set_random_state(self.where.device, before)
        _set_host_streams(hosts)
        expected, expected_error = _attempt(self.plain, *given)
        if error is not None and repr(error) != repr(expected_error):
            raise AssertionError(
                f"raised {error!r}, the plain module {expected_error!r}"
            ) from error
        assert repr(error) == repr(expected_error)
        assert difference(result, expected) is None, difference(result, expected)
        self._check_traces((args, kwargs), given)
        stream = zip(after, random_state(self.where.device), strict=True)
        assert all(torch.equal(a, b) for a, b in stream), "the random stream is another"
        assert hosts_after == _host_streams(), "Python's or numpy's random stream is another"
        if error is not None:
            raise error
        return result

    def _check_traces(self, mine: object, theirs: object) -> None:
        found = difference(mine, theirs, "arguments")
        assert found is None, found
        buffers = dict(self.module.named_buffers()), dict(self.plain.named_buffers())
        found = difference(*buffers, "buffers")
        assert found is None, found
        weights = dict(self.module.named_parameters()), dict(self.plain.named_parameters())
        found = difference(*weights, "parameters")
        assert found is None, found

    def poison(self) -> None:
        """The outputs of every recording hold NaN."""
        for entry in self.runner.cache.held():
            assert entry.recording is not None
            entry.recording.poison()

    def until_replayed(self, make: Callable[[int], tuple[object, ...]], limit: int = 8) -> int:
        """Calls with `make(0)`, `make(1)`… until a call was served by a graph; how many it took."""
        for index in range(limit):
            before = self.replays
            self(*make(index))
            if self.replays > before:
                return index + 1
        raise AssertionError(f"no replay in {limit} calls: {self.fallbacks} {self.details}")

    @property
    def replays(self) -> int:
        return self.runner.stats.replays

    @property
    def captures(self) -> int:
        return self.runner.stats.captures

    @property
    def fallbacks(self) -> dict[str, int]:
        """Eager calls by reason."""
        return {reason.value: count for reason, count in self.runner.stats.fallbacks.items()}

    @property
    def details(self) -> dict[str, str]:
        return {reason.value: text for reason, text in self.runner.stats.details.items()}

    @property
    def graphs(self) -> int:
        return len(self.runner.cache.held())


def _attempt(
    module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[object, Exception | None]:
    try:
        return module(*args, **kwargs), None
    except AssertionError:
        raise
    except Exception as error:
        return None, error
