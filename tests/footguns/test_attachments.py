"""What users attach to a pipeline: offload, casting, FreeU, tiling, processors.

Each of them works through hooks or plain attributes that no argument shows. It is honoured, by an
eager call with its reason or by a graph of its own, and taking it off brings the graphs back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import diffusers
import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from accelerate.hooks import remove_hook_from_module
from pair import Pair
from torch import Tensor, nn

from dit_graphs import holding
from dit_graphs.wrapping import runner_of


def test_b59_layerwise_casting_moves_the_weights_and_stays_eager() -> None:
    """Each forward casts the weights up into new memory and back: addresses mean nothing."""
    pair = Pair("flux")
    pair.latents()
    pair.both(
        lambda pipe: pipe.transformer.enable_layerwise_casting(
            storage_dtype=torch.bfloat16, compute_dtype=torch.float32
        )
    )
    assert pair.reasons_of(2) == {"layerwise_casting": 8}


@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_b30_group_offload_stays_eager_with_one_reason(kind: str) -> None:
    """Weights come and go inside the call. Here both places are the CPU; the hooks are real."""
    pair = Pair("flux")
    pair.latents()
    options = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    pair.both(
        lambda pipe: pipe.transformer.enable_group_offload(
            onload_device=torch.device("cpu"),
            offload_device=torch.device("cpu"),
            offload_type=kind,
            **options,
        )
    )
    assert pair.reasons_of(2) == {"offload": 8}


_OFFLOAD: dict[str, Callable[[nn.Module], object]] = {
    "model": lambda module: cpu_offload_with_hook(module, "cpu"),
    "sequential": lambda module: cpu_offload(module, torch.device("cpu")),
}


@pytest.mark.parametrize("when", ["before accelerate", "under graphs"])
@pytest.mark.parametrize("kind", _OFFLOAD)
def test_b27_weights_that_come_and_go_by_hooks(
    kind: str, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    """accelerate's hooks, here from the CPU to the CPU: good pictures, told once and not per step.

    Off again, the graphs are back.
    """

    def offload(pipe: object) -> None:
        _OFFLOAD[kind](pipe.transformer)

    with caplog.at_level(logging.WARNING, logger="dit_graphs"):
        pair = Pair("flux", prepare=offload if when == "before accelerate" else None)
        if when == "under graphs":
            pair.latents()
            pair.both(offload)
        for seed in range(3):
            pair.latents(seed=seed)
    told = [r.getMessage() for r in caplog.records if "offload" in r.getMessage()]
    assert len(told) == 1
    pair.both(lambda pipe: remove_hook_from_module(pipe.transformer, recurse=True))
    for seed in range(2):
        pair.latents(seed=seed)
    assert pair.replays >= 3


def test_b27_sequential_offload_to_nowhere_is_called_offload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between calls the weights are on the meta device, where no graph is possible either.

    The reason is the hook that took them there, whatever the backend says of that device.
    """
    resolve = holding.resolve_backend
    monkeypatch.setattr(
        holding,
        "resolve_backend",
        lambda name, device: "none" if device.type == "meta" else resolve(name, device),
    )
    pair = Pair("flux")
    pair.latents()
    pair.both(lambda pipe: cpu_offload(pipe.transformer, torch.device("cpu")))
    assert pair.reasons_of(2) == {"offload": 8}
    pair.both(lambda pipe: remove_hook_from_module(pipe.transformer, recurse=True))
    assert pair.reasons_of(2) == {"warming_up": 2}


def test_a_module_that_stays_eager_is_looked_at_once_per_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What forbids graphs forbids them for the request: each step is plain's and costs no sweep."""
    pair = Pair("flux", prepare=lambda pipe: pipe.transformer.register_forward_hook(_nothing))
    watch = runner_of(pair.fast.transformer)._watch
    sweeps, refresh = [], watch.refresh
    monkeypatch.setattr(watch, "refresh", lambda *given: sweeps.append(given) or refresh(*given))
    assert pair.reasons_of(2, steps=6) == {"hooks": 12}
    assert len(sweeps) == 2


def _nothing(*given: object) -> None:
    return None


