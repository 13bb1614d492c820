"""Every strategy with every codec at equal tokens: validation loss and bytes, of a byte-level GPT on four workers.

python -m tests.bench.strategies [--methods diloco eager] [--codecs none int4] [--steps 300] [--json FILE]

With --json, rows that the file already holds are not measured again. Aims are judged where the rows they compare are.
"""

import argparse
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from swarmkit.build import build_trainer, open_corpus, open_stream
from swarmkit.compose import load_config
from swarmkit.config import Config
from swarmkit.optim import Collective
from swarmkit.peers.local import LocalSwarm
from tests.bench import aims

BASE = [
    "steps=150", "peers=4", "batch_size=4", "threads=1", "device=cpu",
    "model.layers=4", "model.dim=144", "model.heads=4", "model.context=64",
    "optimizer.lr=0.002", "eval.every=0", "eval.batches=64", "sample.tokens=0",
]  # fmt: skip
H = "strategy.sync.h=10"
METHODS: dict[str, list[str]] = {
    "allreduce": ["strategy=allreduce"],
    "local_sgd": ["strategy=local_sgd", H],
    "local_sgd qsr": ["strategy=local_sgd", H, "strategy.sync.rule=qsr", "strategy.sync.alpha=0.0063"],
    "diloco": ["strategy=diloco", H, "strategy.outer_lr=0.2"],
    "eager": ["strategy=diloco", H, "strategy.outer_lr=0.7", "strategy.outer_momentum=0", "strategy.eager=true"],
    "delayed": ["strategy=diloco", H, "strategy.outer_lr=0.2", "strategy.outer_momentum=0.9",
                "strategy.eager=delayed"],
    "eager 0.4": ["strategy=diloco", H, "strategy.outer_lr=0.4", "strategy.outer_momentum=0.9", "strategy.eager=true"],
    "delayed 0.4": ["strategy=diloco", H, "strategy.outer_lr=0.4", "strategy.outer_momentum=0.9",
                    "strategy.eager=delayed"],
    "streaming": ["strategy=diloco", "strategy.sync.h=12", "strategy.outer_lr=0.4", "strategy.fragments=3",
                  "strategy.overlap_steps=1", "strategy.mixing=0.5"],
    "co2": ["strategy=co2", H],
    "co2 gap clip": ["strategy=co2", H, "strategy.outer_lr=1", "strategy.outer_momentum=0.7", "strategy.penalty=gap",
                     "strategy.clip=1"],
    "demo": ["strategy=demo", "optimizer=sgd", "optimizer.momentum=0", "optimizer.lr=0.0025"],
}  # fmt: skip
CODECS: dict[str, list[str]] = {
    "none": [],
    "int8": ["compression=int8"],
    "int4": ["compression=int4"],
    "fp4": ["compression=fp4", "compression.min_size=0"],
    "topk": ["compression=topk", "compression.density=0.01"],
    "powersgd": ["compression=powersgd", "compression.rank=4"],
    "topk lgreco": ["compression=topk", "compression.density=0.01", "compression.lgreco.period=5",
                    "compression.lgreco.window=4"],
    "qsgd": ["compression=qsgd"],
    "ternary": ["compression=ternary"],
    "randomk": ["compression=randomk", "compression.density=0.01", "compression.unbiased=false"],
}  # fmt: skip


class Totals:
    """Counts what a replica's rounds cost."""

    def __init__(self, config: Config) -> None:
        self.sent = 0
        self.gathers = config.strategy.name == "demo"  # it has no codec, which would tell the route
        self.payload = 0.0  # without how often a route sends it among so many
        self.rounds = 0

    def emit(self, kind: str, **fields: Any) -> None:
        """See Events."""
        if kind == "round":
            self.sent += fields["bytes_sent"]
            self.payload += fields["bytes_sent"] / times_sent(
                "gather" if self.gathers else fields["route"], len(fields["members"])
            )
            self.rounds += 1


def times_sent(route: str, members: int) -> float:
    """How often a peer sends its payload: to each other member in a gather, else twice but for its own slice."""
    if members < 2:
        return 1.0
    return members - 1.0 if route == "gather" else 2 * (members - 1) / members


