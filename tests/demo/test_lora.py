"""LoRA from the page: it acts, its strength acts, and taking it away leaves nothing (B22, B24)."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from demo_studio import a_form, run_job, studio_of
from diffusers import ZImagePipeline

from dit_graphs import GraphConfig
from dit_graphs.app.demo import work
from dit_graphs.app.demo.loras import LoraShelf
from dit_graphs.app.demo.restoring import restore_form
from dit_graphs.app.demo.stage import details_html
from dit_graphs.app.demo.starting import start_form
from dit_graphs.app.demo.studio import Studio
from dit_graphs.app.demo.work import Finished
from dit_graphs.pipelines.generate import Adapter, InputError, LoadedPipeline, ModelSpec
from dit_graphs.pipelines.generate.setup import set_up


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA of the tiny Z-Image with weights large enough to be seen."""
    peft = pytest.importorskip("peft")
    transformer = tiny.build("z-image").transformer
    transformer.add_adapter(
        peft.LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_k", "to_v"])
    )
    torch.manual_seed(0)
    for name, parameter in transformer.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    folder = tmp_path_factory.mktemp("lora")
    layers = peft.get_peft_model_state_dict(transformer)
    ZImagePipeline.save_lora_weights(folder, transformer_lora_layers=layers)
    return folder / "pytorch_lora_weights.safetensors"


def _draw(studio: Studio, lora: str, steps: int = 3) -> Finished:
    job = run_job(studio, lambda job: work.generate(studio, a_form(lora=lora, steps=steps), job))
    (finished,) = job.results
    assert isinstance(finished, Finished)
    return finished


def _pixels(finished: Finished) -> bytes:
    return finished.item.media[0].frames[0].tobytes()


def test_b24_strengths_act_and_come_back_and_none_is_the_base_model(weights: Path) -> None:
    name = weights.name
    with studio_of(lora_dir=weights.parent) as studio:
        lines = ("", f"{name}:1", f"{name}:0.5", f"{name}:0", name, "")
        made = [_draw(studio, lora) for lora in lines]
        base, full, half, nothing, again, after = map(_pixels, made)
        assert len({base, full, half}) == 3
        assert nothing == base
        assert again == full
        assert after == base
        assert made[1].item.record["model"]["lora"] == [f"{weights}:1.0"]  # type: ignore[index,call-overload]
        assert "lora" not in made[5].item.record["model"]  # type: ignore[operator]
        assert "pytorch_lora_weights.safetensors:0.5" in details_html(made[2])
        restored = restore_form(made[2].item.files[0], studio, lambda path: False)
        assert (restored.form.lora, restored.notes) == (f"{name}:0.5", ())
        studio.loras = LoraShelf()
        restored = restore_form(made[2].item.files[0], studio, lambda path: False)
        assert restored.form.lora == ""
        assert "not offered here" in restored.notes[0]


def test_graphs_with_a_lora_draw_what_plain_calls_draw(weights: Path) -> None:
    from dit_graphs.pipelines import disabled

    with studio_of(lora_dir=weights.parent) as studio:
        _draw(studio, f"{weights.name}:0.7")
        graphs = _draw(studio, f"{weights.name}:0.7")
        assert graphs.trace.calls["denoiser"].num_eager == 0
        with disabled(studio.pipe):
            plain = _draw(studio, f"{weights.name}:0.7")
    assert _pixels(graphs) == _pixels(plain)


@pytest.mark.parametrize("lora", ["/nowhere/x.safetensors:1", "x:y:z", ":1", "x/y", "NAME:much"])
def test_b24_a_lora_that_is_not_there_is_an_error_and_the_base_model_stays(
    lora: str, weights: Path
) -> None:
    lora = lora.replace("NAME", weights.name)
    with studio_of(lora_dir=weights.parent) as studio:
        base = _draw(studio, "")
        with pytest.raises(InputError) as caught:
            _draw(studio, lora)
        assert caught.value.option == "lora"
        assert _pixels(_draw(studio, "")) == _pixels(base)


def test_weights_of_another_model_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "other.safetensors"
    save_file({"unet.nothing.lora_A.weight": torch.ones(2, 2)}, path)
    with studio_of(lora_dir=tmp_path) as studio:
        base = _draw(studio, "")
        with pytest.raises(InputError, match=r"cannot be loaded|holds no weights"):
            _draw(studio, f"{path.name}:1")
        assert _pixels(_draw(studio, "")) == _pixels(base)


