"""Owns the question whether a pipeline takes a size, or needs a picture, asked before its weights
are read.

Must never read or download a weight. The surprising fact: there is no list of allowed sizes
anywhere. A pipeline says what it takes by refusing, so it is called here without weights, and heard
only where it refuses a size or misses a picture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import diffusers
import torch
from diffusers import DiffusionPipeline
from diffusers.configuration_utils import FrozenDict

from .arguments import accepted_names, call_arguments
from .calling import refusal
from .fitting import fitted
from .hub import hub_arguments
from .inputs import open_images
from .model import ModelSpec
from .request import IMAGE_OPTIONS, GenerateRequest

__all__ = ["check_sizes"]

_SIZES = ("height", "width", "num_frames")
_HEARD = {*_SIZES, *IMAGE_OPTIONS}


@dataclass(frozen=True, slots=True)
class _Shape:
    """All that is asked of a denoiser before it runs."""

    config: FrozenDict


class _Begun(Exception):
    """The pipeline took its arguments and would denoise now."""


def check_sizes(
    spec: ModelSpec,
    pipeline_class: type[DiffusionPipeline],
    requests: Sequence[GenerateRequest],
) -> None:
    """Raise `InputError` for the first size `pipeline_class` refuses, or picture it misses.

    Where the model cannot be imitated nothing is said: the loaded pipeline will refuse, only later.
    """
    sized = [r for r in requests if _is_in_question(pipeline_class, r)]
    if not sized or spec.single_file is not None:
        return
    with _silence():
        pipe = _imitation(spec, pipeline_class)
    if pipe is None:
        return
    for request in sized:
        request, inputs = fitted(pipe, request, open_images(request))
        arguments = call_arguments(pipe, request, inputs)
        try:
            with _silence():
                pipe(**arguments)
        except (TypeError, ValueError) as error:
            refused = refusal(error, pipeline_class, arguments)
            if set(refused.option.split(", ")) <= _HEARD:
                raise refused from error
        except Exception:  # there is nothing behind the arguments: it had to fail somewhere
            continue


def _is_in_question(pipeline_class: type[DiffusionPipeline], request: GenerateRequest) -> bool:
    """A size was asked for, or a picture the pipeline takes was left out."""
    if any(getattr(request, name) is not None for name in _SIZES):
        return True
    lacks = not any(getattr(request, name) for name in IMAGE_OPTIONS)
    return lacks and "image" in accepted_names(pipeline_class)


def _imitation(
    spec: ModelSpec, pipeline_class: type[DiffusionPipeline]
) -> DiffusionPipeline | None:
    """`pipeline_class` with a VAE that has no memory, the denoiser's shape, and nothing else."""
    keys, settings = pipeline_class._get_signature_keys(pipeline_class)
    where = hub_arguments("model", spec.model)
    index = DiffusionPipeline.load_config(spec.model, revision=spec.revision, **where)
    parts: dict[str, object] = dict.fromkeys(keys)
    parts |= {name: index[name] for name in settings if name in index}
    try:
        for name in keys & index.keys():
            owner = getattr(diffusers, str(index[name][1]), None)
            if index[name][0] != "diffusers" or owner is None:
                continue
            config = owner.load_config(spec.model, subfolder=name, revision=spec.revision, **where)
            if name in ("vae", "controlnet"):  # looked at by more than their configuration
                with torch.device("meta"):
                    parts[name] = owner.from_config(config)
            elif name == "scheduler":
                parts[name] = owner.from_config(config)
            else:
                parts[name] = _Shape(FrozenDict(config))
        pipe = pipeline_class(**parts)
    except Exception:  # a pipeline that wants more than shapes to be built
        return None
    pipe.progress_bar = _begin
    return pipe


def _begin(*_: object, **__: object) -> None:
    raise _Begun


@contextmanager
def _silence() -> Iterator[None]:
    """What is missing was left out on purpose: no warning about it."""
    logging = diffusers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)
