"""Seeded initialisation that gives every layout the same parameters."""

import hashlib
import math

import torch
from coterie_experts import init_experts
from torch import nn

from coterie_trainer.model import Decoder, MoE

__all__ = ["initialize"]


@torch.no_grad()
def initialize(model: Decoder, *, seed: int, std: float) -> None:
    """Fill a materialised decoder: weights from N(0, std), norms with 1, selection biases with 0.

    The projections back into the residual stream (attention output, every ``down``) use ``std / sqrt(2 * layers)``
    (GPT-2, Radford et al., 2019). Each tensor has its own generator, seeded by ``seed`` and its global name (each
    expert by its global number), on the CPU; so neither the layout nor the device changes a bit.

    Args:
        model: a decoder with storage on any device.
        seed: any integer.
        std: standard deviation of the weights.
    """
    residual_std = std / math.sqrt(2 * model.spec.num_layers)
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            init_experts(module.experts, seed=seed, name=f"{name}.experts", std=std, down_std=residual_std)
    for name, parameter in model.named_parameters():
        if ".moe.experts." in name:
            continue
        if parameter.ndim == 1:
            nn.init.ones_(parameter)
            continue
        into_residual = name.endswith(("attention.o.weight", "down.weight"))
        values = torch.empty(parameter.shape, dtype=torch.float32)
        values.normal_(0.0, residual_std if into_residual else std, generator=_generator(seed, name))
        parameter.copy_(values)
    for buffer in model.buffers():
        buffer.zero_()


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
