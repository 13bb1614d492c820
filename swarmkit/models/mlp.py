"""MLP: a multilayer perceptron over flattened images."""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from swarmkit.models.classifier import Classifier
from swarmkit.models.config import MLPConfig


class MLP(Classifier):
    """Linear layers with ReLU and dropout between them."""

    def __init__(self, config: MLPConfig, shape: tuple[int, ...], classes: int, generator: torch.Generator) -> None:
        super().__init__()
        widths = [math.prod(shape), *config.hidden, classes]
        layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
        self.layers = nn.ModuleList(layers)
        self.dropout = nn.Dropout(config.dropout)
        with torch.no_grad():
            for layer in layers:
                layer.weight.normal_(0.0, math.sqrt(2 / layer.weight.shape[1]), generator=generator)
                layer.bias.zero_()

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits [batch, classes]."""
        x = inputs.flatten(1)
        for layer in self.layers[:-1]:
            x = self.dropout(layer(x).relu())
        logits: Tensor = self.layers[-1](x)
        return logits
