"""How a benchmark ends: its results written, its aims judged, and a failure that says which one was missed."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `conclude` reads."""
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--no-check", dest="check", action="store_false", help="exit with 0 when an aim is missed, too")


def at_most(what: str, found: float, limit: float, unit: str = "") -> list[str]:
    """The missed aim in words, or nothing; what is not a number misses every aim."""
    return [] if found <= limit else [f"{what}: {found:.4g}{unit}, not at most {limit:.4g}{unit}"]


def at_least(what: str, found: float, limit: float, unit: str = "") -> list[str]:
    """The missed aim in words, or nothing; what is not a number misses every aim."""
    return [] if found >= limit else [f"{what}: {found:.4g}{unit}, not at least {limit:.4g}{unit}"]


def conclude(missed: Sequence[str], result: Any, options: argparse.Namespace) -> None:
    """Write the results where they are wanted, say which aims were missed, and exit with 1 if any was."""
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(f"missed: {what}" for what in missed) or "all aims are met")
    if missed and options.check:
        raise SystemExit(1)
