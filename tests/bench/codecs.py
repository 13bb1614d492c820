"""Encoding plus decoding as a multiple of copying; bytes and errors of eight members' means by route.

python -m tests.bench.codecs
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from swarmkit.optim.collective import RoundKey
from swarmkit.optim.compression import (
    CODECS,
    Codec,
    CompressedAveraging,
    GatherCodec,
    Layout,
    LinearCodec,
    Route,
    make_codec,
)
from swarmkit.optim.compression.codec import compresses
from swarmkit.peers.local import LocalSwarm
from tests.bench import aims

MEMBERS = 8
MAX_PAYLOADS = 2.2  # that a member sends by slices
TARGETS = {"fp16": 20, "bf16": 20, "int8": 20, "int4": 20, "topk": 60}


def tensors(elements: int, width: int) -> list[Tensor]:
    """Matrices and biases as a small transformer has them, with small gradients of different size."""
    generator = torch.Generator().manual_seed(0)
    layers = max(1, elements // (width * (width + 1)))
    scales = torch.logspace(-4, -2, layers).tolist()
    shapes: list[tuple[int, ...]] = [(width, width), (width,)]
    return [scale * torch.randn(shape, generator=generator) for scale in scales for shape in shapes]


def seconds(run: Callable[[], object]) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start


def best(run: Callable[[], object], repeats: int) -> float:
    """CPU seconds of the fastest run: what else the machine does only ever adds to them."""
    run()
    return min(seconds(run) for _ in range(repeats))


def trip(codec: Codec, flat: Tensor, layout: Layout, out: Tensor) -> Callable[[], object]:
    """Encoding and decoding once, from a flat buffer to another."""
    if isinstance(codec, GatherCodec):
        return lambda: codec.decode(codec.encode(flat, layout, torch.Generator().manual_seed(0)), layout, out=out)
    assert isinstance(codec, LinearCodec)

    def exchange() -> None:
        steps = codec.exchange(flat, layout, torch.Generator().manual_seed(0))
        try:
            offered = next(steps)
            while True:
                offered = steps.send(offered)
        except StopIteration:
            return

    return exchange


def routes(name: str, given: list[Tensor]) -> dict[str, float]:
    """Bytes that a member sends, in payloads, and the relative error of one mean, by either route."""
    codec = make_codec(name)
    noise = [torch.Generator().manual_seed(1 + rank) for rank in range(MEMBERS)]
    offered = [[t + t.std() * torch.randn(t.shape, generator=g) for t in given] for g in noise]
    mean = torch.cat([torch.stack(ones).mean(0).flatten() for ones in zip(*offered, strict=True)])
    found: dict[str, float] = {}
    payload = 0.0
    for route in (Route.gather, Route.sharded):
        reduced = LocalSwarm(MEMBERS).run(
            lambda c, rank, route=route: (
                CompressedAveraging(codec, c, route=route)
                .begin(offered[rank], round=RoundKey("bench", 0), weight=1.0)
                .result()
            )
        )
        sent = sum(one.bytes_sent for one in reduced) / MEMBERS
        payload = sent / (MEMBERS - 1) if route is Route.gather else payload
        out = torch.cat([t.flatten() for t in reduced[0].tensors])
        found[route.name] = round(sent / payload, 2)
        found[f"{route.name}_error"] = round(float((out - mean).norm() / mean.norm()), 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=4_000_000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--exchanged", type=int, default=500_000, help="elements of the means by either route")
    aims.add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    given = tensors(options.elements, options.width)
    result: dict[str, object] = {"elements": sum(t.numel() for t in given), "repeats": options.repeats}
    ratios: dict[str, float] = {}
    for name in CODECS:
        codec = make_codec(name, min_size=0)
        chosen = [t for t in given if compresses(codec, t.shape)]
        layout = Layout.of(chosen, codec.align)
        flat = layout.flatten(chosen)
        out = torch.empty_like(flat)
        run = trip(codec, flat, layout, out)
        # A copy into memory that is there already: the fastest that any codec could be.
        ratios[name] = round(best(run, options.repeats) / best(partial(out.copy_, flat), options.repeats), 1)
    small = tensors(options.exchanged, 256)
    print("copies     " + ", ".join(f"{name} {ratio}" for name, ratio in ratios.items()))
    means = {name: routes(name, small) for name in CODECS if isinstance(make_codec(name), GatherCodec)}
    for name, found in means.items():
        print(f"{name:<11}" + ", ".join(f"{what} {value}" for what, value in found.items()))
    result |= {"copies": ratios, "targets": TARGETS, "members": MEMBERS, "routes": means}
    missed = []
    for name, target in TARGETS.items():
        missed += aims.at_most(f"{name}, encode and decode as copies", ratios[name], target)
    for name, found in means.items():
        missed += aims.at_most(f"{name}, payloads sent by slices", found["sharded"], MAX_PAYLOADS)
    aims.conclude(missed, result, options)


if __name__ == "__main__":
    main()