@pytest.mark.gpu
@pytest.mark.parametrize("when", ["before accelerate", "under graphs"])
@pytest.mark.parametrize("kind", ["model", "sequential", "group", "group on a stream"])
def test_b27_b30_offload_of_a_whole_pipeline(kind: str, when: str) -> None:
    """diffusers' own switches on a real device, at two sizes."""

    def offload(pipe: object) -> None:
        if kind == "model":
            pipe.enable_model_cpu_offload()
        elif kind == "sequential":
            pipe.enable_sequential_cpu_offload()
        else:
            pipe.transformer.enable_group_offload(
                onload_device=torch.device("cuda"),
                offload_device=torch.device("cpu"),
                offload_type="leaf_level",
                use_stream=kind.endswith("stream"),
            )

    device = "cpu" if when == "before accelerate" and not kind.startswith("group") else "cuda"
    pair = Pair(
        "flux",
        device=device,
        backend="breakable",
        prepare=offload if when == "before accelerate" else None,
    )
    if when == "under graphs":
        pair.latents()
        assert pair.replays > 0
        pair.both(offload)
    replays = pair.replays if "denoiser" in pair.components() else 0
    for seed in range(3):
        for size in (32, 48):
            pair.latents(seed=seed, size=size)
    # group offload is the transformer's alone; the others keep their graphs
    parts = pair.components().items()
    offloaded = [part for name, part in parts if name == "denoiser" or not kind.startswith("group")]
    assert sum(part["replays"] for part in offloaded) == replays
    if device == "cuda":
        assert set(pair.component()["fallbacks"]) <= {"warming_up", "offload"}, "one reason"


def test_freeu_is_part_of_the_key() -> None:
    """Its factors are plain attributes of the up blocks."""
    pair = Pair("sdxl")
    plain = pair.latents()
    pair.both(lambda pipe: pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4))
    with_it = pair.latents()
    pair.both(lambda pipe: pipe.enable_freeu(s1=0.6, s2=0.4, b1=1.1, b2=1.2))
    other = pair.latents()
    pair.both(lambda pipe: pipe.disable_freeu())
    assert torch.equal(pair.latents(), plain)
    assert not torch.equal(with_it, other)


def test_freeu_factors_turned_by_hand_are_seen_at_the_next_request() -> None:
    """No known method was called: the sweep of plain state finds it."""
    pair = Pair("sdxl")
    pair.both(lambda pipe: pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4))
    found = []
    for factor in (1.2, 1.5, 1.2, 1.8, 1.1):

        def turn(pipe: object, value: float = factor) -> None:
            for block in pipe.unet.up_blocks:
                block.b1 = value

        pair.both(turn)
        found.append(pair.latents())
    assert torch.equal(found[0], found[2])


def test_a_processor_set_by_the_user_is_used() -> None:
    """`set_attn_processor` replaces objects whose class and state decide the attention."""

    class Doubling(diffusers.models.attention_processor.AttnProcessor):
        factor = 2.0

        def __call__(self, *args: object, **kwargs: object) -> Tensor:
            return super().__call__(*args, **kwargs) * self.factor

    pair = Pair("sdxl")
    plain = pair.latents()
    pair.both(lambda pipe: pipe.unet.set_attn_processor(Doubling()))
    doubled = pair.latents()
    assert not torch.equal(plain, doubled)

    def turn(pipe: object) -> None:
        for processor in pipe.unet.attn_processors.values():
            processor.factor = 0.5

    pair.both(turn)
    assert not torch.equal(pair.latents(), doubled)


def test_fused_projections_are_another_tree() -> None:
    pair = Pair("sdxl")
    pair.latents()
    pair.both(lambda pipe: pipe.unet.fuse_qkv_projections())
    pair.latents()
    pair.both(lambda pipe: pipe.unet.unfuse_qkv_projections())
    pair.latents()


@pytest.mark.parametrize("tiling", [True, False])
def test_tiling_of_the_vae_is_part_of_its_key(tiling: bool) -> None:
    """The same latents, decoded whole or in tiles: not the same pixels."""
    pair = Pair("sdxl", components=("vae",))
    for _ in range(2):
        for on in (tiling, not tiling):
            pair.both(
                lambda pipe, on=on: pipe.vae.enable_tiling() if on else pipe.vae.disable_tiling()
            )
            for seed in range(3):
                generator = torch.Generator().manual_seed(seed)
                latents = torch.randn(1, 4, 16, 16, generator=generator)
                with torch.no_grad():
                    mine, theirs = (
                        pipe.vae.decode(latents, return_dict=False)[0]
                        for pipe in (pair.fast, pair.plain)
                    )
                assert torch.equal(mine, theirs)


def test_b58_a_vae_cast_up_for_each_decode() -> None:
    """SDXL's upcast: float32 for the decode, back to half afterwards, on every image."""
    pair = Pair("sdxl", components=("vae",))
    for seed in range(3):
        latents = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(seed))
        for dtype in (torch.float32, torch.bfloat16):
            pair.both(lambda pipe, dtype=dtype: pipe.vae.to(dtype=dtype))
            for _ in range(3):
                with torch.no_grad():
                    mine, theirs = (
                        pipe.vae.decode(latents.to(dtype), return_dict=False)[0]
                        for pipe in (pair.fast, pair.plain)
                    )
                assert torch.equal(mine, theirs)
