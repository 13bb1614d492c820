"""Benchmarks: python -m tests.bench [NAME [OPTIONS]]; without a name all but the long ones (strategies, demo, soak)."""

import runpy
import subprocess
import sys
from pathlib import Path

LONG = ("strategies", "demo", "soak")
HELPERS = ("aims", "allreduce_peers")


def names() -> list[str]:
    """The benchmarks there are."""
    files = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
    return [name for name in files if not name.startswith("_") and name not in HELPERS]


def main() -> None:
    """Run one with its own options, or all."""
    if len(sys.argv) > 1:
        name = sys.argv[1]
        if name not in names():
            raise SystemExit(f"{name}: no such benchmark; there are {', '.join(names())}")
        sys.argv = [f"tests.bench.{name}", *sys.argv[2:]]
        runpy.run_module(f"tests.bench.{name}", run_name="__main__")
        return
    failed = []
    for name in names():
        if name not in LONG:
            print(f"== {name}", flush=True)
            if subprocess.run([sys.executable, "-m", f"tests.bench.{name}"], check=False).returncode:
                failed.append(name)
    if failed:
        raise SystemExit(f"missed its aim, or could not run: {', '.join(failed)}")


if __name__ == "__main__":
    main()
