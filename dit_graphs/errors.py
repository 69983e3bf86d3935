"""Owns the errors users can meet and the closed list of reasons a call did not use a graph.

Must never know torch: every other module imports this one. The surprising fact: a missed
graph is never an error here; it is a `Reason`, counted and logged, and the eager result is
returned. Errors are for user mistakes and for `strict=True`.
"""

from __future__ import annotations

from enum import Enum

__all__ = [
    "BreakFailed",
    "CaptureAborted",
    "ConfigError",
    "FallbackError",
    "GraphError",
    "Reason",
    "forget_refusals",
]


class Reason(str, Enum):
    """Why a call ran eagerly. Closed: a new reason is a new member with a sentence."""

    WARMING_UP = "warming_up"
    NOT_ADMITTED = "not_admitted"
    DISABLED = "disabled"
    KILL_SWITCH = "kill_switch"
    NO_CUDA = "no_cuda"
    GRAD_ENABLED = "grad_enabled"
    FOREIGN_MODE = "foreign_mode"
    TENSOR_SUBCLASS = "tensor_subclass"
    UNSUPPORTED_ARGUMENT = "unsupported_argument"
    UNSUPPORTED_OUTPUT = "unsupported_output"
    SIGNATURE_TOO_LARGE = "signature_too_large"
    VARYING_SCALAR = "varying_scalar"
    WARMUP_ONLY = "warmup_only"
    HOST_READ = "host_read"
    HOST_COPY = "host_copy"
    CONSTANT_CHANGED = "constant_changed"
    CAPTURE_FAILED = "capture_failed"
    CAPTURE_GATE_BUSY = "capture_gate_busy"
    NESTED_REPLAY = "nested_replay"
    VERIFY_MISMATCH = "verify_mismatch"
    EAGER_NONDETERMINISTIC = "eager_nondeterministic"
    BREAK_NOT_ALLOWED = "break_not_allowed"
    BREAK_VALUE_CHANGED = "break_value_changed"
    BREAK_SHAPE_CHANGED = "break_shape_changed"
    BREAK_RAISED = "break_raised"
    COMPUTE_BOUND = "compute_bound"
    MAX_GRAPHS = "max_graphs"
    MEMORY_BUDGET = "memory_budget"
    LOW_MEMORY = "low_memory"
    OUT_OF_MEMORY = "out_of_memory"
    ALLOCATOR = "allocator"
    OFFLOAD = "offload"
    LAYERWISE_CASTING = "layerwise_casting"
    STEP_CACHE = "step_cache"
    HOOKS = "hooks"
    OTHER_DEVICE = "other_device"
    COMPILED = "compiled"
    PYTHON_STATE = "python_state"
    STATE_CHANGED = "state_changed"
    STATE_ESCAPED = "state_escaped"
    COLLECTIVE = "collective"
    ABOVE_MAX_SIZE = "above_max_size"
    PADDING = "padding"
    GENERATE_ARGUMENT = "generate_argument"
    UNSUPPORTED_MODEL = "unsupported_model"

    @property
    def is_asked_for(self) -> bool:
        """Whether such calls are as the user wants them, so that `strict` does not raise."""
        return self in (Reason.WARMING_UP, Reason.DISABLED, Reason.KILL_SWITCH)

    def __str__(self) -> str:
        return self.value

    @property
    def sentence(self) -> str:
        """What happened and what the user can do, in words."""
        return _SENTENCES[self]

    def told(self, detail: str = "") -> str:
        """The sentence, and in brackets what it was this time."""
        return f"{self.sentence} ({detail})" if detail else self.sentence


