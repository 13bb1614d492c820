"""Settings of every model, one dataclass each; importing this needs no torch."""

from dataclasses import dataclass, field

from swarmkit.checks import at_least, divides, in_range


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """What all models have in common."""

    name: str = "gpt"  # which model; set by the choice of the group


@dataclass(kw_only=True, slots=True)
class GPTConfig(ModelConfig):
    """A decoder-only transformer over bytes or tokens."""

    layers: int = 4
    dim: int = 128  # width of the residual stream
    heads: int = 4
    context: int = 128  # tokens that a prediction sees at most
    mlp_ratio: float = 4.0  # hidden width of the MLP over dim
    dropout: float = 0.0
    tied: bool = True  # one matrix for the embedding and the output

    def __post_init__(self) -> None:
        at_least("model", self, 1, "layers", "dim", "heads", "context")
        divides("model", self, "heads", "dim")
        if (self.dim // self.heads) % 2:
            raise ValueError(f"model.heads={self.heads}: dim / heads = {self.dim // self.heads} must be even")
        in_range("model", self, 0.0, 1.0, "dropout")
        if not self.mlp_ratio > 0:
            raise ValueError(f"model.mlp_ratio={self.mlp_ratio}: must be positive")


@dataclass(kw_only=True, slots=True)
class MLPConfig(ModelConfig):
    """A multilayer perceptron over flattened images."""

    name: str = "mlp"
    hidden: list[int] = field(default_factory=lambda: [256, 256])
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if any(width < 1 for width in self.hidden):
            raise ValueError(f"model.hidden={list(self.hidden)}: every width must be at least 1")
        in_range("model", self, 0.0, 1.0, "dropout")


@dataclass(kw_only=True, slots=True)
class ResNetConfig(ModelConfig):
    """A residual network with a small-image stem (arXiv 1512.03385, section 4.2)."""

    name: str = "resnet"
    blocks: int = 2  # residual blocks per stage; depth = 6 * blocks + 2
    width: int = 16  # channels of the first of three stages

    def __post_init__(self) -> None:
        at_least("model", self, 1, "blocks", "width")


@dataclass(kw_only=True, slots=True)
class ViTConfig(ModelConfig):
    """A vision transformer (arXiv 2010.11929) with mean pooling."""

    name: str = "vit"
    layers: int = 4
    dim: int = 64
    heads: int = 4
    patch: int = 4  # pixels along a side of a patch; must divide the image
    dropout: float = 0.0

    def __post_init__(self) -> None:
        at_least("model", self, 1, "layers", "dim", "heads", "patch")
        divides("model", self, "heads", "dim")
        in_range("model", self, 0.0, 1.0, "dropout")


@dataclass(kw_only=True, slots=True)
class HFModelConfig(ModelConfig):
    """Any causal language model that transformers can build, from a local folder or from its configuration."""

    name: str = "hf"
    folder: str | None = None  # a checkpoint folder on this machine: weights and configuration
    model_type: str = "gpt2"  # without a folder: the architecture to build with random weights
    config: dict[str, int | float | str | bool] = field(default_factory=dict)  # its settings, as in config.json
    context: int = 128  # tokens that a training sample has

    def __post_init__(self) -> None:
        at_least("model", self, 1, "context")
        if self.folder is None and not self.model_type:
            raise ValueError("model.model_type='': name an architecture, such as gpt2, or set model.folder")
