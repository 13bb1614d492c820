"""What choosing the compression of every tensor takes, and how far from the optimum the choice may be.

python -m tests.bench.lgreco_solver [--json FILE]
"""

import argparse
import statistics
import time

import numpy as np
from numpy.typing import NDArray

from swarmkit.optim.compression.allocation import allocate, discretise, dynamic_programme
from tests.bench import aims

Floats = NDArray[np.float64]
LIMITS_MS = {(200, 16): 10.0, (600, 30): 20.0}
GAP = 0.01
CASES = ((50, 8), (50, 16), (200, 16), (600, 30))


def sparse_table(tensors: int, candidates: int, seed: int) -> tuple[Floats, Floats]:
    """Bytes and errors of a top-k codec at densities of 0.1 to 20 %, tensors of a thousand to four million elements."""
    rng = np.random.default_rng(seed)
    count = np.exp(rng.uniform(np.log(1e3), np.log(4e6), tensors))[:, None]
    density = np.geomspace(0.001, 0.2, candidates)
    decay = rng.uniform(0.6, 9, tensors)[:, None]
    scale = np.exp(rng.normal(0, 1.5, tensors))[:, None] * np.sqrt(count)
    return np.ceil(count * density * 8), scale * np.sqrt(1 - density) * np.exp(-decay * np.sqrt(density))


def measure(tensors: int, candidates: int, seeds: int) -> dict[str, float]:
    """Milliseconds and certified gaps over several tables; the baseline is the middle candidate."""
    times, gaps, ratios, programme, excess = [], [], [], [], []
    baseline = candidates // 2
    for seed in range(seeds):
        sizes, errors = sparse_table(tensors, candidates, seed)
        for squared in (False, True):
            start = time.perf_counter()
            found = allocate(sizes, errors, baseline=baseline, squared=squared)
            times.append(time.perf_counter() - start)
            gaps.append(found.gap)
            ratios.append(sizes[:, baseline].sum() / found.bytes)
        if seed < 3:
            best = allocate(sizes, errors, baseline=baseline)
            start = time.perf_counter()
            choices = dynamic_programme(sizes, discretise(errors, best.budget, 10_000), 10_000)
            programme.append(time.perf_counter() - start)
            assert choices is not None
            excess.append(float(sizes[np.arange(tensors), choices].sum()) / best.bytes - 1)
    return {
        "tensors": tensors,
        "candidates": candidates,
        "ms": 1e3 * statistics.median(times),
        "ms_worst": 1e3 * max(times),
        "gap_worst": max(gaps),
        "uniform_over_adaptive": statistics.median(ratios),
        "programme_ms": 1e3 * statistics.median(programme),
        "programme_excess": statistics.median(excess),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    aims.add_options(parser)
    options = parser.parse_args()
    measure(50, 8, 2)
    rows = [measure(*case, options.seeds) for case in CASES]
    print("tensors candidates |    ms  worst | worst gap | uniform/adaptive | programme (10 k): ms, excess")
    for row in rows:
        print(
            f"{row['tensors']:7d} {row['candidates']:10d} | {row['ms']:5.2f} {row['ms_worst']:6.2f} "
            f"| {row['gap_worst']:8.3%} | {row['uniform_over_adaptive']:16.2f} | "
            f"{row['programme_ms']:22.0f}, {row['programme_excess']:.1%}"
        )
    missed = []
    for row in rows:
        case = int(row["tensors"]), int(row["candidates"])
        if case in LIMITS_MS:
            missed += aims.at_most(f"{case[0]} x {case[1]}, median", row["ms"], LIMITS_MS[case], " ms")
            missed += aims.at_most(f"{case[0]} x {case[1]}, certified gap", row["gap_worst"], GAP)
    aims.conclude(missed, rows, options)


if __name__ == "__main__":
    main()
