"""Owns the one call of a pipeline, and which of its errors are the user's.

Must never hide an error of the loop: what goes wrong after the first step is passed on as it is.
The surprising fact: a pipeline may be left without a step and go on, with noise or an error of its
arithmetic; only its progress bar shows it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping

import diffusers
from diffusers import DiffusionPipeline

from .errors import InputError
from .partners import calls_control_image
from .request import IMAGE_OPTIONS
from .stages import StageClock

__all__ = ["call", "refusal"]


def call(pipe: DiffusionPipeline, arguments: dict[str, object], clock: StageClock) -> object:
    """What the pipeline returns; a value it refuses before the first step is an `InputError`."""
    try:
        with clock.watch(pipe):
            output: object = pipe(**arguments)
    except InputError:
        raise
    except RuntimeError as error:
        if not clock.has_no_step:
            raise
        raise _no_step(pipe, arguments) from error
    except NameError as error:
        # Some pipelines use a package without having looked whether it is there.
        missing = error.name
        if not missing or not hasattr(diffusers.utils, f"is_{missing}_available"):
            raise
        raise InputError(
            "model", f"{type(pipe).__name__} needs a package: pip install {missing}"
        ) from error
    except (TypeError, ValueError) as error:
        if clock.num_steps:
            raise
        raise refusal(error, type(pipe), arguments) from error
    if clock.has_no_step:
        raise _no_step(pipe, arguments)
    return output


def refusal(
    error: Exception, pipeline_class: type[DiffusionPipeline], arguments: Mapping[str, object]
) -> InputError:
    """What a pipeline said of its arguments, with the options it speaks of."""
    problem = " ".join(str(error).split())
    names = _named_in(problem, pipeline_class, arguments)
    return InputError(
        ", ".join(names) or "request", f"{pipeline_class.__name__} refuses it: {problem}"
    )


def _named_in(
    problem: str, pipeline_class: type[DiffusionPipeline], arguments: Mapping[str, object]
) -> list[str]:
    """The arguments a refusal speaks of; where it is none of them, the pictures it misses."""
    words = dict.fromkeys(re.findall(r"\w+", problem.lower()))
    if given := [word for word in words if word in arguments]:
        return given
    takes = inspect.signature(pipeline_class.__call__).parameters
    missing = [word for word in words if word in IMAGE_OPTIONS and word in takes]
    return [_field(pipeline_class, name) for name in missing]


def _field(pipeline_class: type[DiffusionPipeline], name: str) -> str:
    is_control = name == "image" == calls_control_image(pipeline_class)
    return "control_image" if is_control else name


def _no_step(pipe: DiffusionPipeline, arguments: Mapping[str, object]) -> InputError:
    """Some pipelines refuse it themselves; others return noise or fail on an empty tensor."""
    takes = inspect.signature(type(pipe).__call__).parameters
    names = [name for name in ("num_inference_steps", "strength") if name in takes]
    values = [f"{name} {arguments.get(name, takes[name].default)}" for name in names]
    problem = f"expected at least one denoising step, got none from {' and '.join(values)}"
    return InputError(", ".join(names) or "request", problem)
