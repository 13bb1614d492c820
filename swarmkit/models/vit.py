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
        self._initialise(generator)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        """Weights keep the size of what passes through; positions are half as large as patches, or come late."""
        for name, parameter in self.named_parameters():
            if name == "positions":
                parameter.normal_(0.0, 0.5, generator=generator)
            elif parameter.dim() > 1:
                parameter.normal_(0.0, parameter[0].numel() ** -0.5, generator=generator)
            elif name.endswith("bias"):
                # torch draws some biases from its global generator, which differs between peers.
                parameter.zero_()

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits [batch, classes]."""
        x = self.patches(inputs).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.head(self.norm(self.encoder(x)).mean(dim=1))
        return logits
