"""A DeMo step against the plain arithmetic of the reference, one after the other in one process.

python -m tests.bench.demo_step [--sizes 10M 100M] [--json FILE] [--no-check]

The plain form does for every tensor what the paper's code does: decay and add, encode by einsum, top-k, scatter,
decode, subtract, scatter and average, decode, sign, step. All sides are multiples of the chunk's, so both cut tensors
into the same chunks. Both see the same gradients; the signs that differ in the end stem from sums rounded in another
order.
"""

import argparse
import math
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from swarmkit.optim.dct import chunk_size, dct_basis
from swarmkit.optim.demo import DeMo
from swarmkit.peers.local import LocalSwarm
from tests.bench import aims

LR = 2**-10  # a power of two: whether it scales the momentum or the step then changes no bit
FASTER, FLIPS = 4.0, 1e-5
BETA, K, CHUNK = 0.999, 32, 64
SIZES = {"10M": (320, 8, 256), "100M": (768, 12, 16384)}  # width, layers, vocabulary of a GPT


def shapes(width: int, layers: int, vocabulary: int) -> list[tuple[int, ...]]:
    """The parameters of a GPT with biases and learnt positions."""
    vector, wide = (width,), (4 * width,)
    layer = [vector, vector, (3 * width, width), (3 * width,), (width, width), vector]
    layer += [vector, vector, (4 * width, width), wide, (width, 4 * width), vector]
    return [(vocabulary, width), (256, width), *layer * layers, vector, vector]