def test_whatever_stops_a_load_leaves_nothing_of_what_was_loaded_before_it(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights before it acted on every later picture, and no record named them."""
    for name in ("good", "large"):
        (tmp_path / f"{name}.safetensors").write_bytes(weights.read_bytes())
    load = ZImagePipeline.load_lora_weights

    def loaded(pipe: ZImagePipeline, *args: object, **options: object) -> None:
        load(pipe, *args, **options)
        if options["weight_name"] == "large.safetensors":
            raise MemoryError("no room for the second file")

    monkeypatch.setattr(ZImagePipeline, "load_lora_weights", loaded)
    with studio_of(lora_dir=tmp_path) as studio:
        base = _draw(studio, "")
        with pytest.raises(MemoryError):
            _draw(studio, "good:1\nlarge:1")
        assert _pixels(_draw(studio, "")) == _pixels(base)


def test_a_strength_that_fails_is_not_taken_for_set(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with studio_of(lora_dir=weights.parent) as studio:
        base, full = _draw(studio, ""), _draw(studio, f"{weights.name}:1")
        setting = type(studio.pipe).set_adapters

        def half(pipe: ZImagePipeline, *args: object, **kwargs: object) -> None:
            setting(pipe, *args, **kwargs)
            raise RuntimeError("after the first part")

        with monkeypatch.context() as patch:
            patch.setattr(type(studio.pipe), "set_adapters", half)
            with pytest.raises(RuntimeError, match="after the first"):
                _draw(studio, f"{weights.name}:0.5")
        assert _pixels(_draw(studio, f"{weights.name}:1")) == _pixels(full)
        assert _pixels(_draw(studio, "")) == _pixels(base)


def test_names_stand_for_files_of_the_folder_and_of_the_command_line(tmp_path: Path) -> None:
    folder, other = tmp_path / "offered", tmp_path / "other"
    for place in ("a.safetensors", "style/b.safetensors", "c.bin", ".hidden/d.safetensors"):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).touch()
    for place in ("one/w.safetensors", "two/w.safetensors"):
        (other / place).parent.mkdir(parents=True, exist_ok=True)
        (other / place).touch()
    start = (
        Adapter(str(other / "one" / "w.safetensors"), 0.5),
        Adapter(str(other / "two" / "w.safetensors")),
        Adapter("owner/name", 0.7),
    )
    shelf = LoraShelf(start, folder)
    assert set(shelf.places()) == {
        "a.safetensors",
        "style/b.safetensors",
        ".hidden/d.safetensors",
        "one/w.safetensors",
        "two/w.safetensors",
        "owner/name",
    }
    assert [shelf.line(adapter) for adapter in start] == [
        "one/w.safetensors:0.5",
        "two/w.safetensors:1",
        "owner/name:0.7",
    ]
    text = "\n".join(["style/b.safetensors:0.3", " a.safetensors ", "owner/name:-1"])
    assert shelf.adapters(text) == (
        Adapter(str(folder / "style" / "b.safetensors"), 0.3),
        Adapter(str(folder / "a.safetensors")),
        Adapter("owner/name", -1.0),
    )
    # as people type it, without the ending
    assert shelf.adapters("a:0.5\nstyle/b") == (
        Adapter(str(folder / "a.safetensors"), 0.5),
        Adapter(str(folder / "style" / "b.safetensors")),
    )
    inside = str(folder / "a.safetensors")
    for wrong in (
        "c.bin",
        "../other/one/w.safetensors",
        inside,
        "owner/other",
        "a.safetensors:nan",
    ):
        with pytest.raises(InputError):
            shelf.adapters(wrong)
    with pytest.raises(InputError, match="at most 8 lines"):
        shelf.adapters("a.safetensors\n" * 9)


def test_the_page_starts_with_the_weights_of_the_command_line_by_name(weights: Path) -> None:
    pipe = tiny.build("z-image")
    spec = ModelSpec(model="unsaved/ZImagePipeline", lora=(Adapter(str(weights), 0.5),))
    set_up(pipe, spec, torch.device("cpu"))
    loaded = LoadedPipeline(pipe, spec, torch.device("cpu"), {})
    studio = Studio(loaded, GraphConfig(backend="off"))
    try:
        assert start_form(studio).lora == f"{weights.name}:0.5"
        assert studio.loras.adapters(start_form(studio).lora) == spec.lora
    finally:
        studio.close()
