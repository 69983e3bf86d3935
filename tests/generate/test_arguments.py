"""What a request asks for reaches the pipeline under its own names, or is refused with their list.

Rows B22, B24 and B54 of the public bug log start here: an argument that is dropped on the way.
"""

from __future__ import annotations

import diffusers
import pytest
import tiny
from PIL import Image

from dit_graphs.pipelines.generate import (
    GenerateRequest,
    InputError,
    accepted_names,
    check_names,
    generate,
    guidance_note,
)
from dit_graphs.pipelines.generate.arguments import call_arguments
from dit_graphs.pipelines.generate.inputs import InputFile

PIPELINES = sorted(
    name
    for name in dir(diffusers)
    if name.endswith("Pipeline") and name[:4] in ("Flux", "Qwen", "WanP", "ZIma", "LTXP")
)


def test_an_argument_the_pipeline_does_not_take_is_refused_with_the_names() -> None:
    request = GenerateRequest(prompt="x", num_frames=17)
    with pytest.raises(InputError) as caught:
        check_names(diffusers.ZImagePipeline, request)
    assert caught.value.option == "num_frames"
    for name in accepted_names(diffusers.ZImagePipeline):
        assert name in caught.value.problem
    check_names(diffusers.WanPipeline, request)


def test_set_takes_any_argument_but_none_that_would_break_the_answer() -> None:
    names = accepted_names(diffusers.WanPipeline)
    assert "max_sequence_length" in names and "guidance_scale_2" in names
    for name in ("generator", "output_type", "return_dict", "latents", "prompt_embeds", "self"):
        assert name not in names
        with pytest.raises(InputError, match=rf"^set: WanPipeline does not take '{name}'"):
            check_names(diffusers.WanPipeline, GenerateRequest(prompt="x", set={name: 1}))


def test_a_list_of_json_is_a_tuple_where_the_pipeline_adds_it_to_tuples() -> None:
    pipe = tiny.build("sdxl")
    given = {"original_size": [64, 64], "timesteps": [9.0]}
    arguments = call_arguments(pipe, GenerateRequest(prompt="x", set=given))
    assert (arguments["original_size"], arguments["timesteps"]) == ((64, 64), [9.0])
    del given["timesteps"]
    (item,) = generate(pipe, "x", seed=1, height=32, width=32, num_inference_steps=1, set=given)
    assert item.record["request"]["set"] == given


@pytest.mark.parametrize("value", [True, 1.5, "x", []])
def test_a_mapping_that_is_none_is_refused_before_the_pipeline_is_called(value: object) -> None:
    request = GenerateRequest(prompt="x", set={"joint_attention_kwargs": value})
    with pytest.raises(InputError, match=r"^set: joint_attention_kwargs: expected a JSON object"):
        call_arguments(tiny.build("z-image"), request)


def test_set_cannot_fight_with_an_option() -> None:
    request = GenerateRequest(prompt="x", height=64, set={"height": 32})
    with pytest.raises(InputError, match=r"'height' was given twice"):
        check_names(diffusers.ZImagePipeline, request)


@pytest.mark.parametrize("name", PIPELINES)
def test_every_request_field_is_taken_or_refused(name: str) -> None:
    """No pipeline class makes an argument vanish: what passes the check is in the call."""
    pipeline_class = getattr(diffusers, name)
    accepted = accepted_names(pipeline_class)
    samples = {"height": 64, "num_frames": 5, "strength": 0.5, "image": ("a.png",)}
    for field, value in samples.items():
        needed = {n: "a.png" for n in ("image", "mask_image") if {n, "strength"} <= set(accepted)}
        request = GenerateRequest.from_mapping({"prompt": "x", **needed, field: value})
        if field in accepted:
            check_names(pipeline_class, request)
        else:
            with pytest.raises(InputError):
                check_names(pipeline_class, request)


def test_guidance_reaches_true_cfg_where_the_denoiser_has_no_guidance_embedding() -> None:
    qwen = tiny.build("qwen-image")
    request = GenerateRequest(prompt="x", negative_prompt="y", guidance_scale=3.0)
    assert call_arguments(qwen, request)["true_cfg_scale"] == 3.0
    assert "guidance_scale" not in call_arguments(qwen, request)
    assert guidance_note(qwen, request) is None


def test_guidance_that_cannot_act_is_said() -> None:
    qwen = tiny.build("qwen-image")
    note = guidance_note(qwen, GenerateRequest(prompt="x", guidance_scale=3.0))
    assert note is not None and "negative prompt" in note
    z_image = tiny.build("z-image")
    assert guidance_note(z_image, GenerateRequest(prompt="x", guidance_scale=3.0)) is None


def test_guidance_stays_where_the_denoiser_embeds_it() -> None:
    flux = tiny.build("flux")
    flux.transformer.register_to_config(guidance_embeds=True)
    request = GenerateRequest(prompt="x", guidance_scale=3.0)
    assert call_arguments(flux, request)["guidance_scale"] == 3.0
    flux.transformer.register_to_config(guidance_embeds=False)
    assert call_arguments(flux, request)["true_cfg_scale"] == 3.0


