"""Owns the record that makes one file again, and the comparison with what made it.

Must never hold a time, a counter or a file name: a PNG carries its record, and the same request
must give the same bytes. Those go into the JSON sidecar, beside the record. The surprising fact:
the number of CPU threads is part of the environment, because it changes the order of sums.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import cast

import torch
from PIL import Image

from dit_graphs import GraphConfig

from .errors import InputError
from .inputs import UNREADABLE, InputFile, file_sha256
from .load import LoadedPipeline, Stamp
from .request import GenerateRequest, Json

__all__ = ["BUNDLED", "FORMAT", "changes", "make_record", "read_record", "read_source"]

FORMAT = 1
BUNDLED = "bundled"
_LIBRARIES = (
    "dit-graphs",
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "peft",
    "numpy",
    "pillow",
    "imageio",
    "imageio-ffmpeg",
)
_SAMPLE_BYTES = 1 << 20


def make_record(
    loaded: LoadedPipeline,
    request: GenerateRequest,
    *,
    inputs: list[InputFile],
    graphs: GraphConfig | None,
    pixels_sha256: list[str],
    name: str | None = None,
) -> dict[str, Json]:
    """Everything that decides the pixels of one item, plain JSON, the same whenever it is the same.

    `request` is the item's own (one image, its seed); `name` replaces the model's path, for a model
    that every installation has.
    """
    spec = loaded.spec.to_mapping()
    if name is not None:
        spec["model"] = name
    # Input paths are absolute, so that a record works from another folder.
    asked = request.to_mapping()
    for option in {item.option for item in inputs}:
        paths: list[Json] = [item.path for item in inputs if item.option == option]
        asked[option] = paths if option == "image" else paths[0]
    return {
        "format": FORMAT,
        "pipeline": type(loaded.pipe).__name__,
        "model": spec,
        "weights": cast(dict[str, Json], dict(_weights(loaded))),
        "request": asked,
        "inputs": [{"option": i.option, "path": i.path, "sha256": i.sha256} for i in inputs],
        "graphs": None if graphs is None else graphs_to_mapping(graphs),
        "environment": environment(loaded),
        "pixels_sha256": cast(list[Json], pixels_sha256),
    }


def graphs_to_mapping(graphs: GraphConfig) -> dict[str, Json]:
    """The fields of a `GraphConfig` that are not at their default, as plain JSON."""
    default = asdict(GraphConfig())
    given = {name: value for name, value in asdict(graphs).items() if value != default[name]}
    return cast(dict[str, Json], json.loads(json.dumps(given, default=str)))


def environment(loaded: LoadedPipeline) -> dict[str, Json]:
    """What may change bits without a word in the request: device, dtype, threads, libraries."""
    device = loaded.device
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    else:
        device_name = torch.backends.cpu.get_cpu_capability()
    denoiser = getattr(loaded.pipe, "transformer", None) or getattr(loaded.pipe, "unet", None)
    dtype = getattr(denoiser, "dtype", None)
    return {
        "device": device.type,
        "device_name": device_name,
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "python": platform.python_version(),
        "versions": dict(_versions()),
    }


def read_record(path: Path) -> dict[str, Json]:
    """The record of a PNG or of a JSON sidecar; `InputError` names what is wrong with the file."""
    return read_source(path)[0]


def read_source(path: Path) -> tuple[dict[str, Json], set[str]]:
    """The record in a PNG or a JSON sidecar, and the hashes of the files it stands for."""
    if not path.is_file():
        raise InputError("from", f"no such file: {str(path)!r}")
    is_picture = path.suffix.lower() == ".png"
    try:
        if is_picture:
            with Image.open(path) as image:
                text = image.info.get("dit-graphs")
        else:
            text = path.read_text(encoding="utf-8")
        found = json.loads(text) if text else None
    except (*UNREADABLE, RecursionError) as error:
        raise InputError("from", f"{str(path)!r} cannot be read: {error}") from error
    record, files = found, None
    if isinstance(found, dict) and "record" in found:
        record, files = found["record"], found.get("files")
    if not isinstance(record, dict) or not isinstance(record.get("request"), dict):
        raise InputError("from", f"{str(path)!r} holds no record of dit-graphs")
    if record.get("format") != FORMAT:
        raise InputError("from", f"expected record format {FORMAT}, got {record.get('format')!r}")
    if is_picture:
        return _checked(path, record), {file_sha256(path)}
    _check_entries(path, "files", files or [], ("sha256",))
    return _checked(path, record), {str(entry["sha256"]) for entry in files or []}


def _checked(path: Path, record: dict[str, Json]) -> dict[str, Json]:
    """`record`, where what is read of it later has the shape it was written in."""
    if not isinstance(record.get("model"), dict):
        raise InputError("from", f"{str(path)!r} is damaged: its record names no model")
    if not isinstance(record.setdefault("graphs", None), (dict, type(None))):
        raise InputError("from", f"{str(path)!r} is damaged: wrong graphs in its record")
    record.setdefault("pixels_sha256", None)
    _check_entries(path, "inputs", record.setdefault("inputs", []), ("option", "path", "sha256"))
    return record


def _check_entries(path: Path, name: str, entries: Json, keys: tuple[str, ...]) -> None:
    def is_whole(entry: Json) -> bool:
        return isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in keys)

    if not isinstance(entries, list) or not all(is_whole(entry) for entry in entries):
        raise InputError("from", f"{str(path)!r} is damaged: wrong {name} in it")


def changes(old: Mapping[str, Json], new: Mapping[str, Json]) -> list[str]:
    """One line per difference between two records that can change a file's bytes."""
    return [
        f"{name}: {_show(before)} → {_show(after)}"
        for name, before, after in _differences("", dict(old), dict(new))
        if name != "format" and not name.startswith("graphs")
    ]


