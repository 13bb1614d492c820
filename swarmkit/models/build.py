"""From a configuration to the model that it names."""

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from swarmkit.errors import ConfigError
from swarmkit.models.config import GPTConfig, HFModelConfig, MLPConfig, ModelConfig, ResNetConfig, ViTConfig

if TYPE_CHECKING:
    from swarmkit.data.corpus import DataSpec


class TextModel(Protocol):
    """A model that can continue a text."""

    def generate(
        self,
        prompt: Tensor,
        count: int,
        *,
        temperature: float = 0.8,
        top_k: int | None = 40,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue a prompt [time] by `count` tokens."""
        ...


def context_of(config: ModelConfig) -> int:
    """How many tokens a training sample has; image models do not care."""
    return config.context if isinstance(config, GPTConfig | HFModelConfig) else 1


def build_model(config: ModelConfig, spec: "DataSpec", *, seed: int) -> nn.Module:
    """Build a model for the data that `spec` describes, with weights that depend on `seed` alone.

    All models have `forward(inputs) -> logits` and `loss(inputs, targets) -> mean cross entropy in nats`. Raises
    ConfigError when model and data do not fit.
    """
    wants_tokens = isinstance(config, GPTConfig | HFModelConfig)
    if wants_tokens != (spec.kind == "tokens"):
        wanted = "tokens" if wants_tokens else "images"
        raise ConfigError(
            f"model={config.name}: it needs {wanted}, the data are {spec.kind}; choose another model or data"
        )
    # torch's modules fill themselves from the global generator before their weights are set: leave that as it was.
    with torch.random.fork_rng(devices=[]):
        return _build(config, spec, seed)


def _build(config: ModelConfig, spec: "DataSpec", seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    match config:
        case GPTConfig():
            from swarmkit.models.gpt import GPT

            return GPT(config, spec.classes, generator)
        case HFModelConfig():
            from swarmkit.models.hf import HFModel

            return HFModel(config, spec.classes, seed)
        case MLPConfig():
            from swarmkit.models.mlp import MLP

            return MLP(config, spec.shape, spec.classes, generator)
        case ResNetConfig():
            from swarmkit.models.resnet import ResNet

            return ResNet(config, spec.shape, spec.classes, generator)
        case ViTConfig():
            from swarmkit.models.vit import ViT

            return ViT(config, spec.shape, spec.classes, generator)
    raise ConfigError(f"model.name={config.name!r}: no such model")


def num_parameters(model: nn.Module) -> int:
    """Trainable parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
