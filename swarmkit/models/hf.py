"""Causal language models of the transformers library, behind this package's interface."""

import difflib
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmkit.errors import ConfigError
from swarmkit.models.config import HFModelConfig
from swarmkit.models.gpt import continue_prompt


class HFModel(nn.Module):
    """Wraps an AutoModelForCausalLM; code that a checkpoint brings along is never run.

    Raises ConfigError when transformers is not installed, cannot build the model, or when the model has fewer tokens
    than the data or a shorter context than the samples. `save_pretrained` of `.model` writes a folder for
    `model.folder`.
    """

    def __init__(self, config: HFModelConfig, classes: int, seed: int) -> None:
        super().__init__()
        self.context = config.context
        self.model = _build(config, classes, seed)
        settings = self.model.config.get_text_config()
        if settings.vocab_size < classes:
            raise ConfigError(
                f"model={config.folder or config.model_type}: it knows {settings.vocab_size} tokens, the data have "
                f"{classes}; use the model's own data.tokenizer, or set model.config.vocab_size={classes}"
            )
        longest = getattr(settings, "max_position_embeddings", None)
        if longest is not None and longest < config.context:
            raise ConfigError(f"model.context={config.context}: this model sees {longest} tokens at most")
        if not self._is_causal():
            raise ConfigError(
                f"model={config.folder or config.model_type}: its predictions depend on later tokens, which it would "
                "learn to copy; choose a causal model, or set model.config.is_decoder=true if it has that"
            )

    @torch.no_grad()
    def _is_causal(self) -> bool:
        """Whether the second token leaves the prediction after the first as it was; encoders of BERT's kind fail."""
        self.eval()
        device = next(self.parameters()).device
        logits = self(torch.tensor([[1, 0], [1, 1]], device=device))[:, 0].float()
        self.train()
        return torch.allclose(logits[0], logits[1], rtol=1e-3, atol=1e-4)

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
        return continue_prompt(self, prompt, count, self.context, temperature, top_k, generator)


def _build(config: HFModelConfig, classes: int, seed: int) -> Any:  # noqa: ANN401 - an untyped package
    try:
        import huggingface_hub.errors
        import safetensors
        import transformers
    except ImportError as error:
        raise ConfigError("model=hf needs the transformers package: pip install 'swarmkit-torch[hf]'") from error
    try:
        if config.folder is not None:
            return _load(transformers, config)
        return _create(transformers, config, classes, seed)
    except ConfigError:
        raise
    # What transformers raises for settings or files that it cannot use depends on the architecture.
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RuntimeError,
        ImportError,
        safetensors.SafetensorError,
        getattr(huggingface_hub.errors, "StrictDataclassError", ValueError),
    ) as error:
        where = f"model_type={config.model_type!r}" if config.folder is None else f"folder={config.folder!r}"
        raise ConfigError(f"model.{where}: transformers cannot build it: {error}") from error


def _load(transformers: Any, config: HFModelConfig) -> Any:  # noqa: ANN401
    folder = Path(config.folder or "").expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.folder={config.folder!r}: there is no config.json in it; name a checkpoint's folder")
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=False, use_safetensors=True, local_files_only=True
    )


def _create(transformers: Any, config: HFModelConfig, classes: int, seed: int) -> Any:  # noqa: ANN401
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    if config.model_type not in known:
        near = difflib.get_close_matches(config.model_type, known, n=1) or ["gpt2"]
        raise ConfigError(f"model.model_type={config.model_type!r}: transformers has no such model; try {near[0]}")
    _refuse_misspelt(config, transformers.AutoConfig.for_model(config.model_type))
    # An architecture's own markers of begin and end are tokens that this vocabulary need not have.
    defaults = {"vocab_size": classes, "bos_token_id": None, "eos_token_id": None}
    settings = transformers.AutoConfig.for_model(config.model_type, **{**defaults, **config.config})
    with torch.random.fork_rng(devices=[]):
        # transformers initialises from the CPU's global generator; torch.manual_seed would seed the GPUs' too.
        torch.default_generator.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(settings, trust_remote_code=False)


def _refuse_misspelt(config: HFModelConfig, defaults: Any) -> None:  # noqa: ANN401
    """Refuse keys that only resemble one; transformers keeps any key, and not all that it knows have a default."""
    known = [*defaults.to_dict(), *defaults.attribute_map]
    for key in config.config:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
        if near and not hasattr(defaults, key):
            raise ConfigError(f"model.config.{key}: {config.model_type} has no such setting; did you mean {near[0]}?")