def _differences(prefix: str, old: Json, new: Json) -> Iterator[tuple[str, Json, Json]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(k for k in new if k not in old)]:
            name = f"{prefix}.{key}" if prefix else key
            yield from _differences(name, old.get(key), new.get(key))
    elif old != new:
        yield prefix, old, new


def _show(value: Json) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)


def _versions() -> Iterator[tuple[str, Json]]:
    for name in _LIBRARIES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _weights(loaded: LoadedPipeline) -> Iterator[tuple[str, str]]:
    """Fingerprints of what lies on this disk; the commit of what came from the hub."""
    spec = loaded.spec
    places = {"model": spec.model, "base": spec.base}
    places |= {f"lora {index}": adapter.path for index, adapter in enumerate(spec.lora)}
    if spec.ip_adapter is not None:
        places["ip_adapter"] = spec.ip_adapter.path
    for name, place in places.items():
        if place is None:
            continue
        if Path(place).exists():
            yield name, _fingerprint(Path(place), loaded.fingerprints)
        elif (commit := _hub_commit(place, spec.revision)) is not None:
            yield name, commit


def _fingerprint(path: Path, known: dict[str, tuple[Stamp, str]]) -> str:
    """Of the bytes, which are read once: a checkpoint of 20 GB is not hashed for every picture."""
    is_folder = path.is_dir()
    files = sorted(p for p in path.rglob("*") if p.is_file()) if is_folder else [path]
    stamp = tuple((str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in files)
    if str(path) not in known or known[str(path)][0] != stamp:
        known[str(path)] = (stamp, _folder_sha256(path, files) if is_folder else file_sha256(path))
    return known[str(path)][1]


def _folder_sha256(folder: Path, files: list[Path]) -> str:
    """Names, sizes and the first and last MiB of every file: all of a small model, and quick for
    a large one."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder).as_posix()} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            if size > _SAMPLE_BYTES:
                file.seek(max(_SAMPLE_BYTES, size - _SAMPLE_BYTES))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _hub_commit(place: str, revision: str | None) -> str | None:
    from huggingface_hub import try_to_load_from_cache

    owner_and_name = "/".join(place.split("/")[:2])
    found = try_to_load_from_cache(owner_and_name, "model_index.json", revision=revision)
    return Path(found).parent.name if isinstance(found, str) else None
