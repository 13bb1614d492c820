"""Every benchmark in one go: python -m tests.bench [--json FILE]."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.network.namespaces import why_not


def step_overhead() -> Any:
    """Run the step benchmark and return its result."""
    command = [sys.executable, "-m", "tests.bench.step_overhead"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result = json.loads(done.stdout)
    print(
        f"a step between rounds, {result['parameters'] / 1e6:.1f} M parameters: {result['ratio']:.4f} times the inner "
        f"optimizer's (two bare ones differ by {result['noise']:.4f})\n",
        flush=True,
    )
    return result


def all_reduce() -> Any:
    """Run the all-reduce benchmark, which prints its table, and return its rows; None where it cannot run."""
    missing = why_not()
    if missing:
        print(f"all-reduce on shaped links: not measured, {missing}")
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.json")
        subprocess.run([sys.executable, "-m", "tests.bench.allreduce", "--json", str(file)], check=True)
        return json.loads(file.read_text())


def main() -> None:
    """Measure, print tables, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write all results here")
    options = parser.parse_args()
    results = {"step_overhead": step_overhead(), "all_reduce": all_reduce()}
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