_SENTENCES: dict[Reason, str] = {
    Reason.WARMING_UP: "the signature was new: its first calls run eagerly before the capture",
    Reason.NOT_ADMITTED: "too few calls of this signature are expected to pay for a capture",
    Reason.DISABLED: 'graphs are off here (disabled() or backend="off")',
    Reason.KILL_SWITCH: "DIT_GRAPHS=off is set in the environment",
    Reason.NO_CUDA: 'the module is not on a CUDA device; backend="recorded" replays on CPU',
    Reason.GRAD_ENABLED: "gradients are on; call inside torch.no_grad() or inference_mode()",
    Reason.FOREIGN_MODE: "a dispatch or function mode, functorch or tracing is active",
    Reason.TENSOR_SUBCLASS: "an argument is a tensor subclass",
    Reason.UNSUPPORTED_ARGUMENT: "an argument has no exact key; see register_leaf()",
    Reason.UNSUPPORTED_OUTPUT: "the module returned an object that cannot be rebuilt",
    Reason.SIGNATURE_TOO_LARGE: "the arguments hold too many leaves to compare on every call",
    Reason.VARYING_SCALAR: "a Python number differs on every call; pass it as a tensor",
    Reason.WARMUP_ONLY: 'capture="warmup_only" and this signature was not warmed up',
    Reason.HOST_READ: (
        "the forward reads a device value on the host; a function marked @eager_on_graph may"
    ),
    Reason.HOST_COPY: "the forward copies between host and device memory",
    Reason.CONSTANT_CHANGED: "a constant built on the host differs from the observed one",
    Reason.CAPTURE_FAILED: "the capture raised",
    Reason.CAPTURE_GATE_BUSY: "another call was in flight; the capture is tried again later",
    Reason.NESTED_REPLAY: "a graph of this device is in use already, and the call came from inside",
    Reason.VERIFY_MISMATCH: "the replay's output differed from eager: the graph is never used",
    Reason.EAGER_NONDETERMINISTIC: "eager disagrees with itself, so a graph cannot be proven",
    Reason.BREAK_NOT_ALLOWED: (
        'a part of the forward runs eagerly, which backend="full" excludes; take "auto" or '
        '"breakable"'
    ),
    Reason.BREAK_VALUE_CHANGED: "an eager break returned another Python value than recorded",
    Reason.BREAK_SHAPE_CHANGED: "an eager break returned another shape than recorded",
    Reason.BREAK_RAISED: "an eager break raised during a replay",
    Reason.COMPUTE_BOUND: "the GPU is busy already: a graph would not make this call faster",
    Reason.MAX_GRAPHS: "more signatures are in use than max_graphs keeps; raise max_graphs",
    Reason.MEMORY_BUDGET: "graph memory is over memory_budget; raise it or lower max_graphs",
    Reason.LOW_MEMORY: "too little free device memory for a capture",
    Reason.OUT_OF_MEMORY: "the device ran out of memory; graphs were released",
    Reason.ALLOCATOR: "the CUDA allocator cannot capture (cudaMallocAsync)",
    Reason.OFFLOAD: "offload hooks move the weights during the call",
    Reason.LAYERWISE_CASTING: "layerwise casting re-allocates the weights during the call",
    Reason.STEP_CACHE: "a step cache decides on the host which blocks run",
    Reason.HOOKS: "forward hooks are installed on the module",
    Reason.OTHER_DEVICE: "an argument or weight lives on another device than the module",
    Reason.COMPILED: "the module or a block of it is compiled: it runs as compiled",
    Reason.PYTHON_STATE: "every call changes Python objects, which a replay would not do",
    Reason.STATE_CHANGED: "weights or Python state changed: the old graph was dropped",
    Reason.STATE_ESCAPED: "every call leaves a tensor with somebody, which a replay would not do",
    Reason.COLLECTIVE: "the forward exchanges tensors with other processes, as often as they do",
    Reason.ABOVE_MAX_SIZE: "larger than the largest bucket of this LLM phase; raise max_size",
    Reason.PADDING: "the padding of this batch cannot be decoded or costs too much",
    Reason.GENERATE_ARGUMENT: "an argument of generate() that decode graphs do not have",
    Reason.UNSUPPORTED_MODEL: (
        "the model cannot be served from graphs, or a language model not decoded over slots"
    ),
}


class GraphError(RuntimeError):
    """Base of everything dit_graphs raises on purpose."""


class ConfigError(GraphError, ValueError):
    """A wrong argument or an object that cannot be wrapped; nothing was changed."""


class FallbackError(GraphError):
    """`strict=True` and a call could not use a graph. `reason` and `detail` say why."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {reason.told(detail)}")
        self.reason = reason
        self.detail = detail


class CaptureAborted(GraphError):
    """A capture was given up before it touched anything; `reason` says why (internal)."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class BreakFailed(GraphError):
    """An eager break did not do at replay what it did when recorded (internal)."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def forget_refusals(error: BaseException) -> None:
    """The model's own error no longer says that it came while one of ours was being handled."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen.__context__, (CaptureAborted, BreakFailed)):
            seen.__context__ = None
        seen = seen.__context__
