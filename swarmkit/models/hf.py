"""Causal language models of the transformers library, behind this package's interface."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmkit.errors import ConfigError
from swarmkit.models.config import HFModelConfig


class HFModel(nn.Module):
    """Wraps an AutoModelForCausalLM; code that a checkpoint brings along is never run."""

    def __init__(self, config: HFModelConfig, classes: int, seed: int) -> None:
        super().__init__()
        self.context = config.context
        self.model = _build(config, classes, seed)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits [batch, time, classes] for inputs [batch, time]."""
        logits: Tensor = self.model(input_ids=inputs, use_cache=False).logits
        return logits

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy per token, in nats."""
        return F.cross_entropy(self(inputs).flatten(0, 1).float(), targets.flatten())

    def generate(
        self,
        prompt: Tensor,
        count: int,
        *,
        temperature: float = 0.8,
        top_k: int | None = 40,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """See GPT.generate."""
        from swarmkit.models.gpt import choose

        was_training = self.training
        self.eval()
        tokens = prompt.view(1, -1)
        with torch.no_grad():
            for _ in range(count):
                logits = self(tokens[:, -self.context :])[:, -1]
                tokens = torch.cat((tokens, choose(logits, temperature, top_k, generator)), dim=1)
        self.train(was_training)
        return tokens[0]


def _build(config: HFModelConfig, classes: int, seed: int) -> Any:  # noqa: ANN401 - an untyped package
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError("model=hf needs the transformers package: pip install 'swarmkit-torch[hf]'") from error
    try:
        if config.folder is not None:
            folder = Path(config.folder).expanduser()
            if not (folder / "config.json").is_file():
                raise ConfigError(f"model.folder={config.folder!r}: there is no config.json in it")
            return AutoModelForCausalLM.from_pretrained(
                folder, trust_remote_code=False, use_safetensors=True, local_files_only=True
            )
        settings = AutoConfig.for_model(config.model_type, **{"vocab_size": classes, **config.config})
        with torch.random.fork_rng(devices=[]):
            # transformers initialises from the global generator.
            torch.manual_seed(seed)
            return AutoModelForCausalLM.from_config(settings, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.model_type={config.model_type!r}, folder={config.folder!r}: {error}") from error
