"""Bad input raises ConfigError that says what to do, and leaves everything untouched."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor, nn

import dit_graphs
from dit_graphs import ConfigError, GraphConfig
from dit_graphs.signature import registered_leaves
from dit_graphs.wrapping import runner_of

_BAD_CONFIGS = [
    ({"backend": "fast"}, "backend"),
    ({"backend": None}, "backend"),
    ({"backend": {"denoiser": "fast"}}, "fast"),
    ({"backend": {"unet": "full"}}, "unet"),
    ({"numerics": "approximate"}, "numerics"),
    ({"capture": "always"}, "capture"),
    ({"attention": "flash"}, "attention"),
    ({"verify": "sometimes"}, "verify"),
    ({"verify": 1}, "verify"),
    ({"components": "denoiser"}, "components"),
    ({"components": ("denoiser", "scheduler")}, "scheduler"),
    ({"components": ()}, "components: expected one name at least"),
    ({"memory_budget": -1}, "memory_budget"),
    ({"memory_budget": 1.5}, "memory_budget"),
    ({"memory_budget": True}, "memory_budget"),
    ({"memory_budget": {"denoiser": -5}}, "memory_budget"),
    ({"memory_budget": {"unet": 5}}, "unet"),
    ({"memory_budget": {"denoiser": {"vae": 5}}}, r"memory_budget\['denoiser'\]"),
    ({"max_graphs": 0}, "max_graphs"),
    ({"max_graphs": -3}, "max_graphs"),
    ({"max_graphs": True}, "max_graphs"),
    ({"max_graphs": "16"}, "max_graphs"),
    ({"prompt_buckets": ()}, "prompt_buckets"),
    ({"prompt_buckets": (64, 32)}, "prompt_buckets"),
    ({"prompt_buckets": (32, 32)}, "prompt_buckets"),
    ({"prompt_buckets": (0,)}, "prompt_buckets"),
    ({"prompt_buckets": 64}, "prompt_buckets"),
    ({"max_size": 32}, "max_size"),
    ({"max_size": {"decode": 0}}, "max_size"),
    ({"max_size": {"draft": 3}}, "draft"),
    ({"strict": "yes"}, "strict"),
    ({"strict": 1}, "strict"),
    ({"manifest": 7}, "manifest"),
]
_NO_VALUES: list[object] = [
    *(object(), int, 1.5, float("nan"), b"auto", {1: 2}, [None], [{}], range(4)),
    *(np.arange(3), np.array("auto"), torch.ones(2), torch.tensor(3)),
]


@pytest.mark.parametrize(("fields", "named"), _BAD_CONFIGS, ids=str)
def test_a_wrong_value_is_refused_by_name(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        GraphConfig(**fields)
    module = nn.Linear(4, 4)
    before = dict(vars(module))
    with pytest.raises(ConfigError, match=named):
        dit_graphs.wrap(module, **fields)
    assert vars(module) == before


@pytest.mark.parametrize("field", dataclasses.fields(GraphConfig), ids=lambda field: field.name)
@pytest.mark.parametrize("value", _NO_VALUES, ids=lambda value: f"{value!r:.20}")
def test_a_value_of_no_type_that_a_field_takes_is_refused(
    field: dataclasses.Field[object], value: object
) -> None:
    with pytest.raises(ConfigError, match=field.name):
        GraphConfig(**{field.name: value})


@pytest.mark.parametrize(
    ("field", "before", "after"),
    [("backend", "full", "off"), ("memory_budget", 5, -5), ("max_size", 5, -5)],
)
def test_a_mapping_that_the_caller_changes_later_changes_no_config(
    field: str, before: object, after: object
) -> None:
    given = {"decode": before}
    config = GraphConfig(**{field: given})
    given["decode"] = after
    assert getattr(config, field) == {"decode": before}


def test_an_unknown_field_is_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"max_graph.*max_graphs"):
        GraphConfig().with_overrides(max_graph=3)
    with pytest.raises(ConfigError, match="has no field"):
        dit_graphs.wrap(nn.Linear(4, 4), backends="full")
    with pytest.raises(TypeError):
        GraphConfig(max_graph=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("config", [{"backend": "full"}, {}, "full", 3, 0, GraphConfig], ids=repr)
def test_a_config_of_another_type_is_refused(config: object) -> None:
    for put in (dit_graphs.wrap, dit_graphs.accelerate):
        module = nn.Linear(4, 4)
        before = dict(vars(module))
        with pytest.raises(ConfigError, match="expected a GraphConfig"):
            put(module, config)
        assert vars(module) == before


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"key": 3}, "key: expected a function"),
        ({"method": 3}, "method: expected a name"),
        ({"ignore": "step"}, "ignore: expected a tuple"),
        ({"ignore": 3}, "ignore: expected a tuple"),
        ({"ignore": ("step",)}, r"takes no \['step'\]; it takes \['x'\]"),
        ({"backend": {"denoiser": "recorded"}}, "backend: .*one value"),
        ({"memory_budget": {"vae": 5}}, "memory_budget: .*one value"),
    ],
    ids=str,
)
def test_an_option_of_wrap_that_would_do_nothing_is_refused(
    options: dict[str, object], text: str
) -> None:
    module = Computes()
    before = dict(vars(module))
    with pytest.raises(ConfigError, match=text):
        dit_graphs.wrap(module, **options)
    assert vars(module) == before


def test_config_errors_are_value_errors() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, dit_graphs.GraphError)


def test_a_config_is_frozen_and_hashable_by_value() -> None:
    config = GraphConfig(max_graphs=3)
    with pytest.raises(AttributeError):
        config.max_graphs = 4  # type: ignore[misc]
    assert config == GraphConfig().with_overrides(max_graphs=3)
    assert config.with_overrides(max_graphs=4) != config


def test_one_spelling_per_component() -> None:
    config = GraphConfig(
        backend={"denoiser": "full", "decode": "breakable"}, memory_budget={"vae": 1 << 20}
    )
    assert [config.backend_for(path) for path in ("denoiser", "decode", "vae")] == [
        "full",
        "breakable",
        "auto",
    ]
    assert config.budget_for("vae") == 1 << 20
    assert config.budget_for("denoiser") == "auto"


def test_a_wrong_environment_override_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIT_GRAPHS_BACKEND", "fast")
    with pytest.raises(ConfigError, match="DIT_GRAPHS_BACKEND"):
        dit_graphs.wrap(nn.Linear(4, 4))


class NoForward(nn.Module):
    pass


class Computes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


_BAD_MODULES = {
    "not a module": (lambda: object(), "torch.nn.Module"),
    "a function": (lambda: len, "torch.nn.Module"),
    "without forward": (lambda: NoForward(), "no forward"),
    "a list of modules": (lambda: nn.ModuleList([Computes()]), "no forward"),
    "on the meta device": (lambda: nn.Linear(4, 4, device="meta"), "meta device"),
    "partly on the meta device": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta")),
        "meta device",
    ),
}


@pytest.mark.parametrize("kind", _BAD_MODULES)
def test_a_module_that_cannot_be_wrapped_is_refused(kind: str) -> None:
    make, text = _BAD_MODULES[kind]
    module = make()
    before = dict(getattr(module, "__dict__", {}))
    with pytest.raises(ConfigError, match=text):
        dit_graphs.wrap(module, backend="recorded")
    assert dict(getattr(module, "__dict__", {})) == before


def test_a_missing_method_is_refused() -> None:
    module = Computes()
    with pytest.raises(ConfigError, match="decode"):
        dit_graphs.wrap(module, method="decode", backend="recorded")
    assert "decode" not in vars(module)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("how", ["in place", "as a wrapper", "a block of it"])
def test_b17_a_module_with_graphs_of_its_own_is_refused(mode: str, how: str) -> None:
    module: nn.Module = nn.Sequential(Computes(), Computes())
    if how == "in place":
        module.compile(mode=mode)
    elif how == "as a wrapper":
        module = torch.compile(module, mode=mode)
    else:
        module[0].compile(mode=mode)
    with pytest.raises(ConfigError, match="CUDA graphs of its own"):
        dit_graphs.wrap(module, backend="recorded")
    assert runner_of(module) is None


def test_a_compiled_module_without_graphs_is_wrapped_and_left_as_compiled() -> None:
    module = nn.Sequential(nn.Linear(4, 4), Computes())
    module.compile(backend="eager")
    dit_graphs.wrap(module, backend="recorded")
    x = torch.randn(2, 4)
    with torch.no_grad():
        assert torch.equal(module(x), module[0](x))
    fallbacks = dit_graphs.stats(module)["components"]["denoiser"]["fallbacks"]
    assert fallbacks == {"compiled": 1}


def test_a_pipeline_on_the_meta_device_is_refused_untouched() -> None:
    pipe = tiny.build("flux")
    own, transformer = dict(vars(pipe)), dict(vars(pipe.transformer))
    pipe.vae.to("meta")
    with pytest.raises(ConfigError, match="meta device"):
        dit_graphs.accelerate(pipe, backend="recorded")
    assert vars(pipe) == own
    assert vars(pipe.transformer) == transformer, "the denoiser had come first"


@pytest.mark.parametrize("target", [object(), 3, "pipe", []], ids=lambda made: type(made).__name__)
def test_something_that_is_no_pipeline_is_refused(target: object) -> None:
    with pytest.raises(ConfigError, match="expected a diffusers pipeline"):
        dit_graphs.accelerate(target)


@pytest.mark.parametrize(
    ("target", "fields", "text"),
    [
        ({"scheduler": 3}, {}, r"no denoiser or vae or text_encoder .* its modules \[\]: "),
        ({"net": Computes()}, {}, r"among its modules \['net'\]: .* takes wrap\(module\)"),
        ({"vae": Computes()}, {"components": ("denoiser",)}, r"no denoiser that .*\['vae'\]"),
        (
            Computes(),
            {"components": ("vae",)},
            "Computes by itself is no vae: leave components out",
        ),
    ],
    ids=str,
)
def test_components_without_anything_to_wrap_are_refused(
    target: object, fields: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        dit_graphs.accelerate(target, **fields)


@pytest.mark.parametrize("name", ["stats", "explain", "disabled", "warmup"])
def test_asking_before_accelerating_is_refused(name: str) -> None:
    ask = getattr(dit_graphs, name)
    args = ([],) if name == "warmup" else ()
    with pytest.raises(ConfigError, match="accelerate"):
        found = ask(nn.Linear(4, 4), *args)
        if name == "disabled":
            found.__enter__()


def test_restore_of_what_was_never_accelerated_does_nothing() -> None:
    pipe = tiny.build("flux")
    before = dict(vars(pipe))
    assert dit_graphs.restore(pipe) is pipe
    assert vars(pipe) == before


@pytest.mark.parametrize("target", [3, "pipe", None, nn.Linear], ids=repr)
def test_only_a_module_is_unwrapped(target: object) -> None:
    with pytest.raises(ConfigError, match=r"expected a torch\.nn\.Module"):
        dit_graphs.unwrap(target)


@pytest.mark.gpu
def test_weights_over_two_devices_are_refused() -> None:
    module = nn.Sequential(nn.Linear(4, 4).cuda(), nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="one device"):
        dit_graphs.wrap(module)


@pytest.mark.parametrize("kind", [3, "Linear", None])
def test_register_leaf_wants_a_type_and_a_function(kind: object) -> None:
    with pytest.raises(ConfigError, match="type"):
        dit_graphs.register_leaf(kind, key=repr)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="function"):
        dit_graphs.register_leaf(_Own, key="repr")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter, float, str, type(None), dict, list])
def test_a_type_that_is_keyed_by_its_values_takes_no_other_key(kind: type) -> None:
    """A number's key would never be read, a dict's would stand for every container of a call."""
    before = dict(registered_leaves())
    with pytest.raises(ConfigError, match=f"{kind.__name__} is keyed by what it holds"):
        dit_graphs.register_leaf(kind, key=repr)
    assert registered_leaves() == before


class _Own:
    pass


def _numbers(x: object) -> Iterator[object]:
    yield x


async def _later(x: object) -> object:
    return x


@pytest.mark.parametrize(
    "marked", [3, None, nn.Linear, nn.Linear(2, 2), partial(print), _numbers, _later]
)
def test_only_what_returns_its_result_is_marked_as_a_break(marked: object) -> None:
    """A marked class would be a function from then on, a marked generator runs after the break."""
    with pytest.raises(ConfigError, match="eager_on_graph: expected a function or method"):
        dit_graphs.eager_on_graph(marked)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["weight", "decode"])
def test_a_method_the_module_has_not_is_refused_by_what_to_pass(method: str) -> None:
    with pytest.raises(ConfigError, match=f"Linear has no method {method}: pass the name of one"):
        dit_graphs.wrap(nn.Linear(2, 2), method=method)


def test_a_module_writes_no_prompts() -> None:
    with pytest.raises(ConfigError, match=r"expected a pipeline .* got the module Linear"):
        dit_graphs.rewrite_prompt(nn.Linear(2, 2), "a cat")
