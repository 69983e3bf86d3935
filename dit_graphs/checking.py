"""Owns what each call asks: is the module still what its graphs were captured from?

Must never know how a signature gets its graph. The surprising fact: a call may begin before its
module is looked at. An eager call is right whatever the module is like, and a replay is looked at
while the device works; only what is learned must be true beforehand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from .cache import Entry, State
from .calls import Call, signature_source
from .errors import CaptureAborted, Reason
from .fallback import EagerCalls
from .module_watch import Change
from .request_scope import Request
from .signature import CallForm

__all__ = ["CheckedCalls"]


class CheckedCalls(EagerCalls, ABC):
    """A holder of graphs that drops or compares them once more where its module has changed."""

    def _check_module(self, request: Request | None) -> bool:
        """Weights, hooks, Python state are as captured; whether a look must still show it.

        Raises `CaptureAborted` where the module allows no graph now.
        """
        self._watch.begin_call()
        if self._watch.is_current(request):
            self._raise_refusal()
            assert request is not None
            return request.is_watched or self._watch.has_unseen_pass
        if self._watch.can_wait():
            return True
        self._pauses.clear()
        self._watch.refresh(request, self._heed)
        source = signature_source(self.module, self.eager)
        if source != self._form_source:  # somebody patched `forward`
            self._form_source = source
            self._form = CallForm(source, self.options.ignore)
        # offload first: then the device of the weights is one of the moment
        self._watch.refusal = self._watch.refusal or self._guarded() or self._follow_weights()
        self._raise_refusal()
        return False

    def _heed(self, change: Change) -> None:
        """For a change that a look found, graphs go, or are compared before they serve again."""
        if change == "weights":
            self.cache.unblock_all()
            self._habits.forget_made()
            if self.cache.held():
                self._invalidate()
            return
        for entry in self.cache.held():
            entry.state = State.CAPTURED  # compared once more before it serves again

    def _raise_refusal(self) -> None:
        if self._watch.refusal is not None:
            raise CaptureAborted(*self._watch.refusal)

    def _follow_weights(self) -> tuple[Reason, str] | None:
        """The runner serves where the weights lie now; the reason if no graph is possible there."""
        here = self._watch.device
        if here is not None and here != self.device:
            self._leave_device()
            self._settle_on(here)
        return (Reason.NO_CUDA, str(here)) if self.backend == "none" else None

    def _is_outdated(self, call: Call) -> bool:
        """Whether the module is no longer what the call was signed for; the call looks once."""
        must_look, call.must_look = call.must_look, False
        return must_look and not self._is_as_signed(call)

    def _is_as_signed(self, call: Call) -> bool:
        watch, request = self._watch, call.request
        if not watch.is_current(request):
            return self._guarded() is None and watch.check_as(call.glance, request)
        if not watch.has_unseen_pass:
            return call.glance is not None and call.glance.is_same()
        if watch.check_as(call.glance, request):
            return True
        if request is not None and not request.is_watched:
            self._own_changes()
        return False

    def _own_changes(self) -> None:
        """What the module holds now is taken for the work of passes that nobody looked at."""
        self._watch.adopt_changes(lambda: False, self._doubt_graphs)

    def _serve_anew(self, entry: Entry, call: Call) -> object:
        """The call's result, from its start: the module is checked first."""
        if call.request is not None:
            call.request.uncount(entry.signature)
        self._watch.forget()
        return self._serve_given(*call.given)

    @abstractmethod
    def _serve_given(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """The result of a call as its caller made it."""
