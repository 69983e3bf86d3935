"""What every autoencoder of diffusers is called with: decode and encode, for the sweep.

Owns the shapes only. Knows nothing of graphs. The surprising fact: pipelines call `vae.decode` and
`vae.encode`, never the module, so each of the two methods is a case of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from benchmarks.sweep_cases import Case, Draw, Inputs, Skipped, Tree, made

__all__ = ["CASES", "SKIPPED"]

Shape = tuple[int, ...]
_PICTURE, _FILM, _SOUND = (3, 16, 16), (3, 9, 16, 16), (1, 64)
_SAMPLE = ("sample", "latents")


def _drawn(
    argument: str, shape: Shape, more: Callable[[int], Tree] | None = None, gain: float = 1.0
) -> Inputs:
    """One drawn tensor [batch, *shape] whose last side grows with the width."""

    def inputs(draw: Draw, batch: int, width: int) -> Tree:
        *sides, last = shape
        drawn = draw(batch, *sides, last * width) * gain
        return {argument: drawn, **(more(batch) if more else {})}

    return inputs


def _both(
    name: str,
    picture: Shape | None,
    latent: Shape | None,
    *,
    names: tuple[str, str] = ("x", "z"),
    more: Callable[[int], Tree] | None = None,
    encode_more: Callable[[int], Tree] | None = None,
    widths: tuple[int, ...] = (1, 2),
    batches: tuple[int, ...] = (1, 2),
    make: Callable[[], nn.Module] | None = None,
    why_weak: str = "",
    gain: float = 1.0,
) -> Iterator[Case]:
    """The cases `name.decode` of latents and `name.encode` of pictures; None where it has none.

    `gain` multiplies the latents, where random weights would make little of them.
    """
    methods = (("decode", names[1], latent, more), ("encode", names[0], picture, encode_more))
    for method, argument, shape, extra in methods:
        if shape is not None:
            is_weak = why_weak and method == "encode"
            yield Case(
                kind="vae",
                name=name,
                method=method,
                inputs=_drawn(argument, shape, extra, gain if method == "decode" else 1.0),
                widths=widths,
                batches=batches,
                make=make,
                why_weak={f"[{argument!r}]": why_weak} if is_weak else None,
            )


def _allegro() -> nn.Module:
    """This class encodes and decodes in tiles only; an overlap of 120 rows is built in."""
    vae = made("AutoencoderKLAllegro")
    vae.enable_tiling()
    return vae


def _seeded(batch: int) -> Tree:
    """These decoders draw noise: without a generator no two calls would agree."""
    return {"generator": torch.Generator()}


def _one_frame_each(batch: int) -> Tree:
    return {"num_frames": batch}


def _mode(batch: int) -> Tree:
    """Without this the encoder draws from its distribution, and takes no generator."""
    return {"sample_posterior": False}


def _pictures() -> Iterator[Case]:
    for name in ("AutoencoderKL", "AsymmetricAutoencoderKL", "AutoencoderKLFlux2", "AutoencoderDC",
                 "AutoencoderKLHunyuanImage", "AutoencoderKLKVAE"):  # fmt: skip
        yield from _both(name, _PICTURE, (4, 8, 8))
    yield from _both("AutoencoderTiny", _PICTURE, (4, 8, 8), names=("x", "x"))
    yield from _both("VQModel", _PICTURE, (3, 8, 8), names=("x", "h"))
    yield from _both("AutoencoderKLTemporalDecoder", _PICTURE, (4, 8, 8), more=_one_frame_each)
    yield from _both("ConsistencyDecoderVAE", _PICTURE, (4, 8, 8), more=_seeded)
    # one size of token grid is built in
    yield from _both("AutoencoderRAE", (3, 32, 32), (64, 4, 4), widths=(1,))


def _films() -> Iterator[Case]:
    yield from _both("AutoencoderKLWan", (3, 5, 16, 16), (4, 2, 8, 8))
    yield from _both("AutoencoderKLQwenImage", (3, 1, 16, 16), (4, 1, 8, 8))
    yield from _both("AutoencoderKLQwenImage21", (4, 1, 16, 16), (4, 1, 4, 4))
    yield from _both("AutoencoderKLCogVideoX", _FILM, (4, 3, 4, 4))
    # one tile, one sample: the class knows tiles of one size, without a batch
    yield from _both(
        "AutoencoderKLAllegro",
        (3, 24, 128, 128),
        (4, 6, 16, 16),
        make=_allegro,
        batches=(1,),
        widths=(1,),
    )
    yield from _both("AutoencoderKLCosmos", (3, 9, 32, 32), (4, 3, 8, 8))
    yield from _both("AutoencoderKLHunyuanVideo", _FILM, (4, 3, 2, 2))
    yield from _both("AutoencoderKLHunyuanImageRefiner", (3, 5, 16, 16), (4, 3, 4, 4))
    # its attention mask is made for one sample
    yield from _both("AutoencoderKLHunyuanVideo15", (3, 5, 16, 16), (4, 3, 4, 4), batches=(1,))
    yield from _both("AutoencoderKLLTXVideo", _FILM, (8, 3, 4, 4))
    yield from _both("AutoencoderKLLTX2Video", _FILM, (8, 2, 2, 2))
    yield from _both("AutoencoderKLMagvit", _FILM, (4, 3, 8, 8))
    yield from _both("AutoencoderKLMiniMaxH3", (3, 22, 8, 8), (4, 7, 2, 2))
    yield from _both("AutoencoderKLMochi", (3, 7, 16, 16), (4, 2, 2, 2))
    yield from _both(
        "AutoencoderKLKVAEVideo",
        (3, 5, 16, 16),
        (4, 3, 8, 8),
        why_weak="half of what it returns is a variance, which is constant",
    )
    yield from _both("AutoencoderVidTok", (3, 17, 16, 16), (4, 5, 2, 2))
    yield from _both("Kandinsky6SRVAE", _FILM, (4, 3, 4, 4))
    yield from _both("LTX2VideoDiffusionDecoderModel", None, (8, 2, 3, 3), more=_seeded)


def _sounds() -> Iterator[Case]:
    yield from _both("AutoencoderOobleck", _SOUND, (4, 8))
    yield from _both("AutoencoderKLKVAEAudio", (1, 36), (4, 6), names=("audio_data", "z"))
    # the last side is the number of mel bins
    yield from _both("AutoencoderKLLTX2Audio", (2, 16, 8), (4, 8, 4), widths=(1,))
    yield from _both("AutoencoderKLMiniMaxH3Audio", (1, 32), (8, 8), names=_SAMPLE)
    yield from _both("AutoencoderSAME", (2, 128), (8, 8), names=_SAMPLE, gain=30.0)
    yield from _both("Cosmos3AVAEAudioTokenizer", (2, 32), (4, 8), names=_SAMPLE)
    yield from _both("LongCatAudioDiTVae", (1, 32), (4, 8), names=_SAMPLE, encode_more=_mode)
    yield from _both("MMAudioVAE", (256,), (4, 8), names=("audio", "z"))
    yield Case(kind="vae", name="MMAudioVocoder", inputs=_drawn("mel", (8, 8)))
    yield Case(kind="vae", name="MiniMaxMusic3Vocoder", inputs=_drawn("latents", (4, 8)))


CASES: tuple[Case, ...] = (*_pictures(), *_films(), *_sounds())

SKIPPED: tuple[Skipped, ...] = (
    Skipped(
        "vae",
        "RFD4ProteinaAutoencoder",
        "encodes proteins: its inputs are residue and atom tables, no tensors that can be drawn",
    ),
)
