"""The test material itself: tiny pipelines and model cases are worth comparing outputs of.

Everything else in this suite compares outputs bit for bit. Here is shown that such a comparison can
fail: outputs are finite, spread, repeatable, and depend on every input.
"""

from __future__ import annotations

import pytest
import tiny
import torch

from benchmarks import equality, sweep


@pytest.fixture(scope="module", params=tiny.NAMES)
def named_pipe(request: pytest.FixtureRequest) -> tuple[str, object]:
    return request.param, tiny.build(request.param)


def test_tiny_pipeline_repeats_itself(named_pipe: tuple[str, object]) -> None:
    name, pipe = named_pipe
    first = tiny.latents(pipe, tiny.call_kwargs(name))
    assert torch.equal(first, tiny.latents(pipe, tiny.call_kwargs(name)))
    assert torch.equal(first, tiny.latents(tiny.build(name), tiny.call_kwargs(name)))
    assert not equality.defects([first])


@pytest.mark.parametrize("change", [{"seed": 1}, {"prompt": "a red hearse"}, {"steps": 3}], ids=str)
def test_tiny_pipeline_depends_on(
    named_pipe: tuple[str, object], change: dict[str, object]
) -> None:
    name, pipe = named_pipe
    plain = tiny.latents(pipe, tiny.call_kwargs(name))
    other = tiny.latents(pipe, tiny.call_kwargs(name, **change))
    assert equality.changed_fraction([plain], [other]) > equality.MIN_CHANGED


@pytest.mark.parametrize("name", sorted(tiny.WITH_NEGATIVE_PROMPT))
def test_tiny_pipeline_depends_on_the_negative_prompt(name: str) -> None:
    pipe = tiny.build(name)
    plain = tiny.latents(pipe, tiny.call_kwargs(name))
    other = tiny.latents(pipe, tiny.call_kwargs(name, negative_prompt="a dark forest"))
    assert equality.changed_fraction([plain], [other]) > equality.MIN_CHANGED


def test_tiny_denoiser_depends_on_every_float_input(named_pipe: tuple[str, object]) -> None:
    name, pipe = named_pipe
    last: dict[torch.nn.Module, tiny.DenoiserCall] = {}
    for call in tiny.denoiser_calls(pipe, tiny.call_kwargs(name)):
        last[call.module] = call
    assert set(last) == set(tiny.denoisers(pipe))
    generator = torch.Generator().manual_seed(1)
    for call in last.values():
        changed = call.arguments
        for leaf in equality.leaves(call.arguments):
            # Rotary positions are floats in some pipelines and integers in others: left alone.
            if leaf.tensor.is_floating_point() and "_ids" not in leaf.path:
                noise = torch.randn(leaf.tensor.shape, generator=generator)
                new = leaf.tensor + 0.3 * noise.to(leaf.tensor.dtype)
                changed = equality.replaced(changed, leaf.path, new)
        assert isinstance(changed, dict)
        assert not equality.insensitive(call, call.arguments, changed)


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", tiny.NAMES)
def test_tiny_pipeline_in_half_precision(name: str, dtype: torch.dtype) -> None:
    pipe = tiny.build(name, dtype)
    assert {module.dtype for module in tiny.denoisers(pipe)} == {dtype}
    assert not equality.defects([tiny.latents(pipe, tiny.call_kwargs(name))])


def test_two_stage_pipeline_uses_both_denoisers() -> None:
    pipe = tiny.build("wan22")
    calls = tiny.denoiser_calls(pipe, tiny.call_kwargs("wan22"))
    order = [call.module is pipe.transformer_2 for call in calls]
    assert order == [False] * 4 + [True] * 4, "two steps of each stage, cond and uncond"


DENOISERS = [key for key, case in sweep.CASES.items() if case.kind == "dit"]


@pytest.mark.parametrize("key", DENOISERS)
def test_case_output_is_worth_comparing(key: str) -> None:
    case = sweep.CASES[key]
    assert sweep.not_worth_comparing(case, sweep.Side(case, "cpu")) == []


class TestEquality:
    """The comparison that the benchmarks and the GPU tests rest on."""

    def test_nan_equals_nothing(self) -> None:
        nan = torch.tensor([1.0, float("nan")])
        assert not equality.equal([nan], [nan])

    def test_signed_zero_is_a_difference(self) -> None:
        assert not equality.equal([torch.tensor([0.0])], [torch.tensor([-0.0])])

    def test_dtype_shape_place_and_number_are_differences(self) -> None:
        one = torch.ones(2)
        assert equality.equal([one], [torch.ones(2)])
        assert not equality.equal([one], [one.double()])
        assert not equality.equal([one], [one[None]])
        assert not equality.equal({"a": one}, {"b": one})
        assert not equality.equal([one, one], [one])
        assert not equality.equal([], [])

    @pytest.mark.parametrize(
        "output",
        [[torch.zeros(9)], [torch.full((9,), 1e4).cumsum(0)], [torch.ones(2, dtype=torch.long)]],
    )
    def test_defects_are_found(self, output: object) -> None:
        assert equality.defects(output)

    def test_an_ignored_input_is_found(self) -> None:
        inputs: dict[str, object] = {"x": torch.randn(8), "y": [torch.randn(8)]}
        changed: dict[str, object] = {"x": torch.randn(8), "y": [torch.randn(8)]}
        weak = equality.insensitive(lambda given: [given["x"]], inputs, changed)
        assert weak == {"['y']": 0.0}
