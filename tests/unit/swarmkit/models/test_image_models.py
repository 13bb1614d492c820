"""MLP, ResNet and ViT: what they learn, how many parameters they have, what decides their weights."""

import pytest
import torch

from swarmkit.errors import ConfigError
from swarmkit.models.build import build_model, num_parameters
from swarmkit.models.config import MLPConfig, ModelConfig, ResNetConfig, ViTConfig
from tests.unit.swarmkit.models.harness_models import accuracy_on_digits, digits, fit, images

ALL = [
    MLPConfig(hidden=[64, 32]),
    ResNetConfig(blocks=1, width=8),
    ViTConfig(layers=2, dim=32, heads=2, patch=2),
]
by_name = pytest.mark.parametrize("config", ALL, ids=lambda config: config.name)


@pytest.mark.parametrize(
    ("config", "steps", "lr", "least"),
    [
        (MLPConfig(hidden=[128]), 300, 3e-3, 0.95),
        (ResNetConfig(blocks=1, width=8), 150, 1e-2, 0.96),
        (ViTConfig(layers=2, dim=32, heads=2), 250, 6e-3, 0.94),
    ],
    ids=["mlp", "resnet", "vit"],
)
def test_it_reads_handwritten_digits(config: ModelConfig, steps: int, lr: float, least: float) -> None:
    pytest.importorskip("sklearn")
    corpus = digits()
    model = build_model(config, corpus.spec, seed=0)
    assert accuracy_on_digits(model, corpus, steps=steps, lr=lr) >= least


@by_name
def test_it_learns_a_batch_by_heart(config: ModelConfig) -> None:
    pictures = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    model = build_model(config, images(1, 8, 8), seed=0)
    assert fit(model, pictures, torch.arange(16) % 10, steps=100, lr=3e-3) < 0.1


@by_name
def test_the_seed_alone_decides_the_weights(config: ModelConfig) -> None:
    torch.manual_seed(1)
    first = build_model(config, images(1, 8, 8), seed=3).state_dict()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    again = build_model(config, images(1, 8, 8), seed=3).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    other = build_model(config, images(1, 8, 8), seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@by_name
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_it_takes_other_image_sizes(config: ModelConfig, shape: tuple[int, int, int]) -> None:
    model = build_model(config, images(*shape), seed=0)
    assert model(torch.zeros(2, *shape)).shape == (2, 10)


@by_name
def test_in_evaluation_an_image_does_not_depend_on_its_batch(config: ModelConfig) -> None:
    model = build_model(config, images(1, 8, 8), seed=0).eval()
    pictures = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(pictures)[:1], model(pictures[:1]), rtol=1e-4, atol=1e-5)


def test_the_mlp_has_as_many_parameters_as_the_formula_says() -> None:
    model = build_model(MLPConfig(hidden=[64, 32]), images(1, 8, 8), seed=0)
    assert num_parameters(model) == (64 * 64 + 64) + (64 * 32 + 32) + (32 * 10 + 10)


def test_the_resnet_has_as_many_parameters_as_the_formula_says() -> None:
    blocks, width = 2, 8
    expected, inside = 9 * width + 2 * width, width
    for stage in range(3):
        for block in range(blocks):
            outside = width << stage
            expected += 9 * inside * outside + 9 * outside * outside + 4 * outside
            if stage and not block:
                expected += inside * outside + 2 * outside
            inside = outside
    expected += inside * 10 + 10
    assert num_parameters(build_model(ResNetConfig(blocks=blocks, width=width), images(1, 8, 8), seed=0)) == expected


def test_the_vit_has_as_many_parameters_as_the_formula_says() -> None:
    layers, dim = 2, 32
    per_layer = 4 * dim * dim + 4 * dim + 8 * dim * dim + 5 * dim + 4 * dim
    expected = (4 * dim + dim) + 16 * dim + layers * per_layer + 2 * dim + (10 * dim + 10)
    model = build_model(ViTConfig(layers=layers, dim=dim, heads=2, patch=2), images(1, 8, 8), seed=0)
    assert num_parameters(model) == expected


def test_the_resnet_keeps_statistics_of_its_batches() -> None:
    model = build_model(ResNetConfig(blocks=1, width=8), images(1, 8, 8), seed=0)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("running_mean")}
    model.train()(torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0)))
    assert len(buffers) == 9
    assert all(not torch.equal(buffers[name], dict(model.named_buffers())[name]) for name in buffers)


def test_a_patch_that_does_not_divide_the_image_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.patch=3: must divide the images' 8 x 8 pixels"):
        build_model(ViTConfig(patch=3), images(1, 8, 8), seed=0)
