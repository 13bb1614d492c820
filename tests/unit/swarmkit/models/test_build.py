"""Building: models must fit the data, and settings that cannot work name their key."""

import subprocess
import sys

import pytest
from torch import nn

from swarmkit.errors import ConfigError
from swarmkit.models.build import build_model, context_of, num_parameters
from swarmkit.models.config import GPTConfig, HFModelConfig, MLPConfig, ModelConfig, ResNetConfig, ViTConfig
from tests.unit.swarmkit.models.harness_models import images, tokens


@pytest.mark.parametrize("config", [MLPConfig(), ResNetConfig(), ViTConfig()], ids=lambda config: config.name)
def test_an_image_model_refuses_tokens(config: ModelConfig) -> None:
    with pytest.raises(ConfigError, match=f"model={config.name}: it needs images, the data are tokens"):
        build_model(config, tokens(16), seed=0)


@pytest.mark.parametrize("config", [GPTConfig(), HFModelConfig()], ids=lambda config: config.name)
def test_a_language_model_refuses_images(config: ModelConfig) -> None:
    with pytest.raises(ConfigError, match=f"model={config.name}: it needs tokens, the data are images"):
        build_model(config, images(1, 8, 8), seed=0)


def test_an_unknown_model_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"model\.name='rnn'"):
        build_model(ModelConfig(name="rnn"), images(1, 8, 8), seed=0)


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (GPTConfig, {"layers": 0}, r"model\.layers=0: must be at least 1"),
        (GPTConfig, {"heads": 3}, r"model\.heads=3: must divide model\.dim=128"),
        (GPTConfig, {"dim": 12, "heads": 4}, r"model\.heads=4: dim / heads = 3 must be even"),
        (GPTConfig, {"dropout": 1.0}, r"model\.dropout=1\.0: must be at least 0\.0 and below 1\.0"),
        (GPTConfig, {"mlp_ratio": 0.0}, r"model\.mlp_ratio=0\.0: must be positive"),
        (MLPConfig, {"hidden": [16, 0]}, r"model\.hidden=\[16, 0\]"),
        (ResNetConfig, {"width": 0}, r"model\.width=0"),
        (ViTConfig, {"patch": 0}, r"model\.patch=0"),
        (HFModelConfig, {"context": 0}, r"model\.context=0"),
        (HFModelConfig, {"model_type": ""}, r"model\.model_type=''"),
    ],
)
def test_a_setting_that_cannot_work_names_its_key(
    kind: type[ModelConfig], settings: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        kind(**settings)


def test_language_models_say_how_long_a_sample_is() -> None:
    assert context_of(GPTConfig(context=64)) == 64
    assert context_of(HFModelConfig(context=32)) == 32
    assert context_of(MLPConfig()) == 1


def test_parameters_are_counted_once_and_only_if_they_learn() -> None:
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 1))
    tied[1].weight = tied[0].weight
    tied[2].bias.requires_grad_(False)
    assert num_parameters(tied) == 16 + 4


@pytest.mark.parametrize("module", ["swarmkit.models.config", "swarmkit.data.config"])
def test_settings_can_be_read_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
