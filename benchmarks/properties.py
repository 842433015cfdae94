"""Many random networks through the mill: removal equals masking, planned cost equals measured cost.

    python -m benchmarks.properties --examples 5000 --workers 2

The networks are those of the property tests (`tests/random_nets.py`), drawn here without shrinking, by number: a
failure is reproduced with `--first N --examples 1`.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))


def one(number: int) -> str:
    """Either "ok", or "nothing" if no unit may leave or the target is out of reach, or what went wrong."""
    import secateur as sc
    from constructs import randomise
    from oracle import outputs, random_scores, relative_gap, zeroed
    from random_nets import BLOCKS, RandomNet
    from secateur.errors import NothingToPruneError, TargetError
    from secateur.plans import Limits

    torch.set_num_threads(1)
    rng = np.random.default_rng(number)
    torch.manual_seed(number)
    kinds = [BLOCKS[i] for i in rng.integers(len(BLOCKS), size=rng.integers(1, 7))]
    net = randomise(RandomNet(kinds, int(rng.choice([8, 16])), bool(rng.random() < 0.5))).eval()
    example = torch.randn(2, 3, 4, 4)
    try:
        graph = sc.analyze(net, example)
        scope = "global" if rng.random() < 0.5 else "layer"
        plan = sc.plan(graph, random_scores(graph, number), remove=float(rng.uniform(0.05, 0.9)), limits=Limits(scope))
        small = sc.apply(net, plan)
    except (NothingToPruneError, TargetError):
        return "nothing"
    except Exception as error:
        return f"{kinds}: {type(error).__name__}: {error}"
    reference = zeroed(net, graph, plan)
    gap = relative_gap(outputs(small, example), outputs(reference, example))
    if gap >= 1e-4:
        return f"{kinds}: removal and masking differ by {gap:.2g}"
    if sc.measure(small, example, latency=False) != plan.after:
        return f"{kinds}: planned and measured cost differ"
    return "ok"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    begin = time.perf_counter()
    numbers = range(options.first, options.first + options.examples)
    with ProcessPoolExecutor(options.workers) as pool:
        found = list(pool.map(one, numbers, chunksize=10))
    for number, outcome in zip(numbers, found, strict=True):
        if outcome not in ("ok", "nothing"):
            print(f"{number}: {outcome}")
    good, none = found.count("ok"), found.count("nothing")
    print(f"{good} of {len(found)} networks: removal equals masking; {none} had nothing to remove or too little; "
          f"{len(found) - good - none} failed; {time.perf_counter() - begin:.0f} s")  # fmt: skip


if __name__ == "__main__":
    main()
