"""What VAEs return and keep: distributions to sample from, and scratch lists of video frames."""

from __future__ import annotations

import diffusers
import pytest
import tiny
import torch
from torch import Tensor, nn

import dit_graphs
from dit_graphs.tree import UnknownLeaf, freeze, map_tensors, register_parts, tensor_leaves
from dit_graphs.wrapping import runner_of

# family -> the shape of what its VAE encodes
PICTURES = {
    "sdxl": (1, 3, 32, 32),
    "flux2-klein": (2, 3, 32, 48),
    "qwen-image": (1, 3, 1, 32, 32),
    "wan": (1, 3, 5, 32, 32),
}


def _picture(name: str, seed: int) -> Tensor:
    return torch.randn(PICTURES[name], generator=torch.Generator().manual_seed(seed))


def _equal(mine: object, theirs: object) -> None:
    """Two distributions hold equal tensors, as they lie in memory, and equal settings."""
    assert type(mine) is type(theirs)
    assert list(vars(mine)) == list(vars(theirs))
    for name, value in vars(theirs).items():
        found = getattr(mine, name)
        if isinstance(value, Tensor):
            assert found.dtype == value.dtype and found.stride() == value.stride(), name
            assert torch.equal(found, value), name
        else:
            assert found == value, name


@pytest.mark.parametrize("as_tuple", [False, True], ids=["output", "tuple"])
@pytest.mark.parametrize("name", PICTURES)
def test_a_replayed_encode_hands_out_an_equal_distribution(name: str, as_tuple: bool) -> None:
    pipe, plain = tiny.build(name), tiny.build(name)
    dit_graphs.accelerate(pipe, backend="recorded")
    kept = []
    with torch.no_grad():
        for seed in range(6):
            picture = _picture(name, seed)
            mine, theirs = (p.vae.encode(picture, return_dict=not as_tuple) for p in (pipe, plain))
            assert type(mine) is type(theirs)
            mine, theirs = mine[0], theirs[0]
            _equal(mine, theirs)
            draws = (d.sample(torch.Generator().manual_seed(7)) for d in (mine, theirs))
            assert torch.equal(*draws)
            assert torch.equal(mine.mode(), theirs.mode())
            assert torch.equal(mine.kl(), theirs.kl())
            kept.append((mine, theirs))
        for mine, theirs in kept:
            _equal(mine, theirs)  # no later replay has written into an earlier result
    encode = runner_of(pipe.vae, "encode").stats
    assert encode.replays == 3, encode.details
    dit_graphs.restore(pipe)


def test_a_decode_that_is_handed_each_pictures_generator_is_served() -> None:
    """As Stable Diffusion 1.5 calls it; AutoencoderKL never asks the generator."""
    pipe, plain = tiny.build("sdxl"), tiny.build("sdxl")
    dit_graphs.accelerate(pipe, backend="recorded")
    with torch.no_grad():
        for seed in range(5):
            latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(seed))
            mine, theirs = (
                p.vae.decode(latents, return_dict=False, generator=torch.Generator())[0]
                for p in (pipe, plain)
            )
            assert torch.equal(mine, theirs)
    decode = runner_of(pipe.vae, "decode").stats
    assert decode.replays == 2, decode.details
    dit_graphs.restore(pipe)


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_and_videos_are_decoded_from_graphs(name: str) -> None:
    pipe, plain = tiny.build(name), tiny.build(name)
    dit_graphs.accelerate(pipe, backend="recorded")
    for seed in range(5):
        arguments = [
            {**tiny.call_kwargs(name, size=32, steps=2, seed=seed), "output_type": "pt"}
            for _ in range(2)
        ]
        mine, theirs = (p(**a)[0] for p, a in zip((pipe, plain), arguments, strict=True))
        assert torch.equal(mine, theirs)
    decode = runner_of(pipe.vae, "decode").stats
    assert decode.replays == 2, decode.details


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sdxl", diffusers.StableDiffusionXLImg2ImgPipeline),
        ("flux", diffusers.FluxImg2ImgPipeline),
        ("sd3", diffusers.StableDiffusion3Img2ImgPipeline),
        ("flux2-klein", diffusers.Flux2KleinPipeline),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_pipelines_that_start_from_a_picture_encode_it_from_a_graph(name: str, kind: type) -> None:
    fast, plain = (kind(**tiny.build(name).components) for _ in range(2))
    for pipe in (fast, plain):
        pipe.set_progress_bar_config(disable=True)
    dit_graphs.accelerate(fast, backend="recorded")
    for seed in range(5):
        picture = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(seed))
        arguments = []
        for _ in range(2):
            given = tiny.call_kwargs(name, size=64, steps=4, seed=seed)
            if name == "flux2-klein":
                image = diffusers.utils.numpy_to_pil(picture.permute(0, 2, 3, 1).numpy())
            else:
                image = picture
                given = {k: v for k, v in given.items() if k not in ("height", "width")}
                given["strength"] = 0.75
            arguments.append({**given, "image": image})
        mine, theirs = (tiny.latents(p, a) for p, a in zip((fast, plain), arguments, strict=True))
        assert torch.equal(mine, theirs)
    encode = runner_of(fast.vae, "encode").stats
    assert encode.replays == 2, encode.details


def test_a_wrapped_encode_of_the_users_own() -> None:
    pipe, plain = tiny.build("sdxl"), tiny.build("sdxl")
    dit_graphs.wrap(pipe.vae, backend="recorded", method="encode")
    with torch.no_grad():
        for seed in range(5):
            picture = _picture("sdxl", seed)
            _equal(pipe.vae.encode(picture).latent_dist, plain.vae.encode(picture).latent_dist)
    assert runner_of(pipe.vae, "encode").stats.replays == 2


class Holder:
    def __init__(self, mean: Tensor) -> None:
        self.mean = mean
        self.scale = 2.0
        self.made = True


class Closed(Holder):
    pass


def test_only_registered_objects_are_taken_apart() -> None:
    register_parts(Holder)
    holder = Holder(torch.ones(2))
    assert tensor_leaves([holder]) == [holder.mean]
    other = map_tensors(holder, lambda tensor: tensor * 3)
    assert type(other) is Holder and other is not holder
    assert torch.equal(other.mean, torch.full((2,), 3.0)) and other.scale == 2.0
    assert freeze(holder, []) == freeze(other, [])
    other.scale = 4.0
    assert freeze(holder, []) != freeze(other, [])
    for unknown in (Closed(torch.ones(2)), nn.Identity()):
        with pytest.raises(UnknownLeaf):
            freeze(unknown, [])
        with pytest.raises(UnknownLeaf):
            map_tensors(unknown, lambda tensor: tensor)
    holder.odd = object()
    with pytest.raises(UnknownLeaf):
        freeze(holder, [])
