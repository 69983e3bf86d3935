"""Accelerated latents are the plain pipeline's, whatever changes from call to call.

The pairs are shared: each test finds the graphs that the tests before it left behind, as a user's
second and tenth call would.
"""

from __future__ import annotations

import pytest
import torch

# family -> the argument that switches guidance, and its value for "off"
GUIDANCE = {
    "flux": ("guidance_scale", 1.5),
    "flux2-klein": ("guidance_scale", 1.0),
    "z-image": ("guidance_scale", 0.0),
    "qwen-image": ("true_cfg_scale", 1.0),
    "wan": ("guidance_scale", 1.0),
    "wan22": ("guidance_scale", 1.0),
    "sdxl": ("guidance_scale", 1.0),
    "sd3": ("guidance_scale", 1.0),
}


def test_the_first_image_is_served_by_graphs_already(pair: object) -> None:
    """Six steps: plain, observed, compared, and replays for the rest."""
    pair.latents(steps=6)
    assert pair.replays >= 3


@pytest.mark.parametrize("steps", [1, 2, 6])
def test_any_number_of_steps(pair: object, steps: int) -> None:
    for seed in range(2):
        pair.latents(steps=steps, seed=seed)


def test_seeds(pair: object) -> None:
    before = pair.replays
    found = [pair.latents(steps=4, seed=seed) for seed in (0, 1, 0)]
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    assert pair.replays >= before + 8


@pytest.mark.parametrize("size", [48, (32, 64), (64, 32)], ids=str)
def test_sizes(pair: object, size: int | tuple[int, int]) -> None:
    pair.latents(size=size, steps=5)
    pair.latents(size=32, steps=3)
    pair.latents(size=size, steps=3, seed=1)


@pytest.mark.parametrize("prompt", ["x", "a red heart on a very long blue line of thirty words"])
def test_prompts_of_other_lengths(pair: object, prompt: str) -> None:
    pair.latents(prompt=prompt, steps=5)
    pair.latents(prompt="a green star", steps=3)
    pair.latents(prompt=prompt, steps=3, seed=2)


def test_another_prompt_of_the_same_length(pair: object) -> None:
    """The embeddings are new tensors of the old shape: the leaf that changes for the first time."""
    red = pair.latents(prompt="a red heart", steps=5)
    sad = pair.latents(prompt="a sad heart", steps=5)
    assert not torch.equal(red, sad)


def test_guidance_off_and_on_again(pair: object) -> None:
    name, off = GUIDANCE[pair.name]
    with_it = pair.latents(steps=4)
    without = pair.latents(steps=4, **{name: off})
    assert not torch.equal(with_it, without)
    assert torch.equal(pair.latents(steps=4), with_it)


def test_guidance_of_another_strength(pair: object) -> None:
    name, _ = GUIDANCE[pair.name]
    found = [pair.latents(steps=4, **{name: value}) for value in (2.5, 6.0, 2.5)]
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


def test_two_images_per_prompt(pair: object) -> None:
    option = "num_videos_per_prompt" if pair.name.startswith("wan") else "num_images_per_prompt"
    both = pair.latents(steps=4, **{option: 2})
    assert not torch.equal(both[0], both[1])
    pair.latents(steps=4)
    pair.latents(steps=4, seed=3, **{option: 2})


@pytest.mark.parametrize("how", ["in place", "as a new tensor"])
def test_a_callback_that_edits_latents(pair: object, how: str) -> None:
    def edit(pipe: object, step: int, timestep: object, tensors: dict) -> dict:
        if step == 2:
            if how == "in place":
                tensors["latents"].mul_(0.5)
            else:
                tensors["latents"] = tensors["latents"] * 0.5
        return tensors

    plain = pair.latents(steps=5)
    edited = pair.latents(steps=5, callback_on_step_end=edit)
    assert not torch.equal(plain, edited)
    assert torch.equal(pair.latents(steps=5), plain)


def test_a_callback_that_interrupts(pair: object) -> None:
    def stop(pipe: object, step: int, timestep: object, tensors: dict) -> dict:
        pipe._interrupt = step >= 1
        return tensors

    whole = pair.latents(steps=5)
    pair.latents(steps=5, callback_on_step_end=stop)
    assert torch.equal(pair.latents(steps=5), whole)


def test_a_generation_that_dies_leaves_the_next_one_whole(pair: object) -> None:
    import tiny

    class Stop(Exception):
        pass

    def die(pipe: object, step: int, timestep: object, tensors: dict) -> dict:
        if step == 1:
            raise Stop
        return tensors

    for pipe in (pair.fast, pair.plain):
        arguments = {**tiny.call_kwargs(pair.name, size=32), "callback_on_step_end": die}
        with pytest.raises(Stop):
            tiny.latents(pipe, arguments)
    pair.latents(steps=4)


def test_inference_and_no_grad_callers(pair: object) -> None:
    with torch.inference_mode():
        pair.latents(steps=3)
    with torch.no_grad():
        pair.latents(steps=3, seed=1)
    pair.latents(steps=3, seed=2)


def test_no_call_was_refused(pair: object) -> None:
    """Last in the file: over all of the above, graphs served and only warm-ups were eager."""
    import dit_graphs

    for label, part in dit_graphs.stats(pair.fast)["components"].items():
        if label.startswith("denoiser"):
            assert set(part["fallbacks"]) <= {"warming_up", "max_graphs"}, part["details"]
            assert part["replays"] > part["eager_calls"]
