"""Owns how calls reach a runner: on `Module.__call__`, or on one bound method.

Must never know signatures or graphs. The surprising facts: the object put in
`module._compiled_call_impl` is false in a boolean test. torch asks "is not None" and calls it,
while peft asks "is it set?" to find compiled models, and must see an ordinary one. And somebody may
build on what we put there: what is taken off must go on passing calls through for them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from .errors import ConfigError

__all__ = ["CALL", "CallIntercept", "Intercept", "MethodOverride", "find_intercept", "install"]

Function = Callable[..., object]
CALL = "_compiled_call_impl"


class Intercept:
    """An instance attribute `name` of `owner` that passes every call to `serve`.

    It stays as long as it has `users`; each of them drops it once. Shared by pipelines that share
    the owner.
    """

    def __init__(self, owner: object, name: str, previous: Function | None) -> None:
        self.owner = owner
        self.name = name
        self.previous = previous
        self._was_set = name in vars(owner)
        self.users: list[object] = []
        self.serve: Function = self.pass_through

    @property
    def original(self) -> Function:
        """What a call reaches without us."""
        raise AssertionError("each kind says so")

    def pass_through(self, *args: object, **kwargs: object) -> object:
        """The call as if nothing stood here."""
        return self.original(*args, **kwargs)

    def __call__(self, *args: object, **kwargs: object) -> object:
        # inside a function that torch.compile made, traced or run
        if torch.compiler.is_compiling() or get_eval_frame_callback():
            return torch.compiler.disable(self._serve)(*args, **kwargs)
        return self.serve(*args, **kwargs)

    def _serve(self, *args: object, **kwargs: object) -> object:
        return self.serve(*args, **kwargs)

    @property
    def is_in_place(self) -> bool:
        """Whether the owner's attribute is this object: nobody built on it or overwrote it."""
        return vars(self.owner).get(self.name) is self

    def put(self, user: object) -> None:
        """The owner's attribute is this object; `user` needs it."""
        # not setattr: torch.compile's OptimizedModule passes that on to the module inside it
        vars(self.owner)[self.name] = self
        self.users.append(user)

    def drop(self, user: object) -> bool:
        """`user` needs it no longer. After the last one the attribute is what it was: True.

        Where somebody built on it since, it stays below theirs and only passes calls through.
        """
        if user not in self.users:
            return False
        self.users.remove(user)
        if self.users:
            return False
        if not self.is_in_place:
            self.serve = self.pass_through
            return True
        self.serve = self.original  # no method of its own: that cycle would keep the owner
        if self._was_set:
            vars(self.owner)[self.name] = self.previous
        else:
            del vars(self.owner)[self.name]
        return True


# Dynamo must run this as it is, and what it calls: traced, our look-ups would be baked or break.
Intercept.__call__._torchdynamo_disable = True  # type: ignore[attr-defined]


class CallIntercept(Intercept):
    """What `Module.__call__` finds."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        super().__init__(module, CALL, module.__dict__.get(CALL))

    @property
    def original(self) -> Function:
        return self.previous if self.previous is not None else self.module._call_impl

    @property
    def keeps_eager(self) -> bool:
        """Whether what lies below is not compiled; asked where compiled modules are refused."""
        return self.previous is None or getattr(self.previous, "keeps_eager", False)

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> tuple[Function, tuple[object, ...]]:
        return _nothing, ()  # a pickled or copied module is a plain one


class MethodOverride(Intercept):
    """An instance attribute that stands before the class's own method of the same name.

    Copies and pickles of its owner get the class's method back.
    """

    keeps_eager = True

    def __init__(self, owner: object, name: str) -> None:
        super().__init__(owner, name, vars(owner).get(name))
        self.__name__ = name
        self.__doc__ = getattr(type(owner), name).__doc__
        self.__wrapped__ = self.original

    @property
    def original(self) -> Function:
        if self.previous is not None:
            return self.previous
        bound: Function = getattr(type(self.owner), self.name).__get__(self.owner)
        return bound

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        return _copied_method(memo.get(id(self.owner)), type(self.owner), self.name)

    def __reduce__(self) -> tuple[Function, tuple[object, ...]]:
        return _copied_method, (self.owner, type(self.owner), self.name)


def _nothing() -> None:
    return None


def _copied_method(owner: object, kind: type, name: str) -> object:
    """The class's method bound to the copy where it is known already."""
    if owner is not None:
        return getattr(kind, name).__get__(owner)
    return getattr(kind, name)


def install(
    module: nn.Module, method: str, make: Callable[[Function], Function], user: object = None
) -> Intercept:
    """Calls of `module` (or of its `method`) go to `make(original)` while `user` needs it.

    Raises `ConfigError` where the module has no such method.
    """
    if method == "forward":
        intercept: Intercept = CallIntercept(module)
    elif callable(getattr(type(module), method, None)):
        intercept = MethodOverride(module, method)
    else:
        raise ConfigError(f"{type(module).__name__} has no method {method!r}")
    intercept.serve = make(intercept.original)
    intercept.put(user)
    return intercept


def find_intercept(module: nn.Module, method: str) -> Intercept | None:
    """The intercept on top of `module`'s calls (or of its `method`), if any user needs it."""
    found = module.__dict__.get(CALL if method == "forward" else method)
    return found if isinstance(found, Intercept) and found.users else None
