"""Pipelines that turn something between two steps, or that are made of other pipelines."""

from __future__ import annotations

import ast
import inspect
import textwrap

import diffusers
import pytest
import tiny_moving
import torch
from both import Both, picture
from torch import nn

import dit_graphs
from benchmarks.sweep_cases import class_of
from dit_graphs.pipelines.components import components_of
from dit_graphs.pipelines.mutators import PIPELINE_MUTATORS
from dit_graphs.request_scope import current_request


def test_grounding_that_ends_in_the_middle_of_a_picture() -> None:
    """GLIGEN sets `enabled` on its layers at a step of its own choice."""
    both = Both(tiny_moving.gligen)
    options = {
        "prompt": "a heart",
        "gligen_phrases": ["heart"],
        "gligen_boxes": [[0.1, 0.1, 0.5, 0.5]],
        "height": 32,
        "width": 32,
        "num_inference_steps": 6,
    }
    grounded = both(**options, gligen_scheduled_sampling_beta=1.0)
    for beta in (0.5, 0.2, 0.5):
        partly = both(**options, gligen_scheduled_sampling_beta=beta)
        assert not torch.equal(partly, grounded)
    assert both.part()["replays"] >= 10
    assert set(both.part()["fallbacks"]) == {"warming_up"}


def _turning_methods(kind: type) -> set[str]:
    """Methods of a pipeline class that loop over a part's modules and assign to their attributes.

    A leading underscore marks what a call runs before its loop.
    """
    found = set()
    for name, method in vars(kind).items():
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        source = inspect.getsource(method)
        loops = ast.walk(ast.parse(textwrap.dedent(source))) if "modules()" in source else ()
        for loop in (node for node in loops if isinstance(node, ast.For)):
            is_over_modules = "modules()" in ast.unparse(loop.iter)
            targets = [t for n in ast.walk(loop) if isinstance(n, ast.Assign) for t in n.targets]
            if is_over_modules and any(isinstance(target, ast.Attribute) for target in targets):
                found.add(name)
    return found


def test_every_method_of_a_pipeline_that_turns_its_modules_is_known() -> None:
    kinds = {
        kind
        for name in dir(diffusers)
        if inspect.isclass(kind := getattr(diffusers, name, None))
        and issubclass(kind, diffusers.DiffusionPipeline)
    }
    turning = set().union(*map(_turning_methods, kinds))
    # it chooses parameters of Versatile Diffusion's transformers before the loop
    turning.discard("set_transformer_params")
    assert "enable_fuser" in turning
    assert turning <= set(PIPELINE_MUTATORS)


def test_a_pipeline_made_of_pipelines_is_served_within_their_loops() -> None:
    """The bars are those of its inner pipelines: seen from outside, no call shows one."""
    both = Both(tiny_moving.combined)
    sizes = {"height": 64, "width": 64}
    steps = {"prior_num_inference_steps": 6, "num_inference_steps": 6}
    options = {"prompt": "a heart", **sizes, **steps}
    for seed in range(2):
        both(seed, **options)
    # twelve steps each: plain, observed, compared, then replays, from the first picture on; the
    # second picture's embeddings of an image are new and compared, those of its prompt are not
    assert both.part("denoiser:prior_prior")["replays"] == 9
    assert both.part("denoiser")["replays"] == 8
    assert both.part("prior_text_encoder")["replays"] > 0

    requests = []
    handle = both.fast.unet.register_forward_pre_hook(lambda *_: requests.append(current_request()))
    with dit_graphs.disabled(both.fast):
        both(**options)
    handle.remove()
    assert len(requests) == 6 and len(set(requests)) == 1
    assert requests[0] is not None and requests[0].total_steps == 6 and requests[0].is_over
    dit_graphs.restore(both.fast)
    inner = [both.fast.prior_pipe, both.fast.decoder_pipe]
    assert not any("progress_bar" in vars(pipe) for pipe in (both.fast, *inner))


def test_an_autoencoder_under_another_name_is_served() -> None:
    both = Both(tiny_moving.wuerstchen)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        both(
            seed,
            image_embeddings=torch.randn(1, 4, 4, 4, generator=generator),
            prompt="a heart",
            num_inference_steps=2,
            output_type="np",
        )
    assert both.part("vae:vqgan.decode")["replays"] == 2


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sound_tokenizer", "Cosmos3AVAEAudioTokenizer"),
        ("diffusion_decoder", "LTX2VideoDiffusionDecoderModel"),
        ("audio_vae", "AutoencoderKLLTX2Audio"),
    ],
)
def test_diffusers_autoencoders_are_known_by_their_class(name: str, kind: str) -> None:
    module = nn.Module.__new__(class_of(kind))
    nn.Module.__init__(module)
    assert [(part.role, part.method) for part in components_of({name: module})][:1] == [
        ("vae", "decode")
    ]


def test_a_list_of_features_that_the_unet_empties() -> None:
    """T2I-Adapter: the UNet pops from the list it is given, and is served all the same."""
    both = Both(tiny_moving.adapter)
    options = {"prompt": "a heart", "num_inference_steps": 5}
    found = []
    for seed, width in ((0, 64), (1, 64), (0, 96), (0, 64)):
        size = {"height": 64, "width": width}
        found.append(both(**options, **size, image=picture(seed, 64, width)))
    assert torch.equal(found[0], found[3])
    assert not torch.equal(found[0], found[1])
    both.check_served(10)
