"""What users change between two pictures and between two steps: every call stays plain's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pair import Pair
from torch import Tensor


def test_b48_sizes_steps_guidance_and_numbers_of_images_in_turn() -> None:
    """Each of them changes shapes or branches; none may meet the graph of another."""
    pair = Pair("sd3")
    calls = [
        {"size": 32, "guidance_scale": 3.5},
        {"size": 48, "guidance_scale": 1.0},
        {"size": 32, "guidance_scale": 0.0, "steps": 3},
        {"size": 32, "guidance_scale": 3.5, "num_images_per_prompt": 2},
        {"size": 48, "guidance_scale": 5.0},
    ]
    for call in (*calls, *reversed(calls)):
        pair.latents(**call)
    assert set(pair.component()["fallbacks"]) == {"warming_up"}
    assert pair.replays >= 20


def test_b49_lists_of_prompts_of_other_lengths() -> None:
    """Z-Image gets lists of tensors: how many there are belongs to the key, and how long each is in
    multiples of 32 (the longest one here is beyond the first)."""
    pair = Pair("z-image")
    short, longer, longest = "a heart", "a red heart on white", "a red heart on a white table, soft"
    batches = [[short], [longer, short], [short, longer], [longest, short, longer], [short, short]]
    for prompts in (*batches, *batches[1:3]):
        pair.latents(prompt=prompts, negative_prompt=["blue"] * len(prompts), steps=3)
    pair.latents(prompt=[longer], negative_prompt=["blue"], num_images_per_prompt=2, steps=3)
    # one sample, two, three of which one is long, and two pictures of one prompt
    assert pair.captures == len(pair.component()["graphs"]) == 4
    assert set(pair.component()["fallbacks"]) == {"warming_up"}


def test_b50_padded_prompts_whose_mask_changes_at_one_shape() -> None:
    """Padded prompts, negative ones longer than the prompt: a mask's values are data, no key."""
    pair = Pair("qwen-image")
    texts = ["a heart", "a red heart on a white table", "a blue square on a dark table!"]
    for prompts in ([texts[0], texts[1]], [texts[1], texts[0]], [texts[1], texts[2]]):
        for negative in ("no", "a much longer negative prompt than any of these"):
            pair.latents(prompt=prompts, negative_prompt=[negative] * 2, steps=3)
    assert pair.replays >= 20


def _guidance_off(pipe: object, step: int, tensors: dict[str, Tensor]) -> None:
    if step == 1:
        pipe._guidance_scale = 1.0
        for name in ("prompt_embeds", "pooled_prompt_embeds"):
            tensors[name] = tensors[name].chunk(2)[1]


def _latents_written(pipe: object, step: int, tensors: dict[str, Tensor]) -> None:
    tensors["latents"].mul_(0.5 if step == 1 else 1.0)


def _latents_replaced(pipe: object, step: int, tensors: dict[str, Tensor]) -> None:
    tensors["latents"] = tensors["latents"] + 0.25 * (step == 1)


def _embeds_written(pipe: object, step: int, tensors: dict[str, Tensor]) -> None:
    if step in (1, 2):
        tensors["prompt_embeds"].add_(0.5)


def _embeds_replaced(pipe: object, step: int, tensors: dict[str, Tensor]) -> None:
    if step in (1, 2):
        tensors["prompt_embeds"] = tensors["prompt_embeds"] * 0.5


@pytest.mark.parametrize(
    "edit",
    [_guidance_off, _latents_written, _latents_replaced, _embeds_written, _embeds_replaced],
    ids=lambda edit: edit.__name__.strip("_"),
)
def test_b51_a_callback_edits_what_the_next_step_reads(edit: Callable[..., None]) -> None:
    """The next step must see it: in place, by another tensor, or by half of the batch."""
    pair = Pair("sd3")
    plain = pair.latents(steps=5)

    def callback(pipe: object, step: int, timestep: object, tensors: dict) -> dict:
        edit(pipe, step, tensors)
        return tensors

    names = ["latents", "prompt_embeds", "pooled_prompt_embeds"]
    for seed in (1, 0):
        edited = pair.latents(
            steps=5,
            seed=seed,
            callback_on_step_end=callback,
            callback_on_step_end_tensor_inputs=names,
        )
    assert not torch.equal(edited, plain)
    assert torch.equal(pair.latents(steps=5), plain)
    assert pair.replays >= 8


def test_b61_every_image_of_a_batch_has_its_own_seed() -> None:
    """The batch equals plain's batch; alone an image starts from the same noise, to the bit.

    Other batch sizes take other kernels, so the image itself is equal only up to their rounding.
    """
    pair = Pair("flux")

    def noise_of(seeds: list[int], steps: int) -> tuple[Tensor, Tensor]:
        first: list[Tensor] = []
        handle = pair.fast.transformer.register_forward_pre_hook(
            lambda module, args, kwargs: first.append(kwargs["hidden_states"].clone()),
            with_kwargs=True,
        )
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        latents = pair.call(
            pair.fast, prompt=["a heart"] * len(seeds), generator=generators, steps=steps
        )
        handle.remove()
        return first[0], latents

    def batch(pipe: object) -> Tensor:
        generators = [torch.Generator().manual_seed(seed) for seed in (5, 6, 7, 8)]
        return pair.call(pipe, prompt=["a heart"] * 4, generator=generators)

    for _ in range(2):
        together = batch(pair.fast)
        assert torch.equal(together, batch(pair.plain))
    noise, _ = noise_of([5, 6, 7, 8], 1)
    for row, seed in enumerate((5, 6, 7, 8)):
        alone, _ = noise_of([seed], 1)
        assert torch.equal(alone[0], noise[row])
        single = pair.call(
            pair.fast, prompt=["a heart"], generator=[torch.Generator().manual_seed(seed)]
        )
        assert torch.allclose(single[0], together[row], rtol=1e-3, atol=1e-3)
    assert pair.replays > 0
