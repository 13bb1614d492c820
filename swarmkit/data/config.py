"""Settings of every data source, one dataclass each; importing this needs no torch."""

from dataclasses import dataclass, field
from enum import Enum

from swarmkit.checks import at_least, in_range, positive


class Split(Enum):
    """How the training samples are shared out between peers."""

    iid = "iid"  # every peer draws from everything
    domain = "domain"  # each peer has domains (files, folders, packages, classes) of its own
    dirichlet = "dirichlet"  # each peer has its own mixture of domains, drawn with concentration alpha


class SyntheticKind(Enum):
    """What synthetic data looks like."""

    tokens = "tokens"
    images = "images"


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """What all sources have in common."""

    name: str = "stdlib"  # which source; set by the choice of the group
    split: Split = Split.iid
    alpha: float = 0.5  # concentration of split=dirichlet: small is unequal, large is iid
    validation: float = 0.05  # share that is held out
    max_bytes: int = 0  # of text: use only so much of it, for quick runs; 0 uses all

    def __post_init__(self) -> None:
        positive("data", self, "alpha")
        in_range("data", self, 0.0, 0.9, "validation")
        if not self.validation > 0:
            raise ValueError(f"data.validation={self.validation}: must be positive, or nothing can be evaluated")
        at_least("data", self, 0, "max_bytes")


@dataclass(kw_only=True, slots=True)
class StdlibConfig(DataConfig):
    """The sources of this Python's own standard library: text that every machine has."""

    name: str = "stdlib"


@dataclass(kw_only=True, slots=True)
class TextConfig(DataConfig):
    """Text files, as bytes; plain, .gz or .xz; each file or folder that is named or matched is a domain."""

    name: str = "text"
    paths: list[str] = field(default_factory=list)  # files, folders or globs

    def __post_init__(self) -> None:
        DataConfig.__post_init__(self)
        if not self.paths:
            raise ValueError("data.paths=[]: name at least one file, folder or glob, as data.paths=[a.txt,'b/*.xz']")


@dataclass(kw_only=True, slots=True)
class DigitsConfig(DataConfig):
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels."""

    name: str = "digits"
    validation: float = 0.2


@dataclass(kw_only=True, slots=True)
class FashionMNISTConfig(DataConfig):
    """Fashion-MNIST's IDX files from a folder."""

    name: str = "fashion_mnist"
    folder: str = "/usr/share/datasets/fashion-mnist"  # where Debian's package dataset-fashion-mnist puts them


@dataclass(kw_only=True, slots=True)
class HFDataConfig(DataConfig):
    """A Hugging Face data set: a local folder, or a name when the machine has network."""

    name: str = "hf"
    path: str = ""  # folder or name
    subset: str | None = None
    column: str = "text"
    streaming: bool = False  # read as it comes, for sets larger than the disk
    tokenizer: str | None = None  # a tokenizer's folder or name; none: bytes

    def __post_init__(self) -> None:
        DataConfig.__post_init__(self)
        if not self.path:
            raise ValueError("data.path='': name a folder or a data set")


@dataclass(kw_only=True, slots=True)
class SyntheticConfig(DataConfig):
    """Made-up data with structure that can be learnt, for tests and benchmarks."""

    name: str = "synthetic"
    kind: SyntheticKind = SyntheticKind.tokens
    samples: int = 4096  # images, or thousands of tokens
    classes: int = 10  # classes of images, or symbols of tokens
    side: int = 8  # pixels along a side of an image

    def __post_init__(self) -> None:
        DataConfig.__post_init__(self)
        at_least("data", self, 2, "samples", "classes", "side")
