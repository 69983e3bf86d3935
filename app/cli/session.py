"""Owns the way from a model's name to an accelerated pipeline, and what is said about it.

Must never decide what is drawn. The surprising fact: on a CPU only the bundled model is recorded
and replayed by default: it is there to be looked at, and a recorder makes nothing faster.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import dit_graphs
from dit_graphs import GraphConfig
from dit_graphs.pipelines.generate import (
    BUNDLED,
    GenerateRequest,
    Json,
    LoadedPipeline,
    ModelSpec,
    check_names,
    check_reference,
    check_sizes,
    complete,
    load_pipeline,
    open_images,
    resolve_class,
    serving_class,
)

from .flags import Given, graph_error

__all__ = ["Session", "open_session"]


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """An accelerated pipeline; `graphs` is what was asked for, `name` the model's name in records
    where its path says nothing elsewhere."""

    loaded: LoadedPipeline
    graphs: GraphConfig
    name: str | None


def open_session(
    given: Given,
    requests: Sequence[GenerateRequest],
    *,
    since: float,
    model: Mapping[str, Json] | None = None,
    graphs: Mapping[str, Json] | None = None,
    checks: bool = True,
    say: Callable[[str], None] = print,
) -> Session:
    """The pipeline the flags name, loaded and accelerated; arguments are checked before weights
    are read, unless `checks` is False. `model` and `graphs` come from a record and are overridden
    by flags; `since` is the `perf_counter` at which the user's wait began, before any library was
    imported."""
    config = given.graphs(graphs)
    values: dict[str, Json] = dict(model or {})
    is_bundled = "model" not in given and values.get("model", BUNDLED) == BUNDLED
    if is_bundled:
        from dit_graphs.app import demo_model

        values["model"] = str(demo_model.path())
    spec, note = _for_requests(given.model(values), requests)
    pipeline_class = resolve_class(spec)
    for request in requests if checks else ():
        check_names(pipeline_class, request)
        check_reference(pipeline_class, request, has_adapter=spec.ip_adapter is not None)
        open_images(request)
    if note is not None:
        say(note)
    _be_quiet()
    if checks:
        check_sizes(spec, pipeline_class, requests)
    libraries = time.perf_counter() - since
    loaded = load_pipeline(spec)
    accelerate(loaded, config, is_bundled=is_bundled)
    seconds = time.perf_counter() - since
    name = type(loaded.pipe).__name__
    say(f"load     {seconds:8.2f} s  {name} on {loaded.device} (libraries {libraries:.2f} s)")
    return Session(loaded, config, BUNDLED if is_bundled else None)


def _for_requests(
    spec: ModelSpec, requests: Iterable[GenerateRequest]
) -> tuple[ModelSpec, str | None]:
    """`spec` with the pipeline class that every request needs where the model's own is not it, and
    a sentence that says so."""
    if spec.pipeline is not None:
        return spec, None
    own = resolve_class(spec)
    needed = {serving_class(own, request) for request in requests}
    if len(needed) != 1 or needed == {own}:
        return spec, None
    name = needed.pop().__name__
    note = f"picture  {name} on the same weights: {own.__name__} does not start from a picture"
    return replace(spec, pipeline=name), note


def accelerate(loaded: LoadedPipeline, config: GraphConfig, *, is_bundled: bool) -> None:
    """`loaded.pipe` now runs from graphs as `config` says. A wrong value raises `InputError`."""
    if is_bundled and loaded.device.type == "cpu" and config.backend == "auto":
        config = replace(config, backend="recorded")
    try:
        dit_graphs.accelerate(loaded.pipe, config)
    except dit_graphs.ConfigError as error:
        raise graph_error(error) from error


def completed(session: Session, request: GenerateRequest) -> GenerateRequest:
    """`request` as it will be called: the model's defaults and a seed filled in."""
    return complete(session.loaded, request)


def _be_quiet() -> None:
    """One progress bar is enough: the steps', and only where somebody watches."""
    import diffusers
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    # said of models that keep nothing in float32, too: an empty list is no news
    logger = logging.getLogger("diffusers.models.modeling_utils")
    logger.addFilter(lambda record: "kept in float32: []" not in record.getMessage())
