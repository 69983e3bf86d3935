"""Each family: plain and wrapped bit for bit, with masks of other lengths at the same shape.

Tiny real models of diffusers, those of the sweep. A family may hold one graph per layout of its
masks and no more; what it puts on a module is gone after `restore`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from twin import Twin, Where
from where import graphing, segmenting

import dit_graphs
from benchmarks.sweep import CASES
from dit_graphs.pipelines.families import FAMILIES, family_of

__all__ = ["graphing", "segmenting"]

Tree = dict[str, object]
Change = Callable[[Tree, tuple[int, ...]], Tree]


def _lengths(name: str, dtype: torch.dtype = torch.long) -> Change:
    """Puts a mask with these valid lengths, right-padded, in place of argument `name`."""

    def change(inputs: Tree, lengths: tuple[int, ...]) -> Tree:
        old = inputs[name]
        assert isinstance(old, Tensor)
        valid = torch.arange(old.shape[-1]) < torch.tensor(lengths)[:, None]
        return {**inputs, name: valid.to(dtype)}

    return change


def _both(*changes: Change) -> Change:
    def change(inputs: Tree, lengths: tuple[int, ...]) -> Tree:
        for one in changes:
            inputs = one(inputs, lengths)
        return inputs

    return change


def _dropped(inputs: Tree, lengths: tuple[int, ...]) -> Tree:
    return {**inputs, "prior_token_drop": torch.tensor([n > 3 for n in lengths])}


_TEXT = _lengths("encoder_attention_mask")
# class -> how its masks get other lengths, and batch size 1 or 2
RAGGED: dict[str, tuple[Change, int]] = {
    "BriaFibo2Transformer2DModel": (_lengths("encoder_attention_mask", torch.bool), 2),
    "GlmImageTransformer2DModel": (_dropped, 1),
    "HunyuanImageTransformer2DModel": (_both(_TEXT, _lengths("encoder_attention_mask_2")), 2),
    "HunyuanVideo15Transformer3DModel": (_both(_TEXT, _lengths("encoder_attention_mask_2")), 2),
    "HunyuanVideoFramepackTransformer3DModel": (_TEXT, 1),
    "Lumina2Transformer2DModel": (_lengths("encoder_attention_mask", torch.bool), 1),
    "MochiTransformer3DModel": (_lengths("encoder_attention_mask", torch.bool), 1),
}


def _twin(name: str, where: Where) -> Twin:
    with torch.no_grad():
        return Twin(CASES[name].build(), where)


def _rows(name: str, batch: int) -> int:
    """Samples in a call: some cases of the table come with two."""
    inputs = CASES[name].draw(0, batch, 1)
    latents = inputs["hidden_states"]
    assert isinstance(latents, Tensor)
    return latents.shape[0]


def _serve(twin: Twin, calls: list[Tree]) -> None:
    device = twin.where.device
    with torch.no_grad(), dit_graphs.request():
        for inputs in calls:
            twin(**tree_map_only(Tensor, lambda tensor: tensor.to(device), inputs))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(RAGGED))
def test_masks_of_other_lengths_at_the_same_shape(name: str, graphing: Where) -> None:
    change, batch = RAGGED[name]
    rows = _rows(name, batch)
    layouts = [(4,) * rows, (2, 4, 3, 1)[:rows], (4,) * rows, (2, 4, 3, 1)[:rows]]
    twin = _twin(name, graphing)
    for number, lengths in enumerate(layouts):
        draws = [CASES[name].draw(10 * number + step, batch, 1) for step in range(4)]
        _serve(twin, [change(inputs, lengths) for inputs in draws])
    assert set(twin.fallbacks) == {"warming_up"}, twin.details
    assert twin.graphs == 2, "one graph per layout"
    assert all(graph["breaks"] == 0 for graph in twin.runner.report()["graphs"])
    assert twin.replays >= 8, "layouts that come back replay at once"


@pytest.mark.filterwarnings("ignore")
def test_sequential_guidance_alternates_between_two_layouts(graphing: Where) -> None:
    twin = _twin("Lumina2Transformer2DModel", graphing)
    change = _lengths("encoder_attention_mask", torch.bool)
    calls = []
    for step in range(8):
        inputs = CASES["Lumina2Transformer2DModel"].draw(step, 1, 1)
        calls.append(change(inputs, (6, 3) if step % 2 else (2, 2)))
    _serve(twin, calls)
    assert twin.graphs == 2 and twin.replays >= 2


@pytest.mark.filterwarnings("ignore")
def test_images_share_a_graph_and_their_absence_has_its_own(graphing: Where) -> None:
    name = "HunyuanVideo15Transformer3DModel"
    twin = _twin(name, graphing)

    def call(seed: int, image: bool) -> Tree:
        inputs = CASES[name].draw(seed, 1, 1)
        embeds = inputs["image_embeds"]
        assert isinstance(embeds, Tensor)
        noise = torch.randn(embeds.shape, generator=torch.Generator().manual_seed(seed))
        return {**inputs, "image_embeds": noise if image else torch.zeros_like(embeds)}

    for image in (False, True, False, True):
        _serve(twin, [call(seed, image) for seed in range(5)])
    assert twin.graphs == 2 and set(twin.fallbacks) == {"warming_up"}


def _edit(seed: int, start: int) -> Tree:
    """Qwen-Image 2.1 with a condition picture of 2 × 4 latent tokens at slot `start`."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.zeros(1, 10, dtype=torch.bool)
    slots[:, start : start + 2] = True
    slots[:, 6:] = True  # the target's, after the prompt
    return {
        "hidden_states": torch.randn(1, 24, 4, generator=generator),
        "encoder_hidden_states": torch.randn(1, 6, 8, generator=generator),
        "encoder_hidden_states_mask": torch.ones(1, 6, dtype=torch.long),
        "timestep": torch.rand(1, generator=generator),
        "img_shapes": [[(1, 2, 4), (1, 4, 4)]],
        "img_mask": slots,
    }


