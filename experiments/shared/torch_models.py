"""A fully connected PyTorch network with the initial weights that a seed decides (data.py)."""

from __future__ import annotations

import math

import torch
from torch import nn

from experiments.shared.data import uniform_weights

_ACTIVATIONS = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh}


def make_model(widths: list[int], activation: str, seed: int, glorot: bool = False) -> nn.Sequential:
    """The weights are He's, or Glorot's, uniform ones."""
    layers: list[nn.Module] = []
    for layer, (he_limit, numbers) in enumerate(uniform_weights(widths, seed)):
        linear = nn.Linear(widths[layer], widths[layer + 1])
        limit = math.sqrt(6 / (widths[layer] + widths[layer + 1])) if glorot else he_limit
        with torch.no_grad():
            weights = torch.tensor(numbers, dtype=torch.float32) * torch.tensor(limit, dtype=torch.float32)
            linear.weight.copy_(weights.reshape(linear.weight.shape))
            linear.bias.zero_()
        layers += [linear, _ACTIVATIONS[activation]()]
    return nn.Sequential(*layers[:-1])
