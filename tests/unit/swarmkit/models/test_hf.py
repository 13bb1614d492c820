"""Models of the transformers library: built from settings or from a folder, offline, never running foreign code."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

from swarmkit.errors import ConfigError
from swarmkit.models.build import build_model, num_parameters
from swarmkit.models.config import HFModelConfig
from swarmkit.models.hf import HFModel
from tests.unit.swarmkit.models.harness_models import fit, random_tokens, tokens

pytest.importorskip("transformers")

TINY = {
    "gpt2": {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 16},
    "llama": {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2},
}


def hf(model_type: str = "gpt2", *, seed: int = 0, classes: int = 256, **changed: int | float | str | bool) -> HFModel:
    config = HFModelConfig(model_type=model_type, config=TINY.get(model_type, {}) | changed, context=16)
    model = build_model(config, tokens(16, classes), seed=seed)
    assert isinstance(model, HFModel)
    return model


@pytest.mark.parametrize("model_type", list(TINY))
def test_a_model_made_from_settings_learns(model_type: str) -> None:
    text = random_tokens(2, 17)
    model = hf(model_type)
    before = model.loss(text[:, :-1], text[:, 1:]).item()
    assert abs(before - math.log(256)) < 0.3
    assert fit(model, text[:, :-1], text[:, 1:], steps=5, lr=1e-2) < before - 0.1


def test_a_saved_folder_gives_the_same_model_back(tmp_path: Path) -> None:
    model = hf(seed=5)
    model.model.save_pretrained(tmp_path)
    again = build_model(HFModelConfig(folder=str(tmp_path), context=16), tokens(16), seed=0)
    assert num_parameters(again) == num_parameters(model)
    inputs = random_tokens(2, 16)
    with torch.no_grad():
        assert torch.equal(model.eval()(inputs), again.eval()(inputs))


def test_the_seed_alone_decides_the_weights() -> None:
    torch.manual_seed(1)
    first = hf(seed=3).state_dict()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    again = hf(seed=3).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    other = hf(seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_generating_is_reproducible_and_keeps_the_mode() -> None:
    model = hf()
    model.train()
    one, two = (
        model.generate(torch.tensor([1, 2]), 20, generator=torch.Generator().manual_seed(0)).tolist() for _ in range(2)
    )
    assert one == two
    assert len(one) == 22
    assert model.training


@pytest.mark.parametrize(
    ("model_type", "changed", "said"),
    [
        ("gtp2", {}, r"model\.model_type='gtp2': transformers has no such model; try gpt2"),
        ("gpt2", {"vocab_size": 10}, "it knows 10 tokens, the data have 256"),
        ("gpt2", {"n_positions": 8}, r"model\.context=16: this model sees 8 tokens at most"),
        ("gpt2", {"n_embd": 13}, r"model\.model_type='gpt2': transformers cannot build it"),
        ("gpt2", {"n_embd": "wide"}, r"model\.model_type='gpt2': transformers cannot build it"),
        ("gpt2", {"n_lyer": 1}, r"model\.config\.n_lyer: gpt2 has no such setting; did you mean n_layer\?"),
        ("vit", {}, r"model\.model_type='vit': transformers cannot build it"),
    ],
)
def test_what_cannot_be_built_says_why(model_type: str, changed: dict[str, int | str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        hf(model_type, **changed)


def test_a_vocabulary_of_two_is_enough() -> None:
    assert hf(classes=2)(torch.tensor([[0, 1]])).shape == (1, 2, 2)


def test_a_model_that_sees_the_future_is_refused() -> None:
    small = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    with pytest.raises(ConfigError, match="its predictions depend on later tokens"):
        hf("bert", **small)
    hf("bert", **small, is_decoder=True)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.folder='.*': there is no config\.json in it"):
        build_model(HFModelConfig(folder=str(tmp_path)), tokens(128), seed=0)


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    hf().model.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"model\.folder='.*': transformers cannot build it: .*header"):
        build_model(HFModelConfig(folder=str(tmp_path), context=16), tokens(16), seed=0)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    hf().model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"model\.folder"):
        build_model(HFModelConfig(folder=str(tmp_path), context=16), tokens(16), seed=0)


def test_code_in_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Evil: ...\n")
    settings = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"model\.folder"):
        build_model(HFModelConfig(folder=str(tmp_path)), tokens(128), seed=0)
    assert not mark.exists()


def test_without_transformers_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'swarmkit-torch\[hf\]'"):
        hf()
