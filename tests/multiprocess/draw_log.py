"""Writes down which samples a process really draws and which rounds take them; tests put it in as sitecustomize.

It knows nothing of the product's own account: it watches the corpus being read and the strategy's rounds end.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

FOLDER = "SWARMKIT_TEST_DRAWS"


def write(kind: str, **fields: object) -> None:
    path = os.path.join(os.environ[FOLDER], f"{os.getpid()}.jsonl")
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": kind, **fields}) + "\n")


def watch_stream(module: ModuleType) -> None:
    numbers = module.Stream._numbers

    def watched(stream: Any, start: int, stop: int) -> Any:
        found = numbers(stream, start, stop)
        write("draw", numbers=found.tolist(), slot=stream._slot, slots=stream._slots, size=stream._corpus.size)
        return found

    module.Stream._numbers = watched  # type: ignore[attr-defined]


def watch_rounds(module: ModuleType) -> None:
    tell = module.SyncedOptimizer._tell

    def watched(optimizer: Any, report: Any) -> None:
        peer, observes = optimizer.collective.peer_id, report.weight == 0
        write("round", id=peer, round=report.round, ok=report.failed is None, members=report.members, observes=observes)
        tell(optimizer, report)

    module.SyncedOptimizer._tell = watched  # type: ignore[attr-defined]


WATCHED: dict[str, Callable[[ModuleType], None]] = {
    "swarmkit.data.stream": watch_stream,
    "swarmkit.optim.synced": watch_rounds,
}


class Finder(importlib.abc.MetaPathFinder):
    """Lets a module load as ever, then changes it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in WATCHED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def watched(module: ModuleType) -> None:
            execute(module)
            WATCHED[name](module)

        spec.loader.exec_module = watched  # type: ignore[method-assign]
        return spec


if FOLDER in os.environ:
    sys.meta_path.insert(0, Finder())
