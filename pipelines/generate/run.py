"""Owns scripted generation: one request on one pipeline, item by item, each reproducible alone.

Must never know a command line. The surprising fact: several images of one prompt are several calls
with seeds that follow each other, not one batched call: kernels differ by batch size, so an image
of a batch could not be made again by itself.
"""

from __future__ import annotations

import importlib.util
import inspect
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

import torch
from diffusers import DiffusionPipeline

from dit_graphs import GraphConfig
from dit_graphs.pipelines.acceleration import acceleration_of

from .arguments import call_arguments, check_names, check_reference
from .calling import call
from .errors import InputError
from .fitting import fitted, size_changes
from .inputs import InputFile, open_images
from .load import LoadedPipeline
from .media import Medium, media_of
from .model import ModelSpec
from .record import make_record
from .request import GenerateRequest, Json, json_key
from .save import check_output, save_media, slug
from .serving import keeping_partners, serving
from .setup import has_ip_adapter
from .stages import StageClock
from .usage import GraphUse, counts

__all__ = ["Item", "as_loaded", "generate", "generate_items"]

MAX_RANDOM_SEED = 2**32
DEFAULT_FPS = 16
DEFAULT_SAMPLE_RATE = 44_100


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One finished call: what it drew, from which seed, and where it was saved (if it was).

    `record` makes it again; `seconds` are per stage; `graph_use` is what the graphs did; `resized`
    says which input pictures were given another size.
    """

    seed: int
    media: list[Medium]
    record: dict[str, Json]
    seconds: dict[str, float]
    num_steps: int
    graph_use: GraphUse
    files: list[Path] = field(default_factory=list)
    sidecar: Path | None = None
    resized: tuple[str, ...] = ()

    @property
    def total_seconds(self) -> float:
        """Seconds of all stages together."""
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """Where items go and what is noted beside them.

    `prefix` starts every file name; `subject` takes the prompt's place in it.
    """

    folder: Path
    prefix: str = ""
    subject: str | None = None
    notes: Mapping[str, Json] = field(default_factory=dict)


def generate(
    pipe: DiffusionPipeline | LoadedPipeline,
    request: str | GenerateRequest,
    *,
    output: Path | str | None = None,
    graphs: GraphConfig | None = None,
    **fields: object,
) -> list[Item]:
    """Every item of one request, saved in the folder `output` where one is given.

    `request` is a prompt or a whole `GenerateRequest`; `fields` are its other fields
    (`height=512, seed=7, num_images=4`). Without a seed a random one is drawn; it is in
    `Item.seed`. `graphs` is noted in the record; left out, it is what `pipe` was accelerated with.
    A picture that the pipeline cannot take is drawn from by its image-to-image or inpaint partner,
    on the same components. Raises `InputError` before anything is drawn.
    """
    if isinstance(request, str):
        request = GenerateRequest.from_mapping({"prompt": request, **fields})
    elif fields:
        request = GenerateRequest.from_mapping({**request.to_mapping(), **fields})
    naming = None if output is None else Naming(folder=Path(output))
    loaded = as_loaded(pipe)
    with keeping_partners(loaded, beyond=loaded is pipe):
        return list(generate_items(loaded, request, naming=naming, graphs=graphs))


def _graphs_of(pipe: DiffusionPipeline) -> GraphConfig | None:
    acceleration = acceleration_of(pipe)
    return None if acceleration is None else acceleration.config


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, torch's own generators start from `seed`; afterwards they are the caller's again.

    Text that a pipeline's language model samples comes from them.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


def generate_items(
    loaded: LoadedPipeline,
    request: GenerateRequest,
    *,
    naming: Naming | None = None,
    graphs: GraphConfig | None = None,
    name: str | None = None,
    skip: frozenset[int] = frozenset(),
) -> Iterator[Item]:
    """The items of `request` one after the other, each saved before the next begins.

    `name` stands for the model in records; items whose index is in `skip` are not made.
    """
    loaded = serving(loaded, request)
    check_names(type(loaded.pipe), request)  # a default of the model is not a subject
    check_reference(type(loaded.pipe), request, has_adapter=has_ip_adapter(loaded.pipe))
    request = complete(loaded, request)
    graphs = graphs or _graphs_of(loaded.pipe)
    opened = open_images(request)
    request, inputs = fitted(loaded.pipe, request, opened)
    resized = size_changes(opened, inputs)
    call_arguments(loaded.pipe, request, inputs)
    _check_length(loaded.pipe, request)
    _check_can_save(loaded.pipe, request)
    if naming is not None:
        check_output(naming.folder)
    for index in range(request.num_images):
        if index in skip:
            continue
        item = _run(loaded, request.single(index), inputs, graphs, name)
        item = replace(item, resized=resized)
        if naming is not None:
            notes: dict[str, Json] = {"index": index, "of": request.num_images}
            item = _save(loaded, item, naming, {"item": notes, **naming.notes})
        yield item


def complete(loaded: LoadedPipeline, request: GenerateRequest) -> GenerateRequest:
    """`request` with the model's own defaults filled in and a seed chosen."""
    named = {n: v for n, v in loaded.defaults.items() if n in GenerateRequest.__slots__}
    others = {n: v for n, v in loaded.defaults.items() if n not in named}
    request = replace(request.with_defaults(named), set={**others, **request.set})
    if request.seed is None:
        request = replace(request, seed=secrets.randbelow(MAX_RANDOM_SEED))
    return request


