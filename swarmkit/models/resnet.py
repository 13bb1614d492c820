"""ResNet for small images: depth 6n + 2 in three stages (arXiv 1512.03385, section 4.2)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmkit.models.classifier import Classifier
from swarmkit.models.config import ResNetConfig


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut, which is a 1 x 1 convolution where the shape changes."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            conv = nn.Conv2d(inside, outside, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        """Feature maps in, feature maps out."""
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return F.relu(y + self.shortcut(x))


class ResNet(Classifier):
    """Three stages of residual blocks; the second and the third halve the resolution and double the width."""

    def __init__(self, config: ResNetConfig, shape: tuple[int, ...], classes: int, generator: torch.Generator) -> None:
        super().__init__()
        width = config.width
        self.stem = nn.Sequential(nn.Conv2d(shape[0], width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        blocks: list[nn.Module] = []
        inside = width
        for stage in range(3):
            for block in range(config.blocks):
                outside, stride = width << stage, 2 if stage and not block else 1
                blocks.append(ResidualBlock(inside, outside, stride))
                inside = outside
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inside, classes)
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.Conv2d | nn.Linear):
                    fan_in = module.weight[0].numel()
                    module.weight.normal_(0.0, math.sqrt(2 / fan_in), generator=generator)
            self.head.bias.zero_()

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits [batch, classes]."""
        logits: Tensor = self.head(self.blocks(self.stem(inputs)).mean(dim=(2, 3)))
        return logits
