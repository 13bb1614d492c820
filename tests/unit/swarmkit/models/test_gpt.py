"""GPT: causality, initialisation, learning, generation."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from swarmkit.models.build import build_model, num_parameters
from swarmkit.models.config import GPTConfig
from swarmkit.models.gpt import GPT, choose
from tests.unit.swarmkit.models.harness_models import fit, random_tokens, tokens


def tiny(**settings: object) -> GPTConfig:
    return GPTConfig(**{"layers": 2, "dim": 32, "heads": 2, "context": 16, **settings})


def gpt(config: GPTConfig, seed: int = 0, classes: int = 256) -> GPT:
    model = build_model(config, tokens(config.context, classes), seed=seed)
    assert isinstance(model, GPT)
    return model


@settings(max_examples=20, deadline=None)
@given(changed=st.integers(1, 15), seed=st.integers(0, 100))
def test_a_later_token_leaves_earlier_logits_as_they_were(changed: int, seed: int) -> None:
    model = gpt(tiny())
    before = random_tokens(1, 16, seed=seed)
    after = before.clone()
    after[0, changed] = (after[0, changed] + 1) % 256
    with torch.no_grad():
        old, new = model(before), model(after)
    torch.testing.assert_close(old[:, :changed], new[:, :changed], rtol=0, atol=1e-6)
    assert (old[:, changed] - new[:, changed]).abs().max() > 1e-4


def test_every_earlier_token_matters() -> None:
    model = gpt(tiny())
    embedded = []
    model.embedding.register_forward_hook(lambda _, __, out: (out.retain_grad(), embedded.append(out))[1])
    model(random_tokens(1, 16))[0, -1].square().sum().backward()
    assert (embedded[0].grad[0].abs().amax(dim=1) > 0).all()


def test_attention_sees_distances_not_places() -> None:
    """Rotary positions: the same text further right gives the same logits, if what it can see is the same."""
    model = gpt(tiny(layers=1, context=32))
    text = random_tokens(1, 8)
    x = model.embedding(text)
    block = model.blocks[0]
    with torch.no_grad():
        here = block(x, model.cos[:8], model.sin[:8])
        there = block(x, model.cos[20:28], model.sin[20:28])
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)


def test_positions_matter() -> None:
    model = gpt(tiny())
    with torch.no_grad():
        logits = model(torch.tensor([[5, 9, 7], [9, 5, 7]]))
    assert (logits[0, -1] - logits[1, -1]).abs().max() > 1e-5


def test_its_attention_is_the_textbook_formula() -> None:
    model = gpt(tiny(layers=1))
    attention = model.blocks[0].attention
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    cos, sin = model.cos[:5], model.sin[:5]
    q, k, v = (part.view(2, 5, 2, 16).transpose(1, 2) for part in attention.qkv(x).chunk(3, dim=-1))

    def turn(part: torch.Tensor) -> torch.Tensor:
        as_complex = torch.complex(part[..., :8], part[..., 8:]) * torch.complex(cos, sin)
        return torch.cat((as_complex.real, as_complex.imag), dim=-1)

    scores = turn(q) @ turn(k).transpose(-1, -2) / math.sqrt(16)
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    expected = attention.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 5, 32))
    torch.testing.assert_close(attention(x, cos, sin), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("layers", "dim", "ratio"), [(1, 8, 4.0), (3, 32, 2.0), (4, 128, 4.0)])
def test_it_has_as_many_parameters_as_the_formula_says(layers: int, dim: int, ratio: float, tied: bool) -> None:
    model = gpt(GPTConfig(layers=layers, dim=dim, heads=2, mlp_ratio=ratio, tied=tied))
    hidden = round(ratio * dim)
    per_layer = 2 * dim + 4 * dim * dim + 2 * dim * hidden
    assert num_parameters(model) == layers * per_layer + dim + 256 * dim * (1 if tied else 2)


def test_the_default_has_about_a_million_parameters() -> None:
    assert 0.75e6 < num_parameters(gpt(GPTConfig())) < 1.25e6


def test_the_seed_alone_decides_the_weights() -> None:
    torch.manual_seed(1)
    first = gpt(tiny(), seed=3).state_dict()
    torch.manual_seed(2)
    again, other = gpt(tiny(), seed=3).state_dict(), gpt(tiny(), seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])


def test_building_leaves_the_global_generator_as_it_was() -> None:
    before = torch.get_rng_state()
    gpt(tiny())
    assert torch.equal(before, torch.get_rng_state())


def test_at_first_all_tokens_are_about_equally_likely() -> None:
    text = random_tokens(4, 17)
    loss = gpt(tiny()).loss(text[:, :-1], text[:, 1:]).item()
    assert abs(loss - math.log(256)) < 0.1


def test_the_loss_is_the_mean_over_all_tokens() -> None:
    model = gpt(tiny())
    inputs, targets = random_tokens(3, 16), random_tokens(3, 16, seed=1)
    with torch.no_grad():
        by_hand = -model(inputs).log_softmax(-1).gather(-1, targets[..., None]).mean()
        torch.testing.assert_close(model.loss(inputs, targets), by_hand)


@pytest.mark.parametrize("tied", [True, False])
def test_it_learns_a_batch_by_heart(tied: bool) -> None:
    text = random_tokens(2, 17)
    assert fit(gpt(tiny(tied=tied)), text[:, :-1], text[:, 1:], steps=100, lr=1e-2) < 0.05


def test_it_says_a_learnt_text_by_heart() -> None:
    text = torch.tensor(list(b"she sells sea shells on the shore"))
    model = gpt(tiny(context=32))
    assert fit(model, text[None, :-1], text[None, 1:], steps=200, lr=3e-3) < 0.05
    assert bytes(model.generate(text[:4], len(text) - 4, temperature=0).tolist()) == bytes(text.tolist())


def test_the_generator_alone_decides_what_is_drawn() -> None:
    model, prompt = gpt(tiny()), torch.tensor([1, 2, 3])

    def draw(seed: int) -> list[int]:
        return model.generate(prompt, 24, generator=torch.Generator().manual_seed(seed)).tolist()

    assert draw(0) == draw(0) != draw(1)
    assert len(draw(0)) == 27
    assert draw(0)[:3] == [1, 2, 3]


def test_generating_goes_on_beyond_the_context_and_keeps_the_mode() -> None:
    model = gpt(tiny(dropout=0.5))
    model.train()
    one = model.generate(torch.tensor([1]), 40, temperature=0)
    assert model.training
    assert one.tolist() == model.eval().generate(torch.tensor([1]), 40, temperature=0).tolist()
    assert not model.training


def test_top_k_draws_from_the_k_likeliest_only() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.9]])
    generator = torch.Generator().manual_seed(0)
    drawn = {choose(logits, 5.0, 2, generator).item() for _ in range(100)}
    assert drawn == {1, 3}
    assert {choose(logits, 5.0, None, generator).item() for _ in range(200)} == {0, 1, 2, 3}
    assert choose(logits, 5.0, 1, generator).item() == 1


@pytest.mark.parametrize(
    ("prompt", "settings", "said"),
    [
        ([], {}, "at least one token"),
        ([1], {"temperature": -1.0}, "temperature=-1.0"),
        ([1], {"top_k": 0}, "top_k=0"),
    ],
)
def test_generating_refuses_what_makes_no_sense(prompt: list[int], settings: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        gpt(tiny()).generate(torch.tensor(prompt, dtype=torch.long), 3, **settings)


def test_more_tokens_than_the_context_are_refused() -> None:
    with pytest.raises(ValueError, match="17 tokens: the model's context is 16"):
        gpt(tiny())(random_tokens(1, 17))


def test_a_tied_model_has_one_matrix_for_both_ends() -> None:
    model = gpt(tiny())
    assert model.head.weight is model.embedding.weight
    assert gpt(tiny(tied=False)).head.weight is not model.embedding.weight


@pytest.mark.parametrize("how", ["parameters", "autocast"])
def test_it_trains_in_bfloat16(how: str) -> None:
    text = random_tokens(2, 17)
    model: nn.Module = gpt(tiny())
    if how == "parameters":
        model = model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        loss = model.loss(text[:, :-1], text[:, 1:])
    loss.backward()
    assert abs(loss.item() - math.log(256)) < 0.2
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
