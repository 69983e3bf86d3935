"""Changes of a module that no argument and no weight shows."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import tiny
import torch
from blend import Blend, again, inputs, skip, swap, table, turn
from diffusers import FluxPipeline
from diffusers.models.attention_processor import AttnProcessor2_0
from diffusers.models.transformers import transformer_flux
from pair import Pair
from torch import Tensor, nn

import dit_graphs
from dit_graphs.module_state import sweep
from dit_graphs.wrapping import runner_of

INTERRUPTED: dict[str, bool] = {}  # no part of any module


@pytest.mark.parametrize("change", [swap, turn, skip, table, again])
def test_the_next_request_sees_it(change: Callable[[Blend], None]) -> None:
    """A weightless submodule, a value in a mixed dict, a set, a table, a one-shot flag."""
    module, plain = Blend().eval(), Blend().eval()
    dit_graphs.wrap(module, backend="recorded")
    with torch.no_grad():
        for image in range(3):
            if image:
                change(module)
                change(plain)
            with dit_graphs.request(total_steps=6):
                for step in range(6):
                    x, row = inputs(10 * image + step)
                    assert torch.equal(module(x, row), plain(x, row)), (image, step)
    assert runner_of(module).stats.replays > 0


def test_an_interrupted_compare_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in eager's half of a compare leaves the new value in the buffer, unproven."""

    class Baked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            if INTERRUPTED:
                raise KeyboardInterrupt
            return x * self.weight * scale.detach().clone()

    module = Baked().eval()
    dit_graphs.wrap(module, backend="recorded")
    one, two = torch.ones(1), torch.full((1,), 2.0)
    with torch.no_grad(), dit_graphs.request(total_steps=12):
        for index in range(6):
            module(inputs(index)[0], one)
        runner = runner_of(module)
        compares = runner.stats.compares
        monkeypatch.setitem(INTERRUPTED, "by hand", True)
        with pytest.raises(KeyboardInterrupt):
            module(inputs(7)[0], two)
        monkeypatch.undo()
        x = inputs(8)[0]
        assert torch.equal(module(x, two), x * two)
        assert runner.stats.compares == compares + 2  # tried, and tried again


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_value_some_objects_below_the_module_is_seen(depth: int) -> None:
    """`attn.processor.options.limits.scale`: plain state, if one looks far enough."""

    class Below:
        scale = 1.0
        inner: Below | None = None

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below = lowest = Below()
            for _ in range(depth):
                lowest.inner = lowest = Below()
            self.lowest = (lambda: lowest,)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.lowest[0]().scale

    module = Scales()
    dit_graphs.wrap(module, backend="recorded")
    for image in range(3):
        module.lowest[0]().scale = 1.0 + image
        with torch.no_grad(), dit_graphs.request(total_steps=6):
            for step in range(6):
                x = inputs(10 * image + step)[0]
                assert torch.equal(module(x), x * (1.0 + image))
    assert runner_of(module).stats.replays >= 6


def test_a_config_that_every_layer_holds_is_read_once_per_look() -> None:
    """All layers of a language model hold its one config, which has more values than they have."""
    reads: list[str] = []

    @dataclass
    class Config:
        scale: float = 1.0

        def __getattribute__(self, name: str) -> object:
            if name == "scale":
                reads.append(name)
            return super().__getattribute__(name)

    model, config = nn.ModuleList(nn.Linear(2, 2) for _ in range(9)), Config()
    for layer in model:
        layer.config = config
    before = sweep(model)
    assert len(reads) == 1
    model[4].config = Config()
    assert sweep(model).python == before.python  # another config of equal values
    config.scale = 2.0
    changed = sweep(model).changed_attributes(before)
    assert changed == {f"{number}.config" for number in range(9) if number != 4}


def _patched(pipe: object) -> None:
    """The user's own `forward` on one layer, as community code does it."""
    layer = pipe.transformer.proj_out
    own = layer.forward
    layer.forward = lambda x: own(x) * 2


def _hooked(pipe: object) -> None:
    def double(module: nn.Module, given: object, result: Tensor) -> Tensor:
        return result * 2

    pipe.transformer.proj_out.register_forward_hook(double)


def _flagged(pipe: object) -> None:
    pipe.transformer.transformer_blocks[0].norm1.norm.eps = 0.5


class Weighted(AttnProcessor2_0):
    """A processor with a number of its own, which is no module's attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = 1.0

    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        return super().__call__(*args, **kwargs) * self.weight


def _with_processor(pipe: object) -> None:
    if hasattr(pipe, "unet"):
        pipe.unet.set_attn_processor(Weighted())


def _weighted(pipe: object) -> None:
    next(iter(pipe.unet.attn_processors.values())).weight = 0.5


@pytest.mark.parametrize(
    ("name", "change"),
    [("flux", _patched), ("flux", _hooked), ("flux", _flagged), ("sdxl", _weighted)],
)
def test_a_callback_may_change_anything_between_two_steps(
    name: str, change: Callable[[object], None]
) -> None:
    """No method of the pipeline tells of it, so where a callback runs the module is looked at."""
    pair = Pair(name, prepare=_with_processor)
    before = pair.latents(steps=6)

    def callback(pipe: object, step: int, timestep: object, kept: dict) -> dict:
        if step == 2:
            change(pipe)
        return kept

    assert not torch.equal(pair.latents(steps=6, callback_on_step_end=callback), before)
    pair.latents(steps=6)


def test_a_callback_handed_on_by_a_class_of_the_users_own() -> None:
    """`def __call__(self, *args, **kwargs)` shows no callback; the call below it does."""

    class Own(FluxPipeline):
        def __call__(self, *args: object, **kwargs: object) -> object:
            return super().__call__(*args, **kwargs)

    fast, plain = (Own(**tiny.build("flux").components) for _ in range(2))
    dit_graphs.accelerate(fast, backend="recorded", components=("denoiser",))

    def callback(pipe: object, step: int, timestep: object, kept: dict) -> dict:
        if step == 2:
            _patched(pipe)
        return kept

    for seed in range(2):
        mine, theirs = (
            tiny.latents(
                pipe,
                {
                    **tiny.call_kwargs("flux", size=32, steps=6, seed=seed),
                    "callback_on_step_end": callback if seed else None,
                },
            )
            for pipe in (fast, plain)
        )
        assert torch.equal(mine, theirs)


def test_the_look_between_two_steps_costs_no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback that changes nothing, in the module or anywhere, costs nothing but the look."""
    pair = Pair("flux")
    pair.latents(steps=6)
    watch = runner_of(pair.fast.transformer)._watch
    sweeps = []
    refresh = watch.refresh
    monkeypatch.setattr(watch, "refresh", lambda *given: sweeps.append(given[0]) or refresh(*given))
    pair.latents(steps=6, callback_on_step_end=lambda pipe, step, timestep, kept: kept)
    assert not sweeps


