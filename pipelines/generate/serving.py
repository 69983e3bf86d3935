"""Owns the pipeline object that serves a request: the loaded one, or a partner on its components.

Must never load weights. The surprising fact: a partner costs no memory and no warm-up: its denoiser
is the loaded one, and so are the graphs of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from diffusers import DiffusionPipeline

from dit_graphs.pipelines.acceleration import accelerate, acceleration_of, restore

from .errors import InputError
from .load import LoadedPipeline, call_defaults
from .partners import serving_class
from .request import GenerateRequest

__all__ = ["keeping_partners", "partner_of", "serving"]


def serving(loaded: LoadedPipeline, request: GenerateRequest) -> LoadedPipeline:
    """The pipeline for `request`: `loaded`, or its image-to-image or inpaint partner.

    The partner is kept in `loaded.partners`. A pipeline class that was named is never replaced.
    """
    if loaded.spec.pipeline is not None:
        return loaded
    wanted = serving_class(type(loaded.pipe), request)
    if wanted is type(loaded.pipe):
        return loaded
    if wanted not in loaded.partners:
        loaded.partners[wanted] = partner_of(loaded, wanted)
    return loaded.partners[wanted]


@contextmanager
def keeping_partners(loaded: LoadedPipeline, *, beyond: bool) -> Iterator[None]:
    """Partners made inside the block are let go at its end, unless they serve `beyond` it."""
    try:
        yield
    finally:
        while loaded.partners and not beyond:
            restore(loaded.partners.popitem()[1].pipe)


def partner_of(loaded: LoadedPipeline, pipeline_class: type[DiffusionPipeline]) -> LoadedPipeline:
    """Another class on the loaded components, accelerated as `loaded` is.

    Raises `InputError` where the class needs a component that is not there.
    """
    main = loaded.pipe
    components, settings = pipeline_class._get_signature_keys(pipeline_class)
    given = {name: part for name, part in main.components.items() if name in components}
    given |= {name: value for name, value in main.config.items() if name in settings}
    try:
        pipe = pipeline_class(**given)
    except (TypeError, ValueError) as error:
        raise InputError(
            "image", f"{pipeline_class.__name__} needs more than {type(main).__name__} has: {error}"
        ) from error
    pipe.set_progress_bar_config(**getattr(main, "_progress_bar_config", {}))
    acceleration = acceleration_of(main)
    if acceleration is not None:
        accelerate(pipe, acceleration.config)
    spec = replace(loaded.spec, pipeline=pipeline_class.__name__)
    return LoadedPipeline(
        pipe,
        spec,
        loaded.device,
        call_defaults(spec, pipeline_class),
        fingerprints=loaded.fingerprints,
    )
