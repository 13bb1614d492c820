"""ViT: a transformer over image patches (arXiv 2010.11929) with mean pooling instead of a class token."""

import torch
from torch import Tensor, nn

from swarmkit.errors import ConfigError
from swarmkit.models.classifier import Classifier
from swarmkit.models.config import ViTConfig


class ViT(Classifier):
    """Patches, learnt positions, pre-norm encoder layers, a linear head on their mean."""

    def __init__(self, config: ViTConfig, shape: tuple[int, ...], classes: int, generator: torch.Generator) -> None:
        super().__init__()
        channels, height, width = shape
        if height % config.patch or width % config.patch:
            raise ConfigError(f"model.patch={config.patch}: must divide the images' {height} x {width} pixels")
        self.patches = nn.Conv2d(channels, config.dim, config.patch, config.patch)
        count = (height // config.patch) * (width // config.patch)
        self.positions = nn.Parameter(torch.empty(1, count, config.dim))
        layer = nn.TransformerEncoderLayer(
            config.dim, config.heads, 4 * config.dim, config.dropout, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, classes)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    nn.init.trunc_normal_(parameter, std=0.02, generator=generator)
            for name, parameter in self.named_parameters():
                # torch draws some biases from its global generator, which differs between peers.
                if name.endswith("bias"):
                    parameter.zero_()

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits [batch, classes]."""
        x = self.patches(inputs).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.head(self.norm(self.encoder(x)).mean(dim=1))
        return logits