def train(config: Config) -> dict[str, Any]:
    """Train all replicas in this process; loss in nats, bytes sent by one peer per step."""
    corpus = open_corpus(config)
    totals = [Totals(config) for _ in range(config.peers)]

    def replica(collective: Collective, rank: int) -> tuple[str, float | None, int]:
        with tempfile.TemporaryDirectory() as folder:
            trainer = build_trainer(
                config,
                collective=collective,
                corpus=corpus,
                source=open_stream(config, corpus, rank),
                events=totals[rank],
                checkpoints=Path(folder),
                slot=rank,
            )
            outcome = trainer.run()
            size = sum(tensor.numel() for tensor in trainer.optimizer.anchor().values())
        return outcome.digest, None if outcome.score is None else outcome.score.loss, size

    started = time.perf_counter()
    ends = LocalSwarm(config.peers, round_timeout=600.0).run(replica, timeout=24 * 3600.0)
    assert len({digest for digest, _, _ in ends}) == 1, "the replicas ended with different parameters"
    (loss,) = [loss for _, loss, _ in ends if loss is not None]
    return {
        "loss": loss,
        "bytes_per_step": sum(total.sent for total in totals) / config.peers / config.steps,
        "payload_per_step": sum(total.payload for total in totals) / config.peers / config.steps,
        "rounds": totals[0].rounds,
        "parameters": ends[0][2],
        "peers": config.peers,
        "seconds": time.perf_counter() - started,
    }


def missed(rows: list[dict[str, Any]], seed: int) -> list[str]:
    """What falls short of the aims that the rows of a seed can tell of."""
    of = {(row["method"], row["codec"]): row for row in rows if row["seed"] == seed}
    every_step, streaming = of.get(("allreduce", "none")), of.get(("streaming", "none"))
    found = []

    def beyond(method: str, codec: str, base: dict[str, Any] | None, *, share: float = 0.0, most: float = 0.0) -> None:
        row = of.get((method, codec))
        if row and base:
            limit = (1 + share) * base["loss"] + most
            label = f"{method} with {codec}, seed {seed}, loss beside {base['method']} with {base['codec']}"
            found.extend(aims.at_most(label, row["loss"], limit))

    def smaller(method: str, codec: str, base: dict[str, Any] | None, least: float) -> None:
        row = of.get((method, codec))
        if row and base and "payload_per_step" in row and "payload_per_step" in base:
            label = f"{method} with {codec}, seed {seed}, times smaller payloads than {base['method']}'s"
            label += f" with {base['codec']}"
            found.extend(aims.at_least(label, base["payload_per_step"] / row["payload_per_step"], least))

    beyond("demo", "none", every_step, share=0.01)
    if (demo := of.get(("demo", "none"))) and demo.get("peers", 1) > 1:
        payload = demo["bytes_per_step"] / (demo["peers"] - 1)
        label = f"demo, seed {seed}, times that a payload is smaller than the gradients"
        found += aims.at_least(label, 4 * demo["parameters"] / payload, 150.0)
    beyond("co2", "none", of.get(("local_sgd", "none")), share=0.03)
    beyond("co2 gap clip", "none", of.get(("local_sgd", "none")), share=0.03)
    beyond("eager", "none", of.get(("diloco", "none")), most=0.12)
    beyond("eager 0.4", "none", of.get(("delayed 0.4", "none")), most=-0.3)
    beyond("streaming", "fp4", streaming, most=0.01)
    smaller("streaming", "fp4", streaming, 7.5)
    beyond("streaming", "fp4", every_step, most=0.06)
    smaller("streaming", "fp4", every_step, 95.0)
    beyond("allreduce", "topk lgreco", of.get(("allreduce", "topk")))
    return found


def main() -> None:
    """Measure what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument(
        "--codecs", nargs="+", choices=CODECS, default=["none", "int8", "int4", "topk", "powersgd", "topk lgreco"]
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    aims.add_options(parser)
    parser.add_argument("overrides", nargs="*", help="settings for all runs, as steps=300")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    printed: list[dict[str, Any]] = []
    print(f"{'strategy':<15}{'codec':<13}{'seed':>5}{'loss':>9}{'bytes/step':>12}{'B/param':>9}{'s':>7}")
    for method, codec, seed in itertools.product(options.methods, options.codecs, options.seeds):
        if method == "demo" and codec != "none":
            continue
        label = {"method": method, "codec": codec, "seed": seed, "overrides": options.overrides}
        row = next((row for row in rows if all(row[key] == value for key, value in label.items())), None)
        if row is None:
            settings = [*BASE, *METHODS[method], *CODECS[codec], f"seed={seed}", *options.overrides]
            row = {**label, **train(load_config(settings))}
            rows.append(row)
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1) + "\n")
        print(
            f"{method:<15}{codec:<13}{seed:>5}{row['loss']:>9.4f}{row['bytes_per_step']:>12,.0f}"
            f"{row['bytes_per_step'] / row['parameters']:>9.4f}{row['seconds']:>7.1f}",
            flush=True,
        )
        printed.append(row)
    aims.conclude([what for seed in options.seeds for what in missed(printed, seed)], rows, options)


if __name__ == "__main__":
    main()