@pytest.mark.filterwarnings("ignore")
def test_where_an_image_stands_in_the_prompt_is_known(graphing: Where) -> None:
    twin = _twin("QwenImage21Transformer2DModel", graphing)
    for start in (1, 3, 1, 3):
        _serve(twin, [_edit(seed, start) for seed in range(4)])
    assert twin.graphs == 2 and set(twin.fallbacks) == {"warming_up"}
    assert twin.replays >= 8


@pytest.mark.filterwarnings("ignore")
def test_experts_are_the_only_break_of_hidream(segmenting: Where) -> None:
    name = "HiDreamImageTransformer2DModel"
    twin = _twin(name, segmenting)
    _serve(twin, [CASES[name].draw(seed, 1, 1) for seed in range(6)])
    graph = twin.runner.report()["graphs"][0]
    assert graph["breaks"] == 2, "one mixture per block"
    assert all("moe_infer" in site for site in graph["break_sites"])
    assert graph["captured_fraction"] > 0.8 and twin.replays >= 3
    assert not any("moe_infer" in vars(child) for child in twin.module.modules())


@pytest.mark.filterwarnings("ignore")
def test_omnigen_keeps_its_rotary_buffer_and_gives_everything_back(graphing: Where) -> None:
    name = "OmniGenTransformer2DModel"
    twin = _twin(name, graphing)
    rope = twin.module.get_submodule("rope")
    before = rope.inv_freq
    _serve(twin, [CASES[name].draw(seed, 1, 1) for seed in range(5)])
    assert twin.replays >= 2 and rope.inv_freq is before
    clone = copy.deepcopy(twin.module)
    assert clone.get_submodule("rope").forward.__self__ is clone.get_submodule("rope")
    dit_graphs.unwrap(twin.module)
    assert "forward" not in vars(rope)


@pytest.mark.filterwarnings("ignore")
def test_omnigen_takes_the_long_factors_past_its_first_training_length(graphing: Where) -> None:
    name = "OmniGenTransformer2DModel"
    twin = _twin(name, graphing)
    limit = twin.module.get_submodule("rope").original_max_position_embeddings

    def call(seed: int, shift: int) -> Tree:
        inputs = CASES[name].draw(seed, 1, 1)
        positions = inputs["position_ids"]
        assert isinstance(positions, Tensor)
        return {**inputs, "position_ids": positions + shift}

    for shift in (0, limit, 0, limit):
        _serve(twin, [call(seed, shift) for seed in range(4)])
    assert twin.graphs == 2 and set(twin.fallbacks) == {"warming_up"}


def test_a_patched_forward_has_no_family() -> None:
    module = CASES["Lumina2Transformer2DModel"].build()
    assert family_of(module) is not None
    original = module.forward
    module.forward = lambda *args, **kwargs: original(*args, **kwargs)
    assert family_of(module) is None
    assert family_of(CASES["FluxTransformer2DModel"].build()) is None


def test_every_family_is_of_a_class_in_the_sweep() -> None:
    classes = {case.name for case in CASES.values()}
    assert set(FAMILIES) <= classes


@pytest.mark.filterwarnings("ignore")
def test_accelerate_finds_the_family_of_a_bare_module() -> None:
    module = CASES["MochiTransformer3DModel"].build()
    plain = copy.deepcopy(module)
    before = dict(vars(module))
    dit_graphs.accelerate(module, backend="recorded")
    with torch.no_grad(), dit_graphs.request():
        for seed in range(5):
            inputs = CASES["MochiTransformer3DModel"].draw(seed, 1, 1)
            expected = plain(**inputs, return_dict=False)[0]
            assert torch.equal(module(**inputs, return_dict=False)[0], expected)
    graphs = dit_graphs.stats(module)["components"]["denoiser"]["graphs"]
    assert [graph["breaks"] for graph in graphs] == [0]
    dit_graphs.restore(module)
    assert vars(module) == before
