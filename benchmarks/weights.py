"""Random weights that make a forward mean something, for models nobody can download here.

Owns the filling of parameters. Knows nothing of any model. The surprising fact: the weights a class
initialises itself are not usable in an equality test — many gates start at zero (the block
contributes nothing, so a broken block goes unseen) and some parameters are `torch.empty`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def randomise(module: nn.Module, *, seed: int = 0) -> None:
    """Every parameter holds seeded normal values, in place; no gate is zero, nothing is left unset.

    Matrices and convolutions get a standard deviation of 1/sqrt(fan in), so that activations keep
    their size at any depth and width; one-dimensional weights (norms) lie around one, biases around
    zero. Buffers are left alone. The values depend on the seed, the device kind and the parameter
    order only.
    """
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            device = parameter.device
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(seed)
            _fill(name, parameter, generators[device])


def _fill(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if not parameter.is_floating_point():
        raise TypeError(f"parameter {name} is {parameter.dtype}: only floating point can be filled")
    if parameter.dim() >= 2:
        fan_in = math.prod(parameter.shape[1:])
        parameter.normal_(0.0, fan_in**-0.5, generator=generator)
    else:
        parameter.normal_(0.0, 0.1, generator=generator)
        if name.endswith("weight"):
            parameter.add_(1.0)
