"""The demo as users run it: under three minutes, equal digests, a loss beside a single process's.

python -m tests.bench.demo
"""

import re
import subprocess
import sys
import tempfile
import time

LIMIT_S = 180.0


def main() -> None:
    """Run it with all defaults and check what it must show."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", "from swarmkit.cli import main; main()", "local", f"out={folder}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=3 * LIMIT_S)
    seconds = time.monotonic() - started
    print("\n".join(done.stdout.splitlines()[-14:]))
    print(f"{seconds:.0f} s, exit code {done.returncode}")
    missing = [
        what
        for what, pattern in {
            "four equal digests": r"digests +4 of 4 peers finished and hold the same parameters",
            "a validation loss": r"validation +[\d.]+ bits per byte",
            "a single process's loss": r"baseline +[\d.]+ bits per byte",
        }.items()
        if not re.search(pattern, done.stdout)
    ]
    if done.returncode or missing or seconds > LIMIT_S:
        raise SystemExit(
            f"missing: {', '.join(missing) or 'nothing'}; {seconds:.0f} s of {LIMIT_S:.0f} s\n{done.stderr}"
        )


if __name__ == "__main__":
    main()