def test_pictures_are_given_as_pixels_one_or_a_list() -> None:
    pipe = object.__new__(diffusers.QwenImageEditPlusPipeline)
    inputs = [
        InputFile("image", f"/{n}.png", "0", Image.new("RGB", (4, 4), (n, 0, 0))) for n in range(2)
    ]
    one = call_arguments(pipe, GenerateRequest(prompt="x", image=("/0.png",)), inputs[:1])
    assert one["image"] is inputs[0].image
    two = call_arguments(pipe, GenerateRequest(prompt="x", image=("/0.png", "/1.png")), inputs)
    assert two["image"] == [item.image for item in inputs]


def test_a_pipeline_may_pop_from_what_it_is_given() -> None:
    pipe = tiny.build("z-image")
    request = GenerateRequest(prompt="x", set={"joint_attention_kwargs": {"scale": 1.0}})
    given = call_arguments(pipe, request)["joint_attention_kwargs"]
    assert isinstance(given, dict)
    given.pop("scale")
    assert request.set == {"joint_attention_kwargs": {"scale": 1.0}}


def test_a_prompt_is_missed_only_where_nothing_stands_for_it() -> None:
    with pytest.raises(InputError, match=r"^prompt: ZImagePipeline needs a prompt"):
        check_names(diffusers.ZImagePipeline, GenerateRequest())
    check_names(diffusers.WanImageToVideoPipeline, GenerateRequest(image=("a.png",)))
    check_names(diffusers.DDPMPipeline, GenerateRequest())


def test_frames_per_second_of_a_still_picture_are_refused() -> None:
    request = GenerateRequest(prompt="x", fps=8)
    with pytest.raises(InputError, match=r"^fps: ZImagePipeline makes no video"):
        check_names(diffusers.ZImagePipeline, request)
    check_names(diffusers.WanPipeline, request)


def test_a_class_that_changes_a_picture_names_the_one_it_lacks() -> None:
    with pytest.raises(InputError, match=r"^image: ZImageImg2ImgPipeline needs one"):
        check_names(diffusers.ZImageImg2ImgPipeline, GenerateRequest(prompt="x"))
    request = GenerateRequest(prompt="x", image=("a.png",))
    with pytest.raises(InputError, match=r"^mask_image: ZImageInpaintPipeline needs one"):
        check_names(diffusers.ZImageInpaintPipeline, request)


@pytest.mark.parametrize("blank", ["", "  \n"])
def test_a_blank_prompt_alone_is_refused_and_beside_a_picture_a_choice(blank: str) -> None:
    """A shell variable that was not set; image to video without words is meant."""
    with pytest.raises(InputError, match=r"^prompt: expected words, got "):
        check_names(diffusers.ZImagePipeline, GenerateRequest(prompt=blank))
    with pytest.raises(InputError, match=r"^prompt: expected words, got "):
        check_names(diffusers.ZImagePipeline, GenerateRequest(prompt=blank, set={"sigmas": [1]}))
    beside = GenerateRequest(prompt=blank, image=("a.png",))
    check_names(diffusers.ZImageImg2ImgPipeline, beside)
    check_names(diffusers.WanImageToVideoPipeline, beside)


def test_two_pictures_for_a_class_that_changes_one_are_refused() -> None:
    two = GenerateRequest(prompt="x", image=("a.png", "b.png"))
    with pytest.raises(InputError, match=r"^image: ZImageImg2ImgPipeline starts from one .* got 2"):
        check_names(diffusers.ZImageImg2ImgPipeline, two)
    check_names(diffusers.QwenImageEditPlusPipeline, two)


def test_a_control_picture_reaches_image_where_a_controlnet_pipeline_calls_it_so() -> None:
    own = diffusers.StableDiffusionControlNetPipeline
    request = GenerateRequest(prompt="x", control_image="/c.png")
    picture = InputFile("control_image", "/c.png", "0", Image.new("RGB", (4, 4)))
    assert call_arguments(object.__new__(own), request, [picture])["image"] is picture.image
    named = object.__new__(diffusers.FluxControlNetPipeline)
    assert call_arguments(named, request, [picture])["control_image"] is picture.image
    both = GenerateRequest(prompt="x", control_image="/c.png", image=("/i.png",))
    with pytest.raises(InputError, match=r"^control_image: .* takes it or an image"):
        check_names(own, both)
    with pytest.raises(InputError, match=r"^control_image: .* does not take it"):
        check_names(diffusers.StableDiffusionPipeline, request)


def test_a_size_is_an_area_where_a_pipeline_keeps_only_the_shape() -> None:
    """Kontext would answer 1024 × 1024 for 128 × 64 otherwise."""
    pipe = object.__new__(diffusers.FluxKontextPipeline)
    request = GenerateRequest(prompt="x", width=128, height=64)
    pipe.register_to_config()
    pipe.transformer = None
    assert call_arguments(pipe, request)["max_area"] == 128 * 64
    assert "max_area" not in call_arguments(pipe, GenerateRequest(prompt="x"))
    own = GenerateRequest(prompt="x", width=128, height=64, set={"max_area": 5})
    assert call_arguments(pipe, own)["max_area"] == 5