class PlainDeMo:
    """The reference's arithmetic for one worker, tensor by tensor; its gathers give back what they are given."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        self.deltas = [torch.zeros_like(p) for p in parameters]
        self.sgd = torch.optim.SGD(parameters, lr=LR, foreach=False)

    @torch.no_grad()
    def step(self) -> None:
        """One step of all tensors."""
        for p, delta in zip(self.parameters, self.deltas, strict=True):
            assert p.grad is not None
            delta.mul_(BETA).add_(p.grad, alpha=LR)
            rows = delta.view(-1, delta.shape[-1]) if delta.dim() > 1 else delta.view(1, -1)
            p.grad.copy_(self.send(rows).view_as(p.grad))
            p.grad.sign_()
        self.sgd.step()

    def send(self, delta: Tensor) -> Tensor:
        """Take the largest coefficients out of a tensor; returns the mean of what the gather gave, decoded."""
        (h, w), (r, c) = delta.shape, (chunk_size(delta.shape[0], CHUNK), chunk_size(delta.shape[1], CHUNK))
        left, right = dct_basis(r, delta.device).T, dct_basis(c, delta.device).T
        z = torch.einsum("ijkl,jb,ld->ikbd", delta.view(h // r, r, w // c, c), left, right).flatten(2)
        k = max(1, min(r * c, math.ceil(K * math.sqrt(r * c) / 64)))
        index = z.abs().topk(k, dim=-1, sorted=False).indices
        values = z.gather(-1, index)
        delta.sub_(self.decode(index, values, r, c))
        return self.decode(index, values, r, c)

    def decode(self, index: Tensor, values: Tensor, r: int, c: int) -> Tensor:
        """Entries of chunks as a matrix; those at one position are averaged."""
        z = torch.zeros(*index.shape[:2], r * c).scatter_reduce_(-1, index, values, reduce="mean", include_self=False)
        left, right = dct_basis(r, z.device), dct_basis(c, z.device)
        x = torch.einsum("ikbd,bj,dl->ijkl", z.view(*z.shape[:2], r, c), left, right)
        return x.reshape(x.shape[0] * r, x.shape[2] * c)


def make(size: str) -> list[Tensor]:
    """Equal parameters at every call."""
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator) / 50) for shape in shapes(*SIZES[size])]


def give_gradients(parameters: list[Tensor], step: int) -> None:
    """Noise, the same for all who ask with the same step."""
    generator = torch.Generator().manual_seed(step)
    for p in parameters:
        if p.grad is None:
            p.grad = torch.empty_like(p)
        p.grad.normal_(generator=generator).mul_(1e-3)


def make_demo(parameters: list[Tensor], values: str, sign: bool) -> DeMo:
    sgd = torch.optim.SGD(parameters, lr=LR, foreach=True)
    collective = LocalSwarm(1).collectives[0]
    options = {"values": values, "sign": sign, "precondition": None, "average": "senders"}
    return DeMo(sgd, collective=collective, k=K, chunk=CHUNK, beta=BETA, **options)  # type: ignore[arg-type]


def flips(left: list[Tensor], right: list[Tensor]) -> float:
    """Share of parameters that differ by half a step or more."""
    total = sum(p.numel() for p in left)
    return sum(int(((a - b).abs() > LR / 2).sum()) for a, b in zip(left, right, strict=True)) / total


def measure(size: str, repeats: int) -> dict[str, Any]:
    """CPU seconds of either, interleaved; differences after three steps."""
    parameters = {name: make(size) for name in ("plain", "float32", "sign")}
    plain = PlainDeMo(parameters["plain"])
    exact = make_demo(parameters["float32"], "float32", sign=True)
    one_bit = make_demo(parameters["sign"], "sign", sign=False)
    times: dict[str, list[float]] = {name: [] for name in parameters}
    differing = math.nan
    for step in range(repeats + 1):
        for name, optimizer in (("plain", plain), ("float32", exact), ("sign", one_bit)):
            give_gradients(parameters[name], step)
            start = time.process_time()  # of one thread: whoever else uses the machine counts less
            optimizer.step()
            times[name].append(time.process_time() - start)
        if step == 2:
            differing = flips(parameters["plain"], parameters["float32"])
    seconds = {name: statistics.median(found[1:]) for name, found in times.items()}
    ratios = {
        name: statistics.median(a / b for a, b in zip(times["plain"][1:], times[name][1:], strict=True))
        for name in ("float32", "sign")
    }
    return {
        "size": size,
        "parameters": sum(p.numel() for p in parameters["plain"]),
        "seconds": seconds,
        "ratio": ratios["float32"],
        "ratio_one_bit": ratios["sign"],
        "flips": differing,
        "bytes_per_coefficient": {
            values: form.num_bytes / form.coefficients
            for values in ("float32", "float16", "int8", "sign")
            if (form := make_demo(parameters["sign"], values, sign=False).averaging.form)
        },
        "bytes": one_bit.averaging.form.num_bytes,
    }


def missed(found: dict[str, Any]) -> list[str]:
    """What falls short of the aims, for a size."""
    size, bytes_per = found["size"], found["bytes_per_coefficient"]
    return [
        *aims.at_least(f"{size}, times faster than the plain form", found["ratio"], FASTER),
        *aims.at_most(f"{size}, share of parameters that differ", found["flips"], FLIPS),
        *aims.at_most(f"{size}, bytes per 1-bit coefficient", bytes_per["sign"], 1.7),
        *aims.at_most(f"{size}, bytes per int8 coefficient", bytes_per["int8"], 3.0),
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=5)
    aims.add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure(size, max(2, options.repeats)) for size in options.sizes]
    for found in results:
        seconds, bytes_per = found["seconds"], found["bytes_per_coefficient"]
        print(
            f"{found['size']}: plain {1e3 * seconds['plain']:.0f} ms, DeMo {1e3 * seconds['float32']:.0f} ms "
            f"({found['ratio']:.2f} times faster; 1-bit values {1e3 * seconds['sign']:.0f} ms), flips "
            f"{found['flips']:.1e}; bytes per coefficient "
            + ", ".join(f"{name} {each:.3f}" for name, each in bytes_per.items())
        )
    aims.conclude([what for found in results for what in missed(found)], results, options)


if __name__ == "__main__":
    main()
