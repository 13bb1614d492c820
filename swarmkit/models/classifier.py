"""What the image models share: logits in, mean cross entropy out."""

import torch.nn.functional as F
from torch import Tensor, nn


class Classifier(nn.Module):
    """A model from images [batch, channels, height, width] to logits [batch, classes]."""

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy per image, in nats."""
        return F.cross_entropy(self(inputs), targets)
