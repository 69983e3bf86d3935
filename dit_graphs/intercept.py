"""Owns how calls reach a runner: on `Module.__call__`, or on one bound method.

Must never know signatures or graphs. The surprising fact: the object put in
`module._compiled_call_impl` is false in a boolean test. torch asks "is not None" and calls it,
while peft asks "is it set?" to find compiled models, and must see an ordinary one.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from .errors import ConfigError

__all__ = ["CallIntercept", "MethodOverride", "find_intercept", "install", "remove"]

Function = Callable[..., object]


class CallIntercept:
    """What `Module.__call__` finds; passes every call to `serve`."""

    def __init__(self, module: nn.Module, serve: Function, previous: Function | None) -> None:
        self.module = module
        self.serve = serve
        self.previous = previous

    @property
    def keeps_eager(self) -> bool:
        """Whether what lies below is not compiled; asked where compiled modules are refused."""
        return self.previous is None or getattr(self.previous, "keeps_eager", False)

    def __bool__(self) -> bool:
        return False

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.serve(*args, **kwargs)

    def __reduce__(self) -> tuple[Function, tuple[object, ...]]:
        return _nothing, ()  # a pickled or copied module is a plain one


# Dynamo must run this as it is: tracing it would bake our look-ups into a compiled graph.
CallIntercept.__call__._torchdynamo_disable = True  # type: ignore[attr-defined]


class MethodOverride:
    """An instance attribute that stands before the class's own method of the same name.

    Copies and pickles of its owner get the class's method back.
    """

    keeps_eager = True

    def __init__(self, owner: object, name: str, serve: Function) -> None:
        self.owner = owner
        self.name = name
        self.serve = serve
        self.previous = vars(owner).get(name)
        self.__name__ = name
        self.__doc__ = getattr(type(owner), name).__doc__
        self.__wrapped__ = self.original

    @property
    def original(self) -> Function:
        """The method as it was, bound to the owner."""
        if self.previous is not None:
            return self.previous  # type: ignore[no-any-return]
        bound: Function = getattr(type(self.owner), self.name).__get__(self.owner)
        return bound

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.serve(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        return _copied_method(memo.get(id(self.owner)), type(self.owner), self.name)

    def __reduce__(self) -> tuple[Function, tuple[object, ...]]:
        return _copied_method, (self.owner, type(self.owner), self.name)

    def put(self) -> None:
        """The owner's attribute is this object."""
        object.__setattr__(self.owner, self.name, self)

    def take_off(self) -> None:
        """The owner's attribute is what it was."""
        if vars(self.owner).get(self.name) is not self:
            return
        if self.previous is None:
            object.__delattr__(self.owner, self.name)
        else:
            object.__setattr__(self.owner, self.name, self.previous)


def _nothing() -> None:
    return None


def _copied_method(owner: object, kind: type, name: str) -> object:
    """The class's method bound to the copy where it is known already."""
    if owner is not None:
        return getattr(kind, name).__get__(owner)
    return getattr(kind, name)


def install(module: nn.Module, method: str, make: Callable[[Function], Function]) -> object:
    """Calls of `module` (or of its `method`) go to `make(original)`; returns the intercept.

    Raises `ConfigError` where the module has no such method.
    """
    if method == "forward":
        previous = module.__dict__.get("_compiled_call_impl")
        original: Function = previous if previous is not None else module._call_impl
        intercept = CallIntercept(module, make(original), previous)
        # not setattr: torch.compile's OptimizedModule passes that on to the module inside it
        module.__dict__["_compiled_call_impl"] = intercept
        return intercept
    if not callable(getattr(type(module), method, None)):
        raise ConfigError(f"{type(module).__name__} has no method {method!r}")
    override = MethodOverride(module, method, _nothing)
    override.serve = make(override.original)
    override.put()
    return override


def find_intercept(module: nn.Module, method: str) -> CallIntercept | MethodOverride | None:
    """The intercept installed on `module` for `method`, or None."""
    name = "_compiled_call_impl" if method == "forward" else method
    found = module.__dict__.get(name)
    return found if isinstance(found, (CallIntercept, MethodOverride)) else None


def remove(module: nn.Module, method: str) -> None:
    """The module is exactly as before `install`."""
    found = find_intercept(module, method)
    if isinstance(found, MethodOverride):
        found.take_off()
    elif isinstance(found, CallIntercept):
        if found.previous is None:
            module.__dict__.pop("_compiled_call_impl", None)
        else:
            module.__dict__["_compiled_call_impl"] = found.previous