def test_a_forward_that_counts_in_its_class_is_replayed_all_the_same() -> None:
    """What it changes in each pass is no key; what somebody else puts there is."""

    class Counting(Blend):
        calls: ClassVar[list[int]] = []

        def forward(self, x: Tensor, row: Tensor) -> Tensor:
            Counting.calls.append(1)
            return super().forward(x, row)

    module, plain = Counting().eval(), Blend().eval()
    dit_graphs.wrap(module, backend="recorded")
    with torch.no_grad():
        for picture in range(8):
            with dit_graphs.request(total_steps=3):
                for index in range(3 * picture, 3 * picture + 3):
                    assert torch.equal(module(*inputs(index)), plain(*inputs(index)))
    assert runner_of(module).stats.replays >= 6


def test_states_that_never_come_back_are_let_go() -> None:
    """A processor of its own for each picture: its graph's key keeps it, but not for ever."""

    class Processor:
        pass

    module = Blend().eval()
    dit_graphs.wrap(module, backend="recorded", max_graphs=2)
    processors = []
    with torch.no_grad():
        for index in range(100):
            module.processor = Processor()
            processors.append(weakref.ref(module.processor))
            module(*inputs(index))
            module.processor = None
            module(*inputs(index))
    gc.collect()
    assert 0 < sum(each() is not None for each in processors) < 100


@pytest.mark.parametrize("change", ["weights", "layers"])
def test_a_look_keeps_no_weight_alive(change: str) -> None:
    """Between two requests, and inside one: who exchanges them has their memory back."""
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).eval()
    dit_graphs.wrap(module, backend="recorded")
    x = torch.ones(1, 4)
    with torch.no_grad():
        for _ in range(3):
            with dit_graphs.request(total_steps=1):  # too short for a graph, which would hold them
                module(x)
        gone = [weakref.ref(weight) for weight in module[1].parameters()]
        if change == "layers":
            module[1] = nn.Linear(4, 4)
        else:
            fresh = {name: torch.ones_like(w) for name, w in module.state_dict().items()}
            module.load_state_dict(fresh, assign=True)
    assert [each() for each in gone] == [None, None]


def _of_a_class(holder: type, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        own = getattr(holder, name)

        def doubled(self: object, *args: object, **kwargs: object) -> object:
            result = own(self, *args, **kwargs)
            return tuple(r * 2 for r in result) if isinstance(result, tuple) else result * 2

        monkeypatch.setattr(holder, name, doubled)

    return patch


def _of_a_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    own = transformer_flux.apply_rotary_emb
    monkeypatch.setattr(
        transformer_flux, "apply_rotary_emb", lambda *args, **kwargs: own(*args, **kwargs) * 2
    )


def _of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """`F.scaled_dot_product_attention = sageattn`, as that kernel's README has it."""
    own = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: own(*args, **kwargs) * 2,
    )


@pytest.mark.parametrize(
    "patch",
    [
        _of_a_class(transformer_flux.FluxTransformerBlock, "forward"),
        _of_a_class(transformer_flux.FluxAttnProcessor, "__call__"),
        _of_a_class(nn.SiLU, "forward"),
        _of_a_namespace,
        _of_torch,
    ],
    ids=["class of a block", "class of a processor", "class of torch", "rotary function", "SDPA"],
)
def test_functions_exchanged_for_all_objects_at_once(
    patch: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Own kernels get into a model that way: no attribute of any module shows it.

    With embeddings that are given, or the text encoder's change would be compared and found out.
    """
    pair = Pair("flux")
    embeds, pooled, _ = pair.plain.encode_prompt("a red heart", None, max_sequence_length=32)
    given = {"prompt": None, "prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
    before = pair.latents(**given)
    replays = pair.replays
    with monkeypatch.context() as patches:
        patch(patches)
        for _ in range(2):
            assert not torch.equal(pair.latents(**given), before)
    assert pair.reasons_of(1, **given) == {}, "the graphs of before are still there"
    assert pair.replays > replays + 4


def test_a_number_of_the_class_counts_for_all_its_objects() -> None:
    """`Block.scale = 0.5`: no object has an attribute of that name."""

    class Scaled(nn.Module):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    module = Scaled()
    dit_graphs.wrap(module, backend="recorded")
    for image in range(3):
        Scaled.scale = 1.0 + image
        with torch.no_grad(), dit_graphs.request(total_steps=6):
            for step in range(6):
                x = inputs(10 * image + step)[0]
                assert torch.equal(module(x), x * (1.0 + image))
    assert runner_of(module).stats.replays >= 6