def as_loaded(pipe: DiffusionPipeline | LoadedPipeline) -> LoadedPipeline:
    """A pipeline the caller built, described as well as it can be."""
    if isinstance(pipe, LoadedPipeline):
        return pipe
    place = str(pipe.config.get("_name_or_path") or "")
    try:
        spec = ModelSpec(model=place)
    except InputError:
        spec = ModelSpec(model=f"unsaved/{type(pipe).__name__}")
    return LoadedPipeline(pipe, spec, torch.device(pipe._execution_device))


def _run(
    loaded: LoadedPipeline,
    request: GenerateRequest,
    inputs: list[InputFile],
    graphs: GraphConfig | None,
    name: str | None,
) -> Item:
    pipe, clock = loaded.pipe, StageClock(loaded.device)
    assert request.seed is not None
    arguments = call_arguments(pipe, request, inputs)
    if "generator" in inspect.signature(type(pipe).__call__).parameters:
        # On the CPU: the same seed then starts from the same noise on every device.
        arguments["generator"] = torch.Generator("cpu").manual_seed(request.seed)
    before = counts(pipe)
    with _seeded(request.seed, loaded.device):
        output = call(pipe, arguments, clock)
    after = counts(pipe)
    media = media_of(output)
    record = make_record(
        loaded,
        request,
        inputs=inputs,
        graphs=graphs,
        pixels_sha256=[medium.sha256 for medium in media],
        name=name,
    )
    use = GraphUse.between(before, after)
    return Item(request.seed, media, record, dict(clock.seconds), clock.num_steps, use)


def _save(loaded: LoadedPipeline, item: Item, naming: Naming, notes: Mapping[str, Json]) -> Item:
    clock = StageClock(loaded.device)
    request = GenerateRequest.from_mapping(_mapping(item.record["request"]))
    with clock.measure("save"):
        files, sidecar = save_media(
            item.media,
            naming.folder,
            f"{naming.prefix}{slug(naming.subject or request.prompt)}-{item.seed}",
            fps=_fps(request),
            sample_rate=_sample_rate(loaded.pipe),
            text=json_key(item.record),
            sidecar={
                "record": item.record,
                "seconds": {stage: round(s, 6) for stage, s in item.seconds.items()},
                "graph_use": item.graph_use.to_mapping(),
                "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                **notes,
            },
        )
    return replace(item, files=files, sidecar=sidecar, seconds={**item.seconds, **clock.seconds})


def _mapping(value: Json) -> dict[str, Json]:
    assert isinstance(value, dict)
    return value


def _fps(request: GenerateRequest) -> int:
    given = request.fps or request.set.get("frame_rate") or request.set.get("fps")
    return max(1, round(given)) if isinstance(given, (int, float)) else DEFAULT_FPS


def _sample_rate(pipe: DiffusionPipeline) -> int:
    for component, key in (
        ("vocoder", "output_sampling_rate"),
        ("vocoder", "sampling_rate"),
        ("vae", "sampling_rate"),
    ):
        rate = getattr(getattr(getattr(pipe, component, None), "config", None), key, None)
        if isinstance(rate, int):
            return rate
    return DEFAULT_SAMPLE_RATE


def _check_length(pipe: DiffusionPipeline, request: GenerateRequest) -> None:
    """A prompt is padded to this length, so one that no encoder can read would only fill memory."""
    asked = request.set.get("max_sequence_length")
    parts = [part for name, part in pipe.components.items() if name.startswith("text_encoder")]
    configs = [getattr(part, "config", None) for part in parts if part is not None]
    texts = [getattr(config, "text_config", None) or config for config in configs]
    longest = [getattr(text, "max_position_embeddings", None) for text in texts]
    bounds = [number for number in longest if isinstance(number, int)]
    if not bounds or len(bounds) < len(longest) or not isinstance(asked, int):
        return
    if not 1 <= asked <= max(bounds):
        raise InputError(
            "set", f"max_sequence_length: expected a number from 1 to {max(bounds)}, got {asked}"
        )


def _check_can_save(pipe: DiffusionPipeline, request: GenerateRequest) -> None:
    """A missing video encoder is found before minutes are spent on frames."""
    parameters = inspect.signature(type(pipe).__call__).parameters
    is_video = "num_frames" in parameters or "video_length" in parameters
    if is_video and request.num_frames != 1 and not importlib.util.find_spec("imageio_ffmpeg"):
        raise InputError("output", "a video needs a package: pip install imageio imageio-ffmpeg")
