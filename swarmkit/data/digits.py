"""scikit-learn's handwritten digits: 1,797 images of 8 x 8 pixels in ten classes."""

import torch

from swarmkit.data.config import DigitsConfig
from swarmkit.data.corpus import ImageCorpus, held_out_split
from swarmkit.errors import DataError


def load_digits(config: DigitsConfig) -> ImageCorpus:
    """Scale pixels to [-1, 1]; images are [1, 8, 8]."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise DataError("data=digits needs scikit-learn: pip install 'swarmkit-torch[digits]'") from error
    digits = load()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 8 - 1
    labels = torch.from_numpy(digits.target).long()
    return ImageCorpus(*held_out_split(images, labels, config.validation), classes=10, source="digits")
