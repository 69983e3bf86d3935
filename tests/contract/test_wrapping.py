"""Wrapping leaves the module what it is; unwrapping leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn
from twin import Twin, Where, difference

import dit_graphs
from dit_graphs import ConfigError
from dit_graphs.wrapping import runner_of


def _flux() -> FluxTransformer2DModel:
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 6, 6),
    ).eval()


def _flux_inputs(where: Where, seed: int) -> dict[str, Tensor]:
    return {
        "hidden_states": where.randn(1, 6, 4, seed=seed),
        "encoder_hidden_states": where.randn(1, 5, 32, seed=seed + 1),
        "pooled_projections": where.randn(1, 32, seed=seed + 2),
        "timestep": where.randn(1, seed=seed + 3).abs(),
        "img_ids": torch.zeros(6, 3, device=where.device),
        "txt_ids": torch.zeros(5, 3, device=where.device),
    }


def _snapshot(module: nn.Module) -> dict[str, dict[str, object]]:
    """Every instance attribute in the tree; hook tables and the like by their contents."""
    return {
        path: {k: dict(v) if isinstance(v, dict) else v for k, v in vars(child).items()}
        for path, child in module.named_modules()
    }


def _identical(before: dict[str, dict[str, object]], after: dict[str, dict[str, object]]) -> bool:
    return before.keys() == after.keys() and all(
        before[path].keys() == after[path].keys()
        and all(
            value is after[path][name] or (isinstance(value, dict) and value == after[path][name])
            for name, value in before[path].items()
        )
        for path in before
    )


def test_a_real_denoiser_replays(where: Where) -> None:
    twin = Twin(_flux(), where)
    for index in range(6):
        twin(**_flux_inputs(where, 10 * index), return_dict=index % 2 == 0)
    assert twin.graphs <= 2
    for index in range(6):
        twin(**_flux_inputs(where, 10 * index), return_dict=False)
    assert twin.replays >= 6


def test_unwrap_leaves_exactly_what_was_there(where: Where) -> None:
    model = _flux().to(where.device)
    before = _snapshot(model)
    dit_graphs.wrap(model, backend=where.backend)
    for index in range(6):
        model(**_flux_inputs(where, 10 * index))
    assert runner_of(model).stats.replays == 3
    assert dit_graphs.unwrap(model) is model
    assert _identical(before, _snapshot(model))
    assert dit_graphs.unwrap(model) is model, "twice is harmless"


def test_methods_are_wrapped_and_unwrapped_as_instance_attributes(where: Where) -> None:
    torch.manual_seed(0)
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4).eval()
    vae.to(where.device)
    plain = copy.deepcopy(vae)
    before = _snapshot(vae)
    dit_graphs.wrap(vae, backend=where.backend, method="decode")
    for index in range(6):
        z = where.randn(1, 4, 4, 4, seed=index)
        assert difference(vae.decode(z), plain.decode(z)) is None
        assert (
            difference(vae.decode(z, return_dict=False), plain.decode(z, return_dict=False)) is None
        )
    assert runner_of(vae, "decode").stats.replays == 6
    assert len(runner_of(vae, "decode").cache.entries) == 2, "our own counters are no state"
    assert runner_of(vae) is None
    assert vae.decode.__name__ == "decode"
    dit_graphs.unwrap(vae, method="decode")
    assert _identical(before, _snapshot(vae))


def test_wrapping_twice_changes_nothing(where: Where) -> None:
    model = _flux().to(where.device)
    assert dit_graphs.wrap(model, backend=where.backend) is model
    runner = runner_of(model)
    dit_graphs.wrap(model, backend=where.backend)
    assert runner_of(model) is runner


@pytest.mark.parametrize(
    "other",
    [{"verify": "always"}, {"strict": True}, {"key": lambda: 1}, {"ignore": ("x",)}],
    ids=lambda other: next(iter(other)),
)
def test_wrapping_again_with_another_choice_replaces_the_first(
    where: Where, other: dict[str, object]
) -> None:
    model = Twice().to(where.device)
    before = _snapshot(model)
    first = runner_of(dit_graphs.wrap(model, backend=where.backend))
    second = runner_of(dit_graphs.wrap(model, backend=where.backend, **other))
    assert second is not first
    chosen = {"key": second.options.key, "ignore": second.options.ignore}
    assert all(chosen.get(n, getattr(second.config, n, v)) == v for n, v in other.items())
    dit_graphs.unwrap(model)
    assert _identical(before, _snapshot(model))


@pytest.mark.parametrize("wrong", [{"max_graphs": 0}, {"manifest": "x"}, {"ignore": ("y",)}])
def test_another_choice_that_is_wrong_leaves_the_first_in_force(
    where: Where, wrong: dict[str, object]
) -> None:
    model = dit_graphs.wrap(Twice().to(where.device), backend=where.backend)
    first = runner_of(model)
    with pytest.raises(ConfigError):
        dit_graphs.wrap(model, backend=where.backend, **wrong)
    assert runner_of(model) is first
    model.to("meta")
    with pytest.raises(ConfigError, match="meta"):
        dit_graphs.wrap(model, backend=where.backend, strict=True)
    assert runner_of(model) is first


def test_a_choice_that_another_users_config_keeps_from_counting_is_warned_of(
    where: Where, caplog: pytest.LogCaptureFixture
) -> None:
    model = dit_graphs.accelerate(Twice().to(where.device), backend=where.backend)
    dit_graphs.wrap(model, backend=where.backend, strict=True)
    assert "Twice: wrapped before with another config" in caplog.text


def test_a_previous_call_implementation_is_called_and_put_back(where: Where) -> None:
    """What `module.compile()` or another wrapper put there before us stays in the chain."""
    model = nn.Linear(4, 4).to(where.device)
    seen = []

    def previous(*args: object, **kwargs: object) -> object:
        seen.append(1)
        return type(model)._call_impl(model, *args, **kwargs) * 2

    previous.keeps_eager = True  # it compiles nothing
    model._compiled_call_impl = previous
    dit_graphs.wrap(model, backend=where.backend)
    x = where.randn(3, 4)
    assert torch.equal(model(x), torch.nn.functional.linear(x, model.weight, model.bias) * 2)
    assert seen
    dit_graphs.unwrap(model)
    assert model._compiled_call_impl is previous


def test_the_module_looks_untouched_to_everybody_else(where: Where, tmp_path: Path) -> None:
    model = _flux().to(where.device)
    plain = copy.deepcopy(model)
    dit_graphs.wrap(model, backend=where.backend)
    for index in range(5):
        model(**_flux_inputs(where, index))
    assert isinstance(model, ModelMixin) and isinstance(model, FluxTransformer2DModel)
    assert model.dtype == plain.dtype and model.device == plain.device
    assert model.config == plain.config
    assert list(model.state_dict()) == list(plain.state_dict())
    assert not model._compiled_call_impl, "peft asks whether the model is compiled"
    model.save_pretrained(tmp_path)
    loaded = FluxTransformer2DModel.from_pretrained(tmp_path).to(where.device).eval()
    assert difference(dict(loaded.state_dict()), dict(plain.state_dict())) is None
    assert runner_of(loaded) is None


def test_copies_and_pickles_are_plain_modules(where: Where) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(where.device)
    dit_graphs.wrap(model, backend=where.backend)
    for index in range(5):
        model(where.randn(3, 4, seed=index))
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    x = where.randn(3, 4)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(stored, weights_only=False),
    ):
        assert runner_of(other) is None
        assert torch.equal(other(x), model(x))
        dit_graphs.wrap(other, backend=where.backend)
        for index in range(5):
            assert torch.equal(
                other(where.randn(3, 4, seed=index)), model(where.randn(3, 4, seed=index))
            )
        assert runner_of(other).stats.replays == 2
    assert runner_of(model) is not None


def test_a_copy_of_a_wrapped_method_is_the_copys_own(where: Where) -> None:
    torch.manual_seed(0)
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4).eval()
    vae.to(where.device)
    dit_graphs.wrap(vae, backend=where.backend, method="decode")
    other = copy.deepcopy(vae)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    z = where.randn(1, 4, 4, 4)
    assert not torch.equal(other.decode(z).sample, vae.decode(z).sample)
    pickled = pickle.loads(pickle.dumps(vae))
    assert torch.equal(pickled.decode(z).sample, vae.decode(z).sample)


def test_a_wrapped_module_inside_a_wrapped_module(where: Where) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.head = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(x).sin())

    twin = Twin(Outer(), where)
    dit_graphs.wrap(twin.module.inner, backend=where.backend)
    for index in range(8):
        twin(where.randn(3, 8, seed=index))
    assert twin.replays >= 4
    inner = twin.module.inner
    before = runner_of(inner).stats.eager_calls
    dit_graphs.unwrap(twin.module)
    for index in range(6):
        x = where.randn(3, 8, seed=30 + index)
        assert torch.equal(twin.module(x), twin.plain(x))
    assert runner_of(inner).stats.replays >= 2
    assert runner_of(inner).stats.eager_calls >= before


def test_to_another_dtype_and_back(where: Where) -> None:
    twin = Twin(nn.Linear(8, 8), where)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        twin.module.to(dtype)
        twin.plain.to(dtype)
        for index in range(5):
            twin(where.randn(3, 8, seed=index).to(dtype))
    assert twin.runner.stats.invalidations == 2


def test_both_halves_of_a_request_see_a_changed_module(where: Where) -> None:
    """accelerate() notes known mutators; a wrapped module is told by mark_changed."""
    twin = Twin(nn.Linear(8, 8), where)
    with dit_graphs.request():
        for index in range(5):
            twin(where.randn(3, 8, seed=index))
        for module in (twin.module, twin.plain):
            module.load_state_dict(
                {
                    "weight": torch.ones(8, 8, device=where.device),
                    "bias": torch.ones(8, device=where.device),
                },
                assign=True,
            )
        twin.runner.mark_changed()
        for index in range(5):
            twin(where.randn(3, 8, seed=20 + index))
    assert twin.runner.stats.invalidations == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_are_honoured(where: Where, when: str) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    module = Outer().to(where.device)
    seen: list[float] = []

    def hook(child: nn.Module, args: object, output: Tensor) -> Tensor:
        seen.append(float(output.sum()))
        return output * 2

    if when == "before":
        module.inner.register_forward_hook(hook)
        dit_graphs.wrap(module, backend=where.backend)
    else:
        dit_graphs.wrap(module, backend=where.backend)
        for index in range(6):
            module(where.randn(3, 8, seed=index))
        assert runner_of(module).stats.replays == 3
        module.inner.register_forward_hook(hook)
    for index in range(4):
        x = where.randn(3, 8, seed=index)
        inner = module.inner
        expected = torch.nn.functional.linear(x, inner.weight, inner.bias) * 2
        assert torch.equal(module(x), expected)
    assert len(seen) == 4, "the hook ran on every call"
    assert "hooks" in {r.value for r in runner_of(module).stats.fallbacks}


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def decode(self, x: Tensor) -> Tensor:
        return self.linear(x).sin()


@pytest.mark.parametrize("method", ["forward", "decode"])
@pytest.mark.parametrize("capture", ["second_use", "first_use"])
def test_weights_go_with_the_module_once_it_is_unwrapped(
    where: Where, capture: str, method: str
) -> None:
    """Without a word to Python's collector, which knows nothing of the device's memory."""
    module = Twice().to(where.device)
    dit_graphs.wrap(module, method=method, backend=where.backend, capture=capture)
    for seed in range(5):
        called = module if method == "forward" else module.decode
        called(where.randn(3, 8, seed=seed))
    runner = runner_of(module, method)
    assert runner is not None and runner.stats.replays >= 2
    del called, runner
    weight = weakref.ref(module.linear.weight)
    gc.collect()
    gc.disable()
    try:
        dit_graphs.unwrap(module, method=method)
        del module
        assert weight() is None
    finally:
        gc.enable()
