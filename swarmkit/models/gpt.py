"""GPT: a decoder-only transformer with pre-norm, rotary positions (arXiv 2104.09864) and GELU."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmkit.models.config import GPTConfig


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend; x is [batch, time, dim], cos and sin are [time, dim / heads / 2]."""
        batch, time, dim = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, dim))
        return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of features by an angle that grows with its position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden = round(config.mlp_ratio * config.dim)
        self.attention_norm = nn.LayerNorm(config.dim, bias=False)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.dim, bias=False)
        self.up = nn.Linear(config.dim, hidden, bias=False)
        self.down = nn.Linear(hidden, config.dim, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """One layer; shapes as in Attention."""
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin))
        x = x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))
        return x


class GPT(nn.Module):
    """Predicts the next token of a sequence of at most `context` tokens."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig, classes: int, generator: torch.Generator) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(classes, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim, bias=False)
        self.head = nn.Linear(config.dim, classes, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        half = config.dim // config.heads // 2
        angles = torch.outer(torch.arange(config.context), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialise(generator)

    def _initialise(self, generator: torch.Generator) -> None:
        """GPT-2's initialisation: 0.02, and less where residual branches add up."""
        branches = math.sqrt(2 * self.config.layers)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() > 1:
                    scale = 1 / branches if name.endswith(("out.weight", "down.weight")) else 1.0
                    parameter.normal_(0.0, 0.02 * scale, generator=generator)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits [batch, time, classes] for inputs [batch, time], time at most the context."""
        time = inputs.shape[1]
        if time > self.config.context:
            raise ValueError(f"{time} tokens: the model's context is {self.config.context}")
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x, self.cos[:time], self.sin[:time])
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy per token, in nats."""
        return F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())

    def generate(
        self,
        prompt: Tensor,
        count: int,
        *,
        temperature: float = 0.8,
        top_k: int | None = 40,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue a prompt [time] by `count` tokens; temperature 0 always takes the likeliest."""
        return continue_prompt(self, prompt, count, self.config.context, temperature, top_k, generator)


@torch.no_grad()
def continue_prompt(
    model: nn.Module,
    prompt: Tensor,
    count: int,
    context: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | None,
) -> Tensor:
    """Append `count` tokens to a prompt [time], each drawn from what the model says of the last `context` tokens."""
    if prompt.dim() != 1 or not len(prompt):
        raise ValueError(f"prompt of shape {tuple(prompt.shape)}: must be one row of at least one token")
    if count < 0 or not temperature >= 0 or (top_k is not None and top_k < 1):
        raise ValueError(f"count={count}, temperature={temperature}, top_k={top_k}: count from 0, 0 and 1")
    was_training = model.training
    model.eval()
    tokens = prompt.view(1, -1)
    try:
        for _ in range(count):
            logits = model(tokens[:, -context:])[:, -1]
            tokens = torch.cat((tokens, choose(logits, temperature, top_k, generator)), dim=1)
    finally:
        model.train(was_training)
    return tokens[0]


def choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Draw a token [batch, 1] from logits [batch, classes]."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    return torch.multinomial((logits.float() / temperature).softmax(dim=-1), 1, generator=generator)
