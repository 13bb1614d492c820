"""From a configuration to the corpus that it names."""

from swarmkit.data.config import (
    DataConfig,
    DigitsConfig,
    FashionMNISTConfig,
    HFDataConfig,
    StdlibConfig,
    SyntheticConfig,
    TextConfig,
)
from swarmkit.data.corpus import Corpus


def load_corpus(config: DataConfig, *, context: int) -> Corpus:
    """Load the source that a configuration names; raises DataError saying what is missing or broken.

    `context` is the number of tokens in an input; sources of images do not look at it.
    """
    match config:
        case StdlibConfig():
            from swarmkit.data.stdlib import load_stdlib

            return load_stdlib(config, context=context)
        case TextConfig():
            from swarmkit.data.text import load_text

            return load_text(config, context=context)
        case DigitsConfig():
            from swarmkit.data.digits import load_digits

            return load_digits(config)
        case FashionMNISTConfig():
            from swarmkit.data.fashion_mnist import load_fashion_mnist

            return load_fashion_mnist(config)
        case HFDataConfig():
            from swarmkit.data.hf import load_hf

            return load_hf(config, context=context)
        case SyntheticConfig():
            from swarmkit.data.synthetic import load_synthetic

            return load_synthetic(config, context=context)
    raise ValueError(f"data.name={config.name!r}: no such source")
