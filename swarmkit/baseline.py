"""The comparison: one process, no network, the same samples per step as the whole swarm."""

import dataclasses
import os
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from swarmkit.build import Together, build_trainer, open_corpus, open_stream
from swarmkit.compression import CompressionConfig
from swarmkit.config import config_from_json
from swarmkit.inner import AdamWConfig
from swarmkit.link_sink import LinkSink
from swarmkit.metrics import EventLog
from swarmkit.peers.local import LocalSwarm
from swarmkit.processes import Link
from swarmkit.signals import Leaving
from swarmkit.strategy import AllReduceConfig, DeMoConfig


def run_baseline(end: socket.socket, arguments: Mapping[str, Any]) -> int:
    """Train as data parallelism without a network would: each step averages the gradients of every peer's batch.

    Called by the nursery. The same seed, samples, steps and learning rates as the swarm had.
    """
    config = config_from_json(arguments["config"])
    leaving = Leaving(float(arguments["leave_s"]))
    leaving.install()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    alone = dataclasses.replace(
        config,
        accumulate=config.accumulate * config.peers,
        strategy=AllReduceConfig(),
        compression=CompressionConfig(),
        # DeMo is the optimizer itself; what it wraps would be a poor one alone.
        optimizer=AdamWConfig() if isinstance(config.strategy, DeMoConfig) else config.optimizer,
    )
    folder = Path(arguments["folder"])
    corpus = open_corpus(config)
    # accumulate counts in turns, so that a step reads what the peers' micro-batches of that step were.
    source = Together([open_stream(config, corpus, slot) for slot in range(config.peers)])
    collective = LocalSwarm(1).collectives[0]
    stop = threading.Event()
    with EventLog(folder / "events.jsonl", peer="baseline", sinks=[LinkSink(Link(end))]) as events:
        trainer = build_trainer(
            alone,
            collective=collective,
            corpus=corpus,
            source=source,
            events=events,
            checkpoints=folder / "checkpoints",
            evaluates_alone=True,
        )
        trainer.stop = stop
        leaving.ready(stop.set, collective.close)
        events.emit("state", state="training")
        outcome = trainer.run()
        fields: dict[str, object] = {"bytes_sent": 0, "bytes_received": 0}
        if outcome.score is not None:
            fields |= {"loss": outcome.score.loss, "bpb": outcome.score.bpb, "accuracy": outcome.score.accuracy}
        events.emit(
            "done",
            finished=outcome.finished,
            step=outcome.step,
            round=outcome.round,
            digest=outcome.digest,
            tokens=outcome.tokens,
            **fields,
        )
    return 0 if outcome.finished else leaving.exit_code
