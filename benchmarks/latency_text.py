"""A sentence encoder at half of its latency: part of `benchmarks.latency`.

MiniLM is planned for, and timed in, a runtime on the processor. What it costs is Spearman's correlation on SICK and STS
2014, by `benchmarks.encoder`.
"""

from __future__ import annotations

import argparse
import copy
import time

import secateur as sc
from benchmarks.encoder import opened
from benchmarks.latency_rows import keep, known
from secateur.nest import select_samples
from secateur.plans import Limits


def measure(options: argparse.Namespace) -> None:
    """Every share that is not known yet."""
    where = {"what": "text", **{key: getattr(options, key) for key in ("runtime", "batch", "threads")}}
    done = {(row["share"], row["blocks"]) for row in known(options.out, options.logs, **where)}
    todo = [(share, blocks) for share in options.shares for blocks in (False, True) if (share, blocks) not in done]
    if not todo:
        return
    given = argparse.Namespace(model=options.weights, data=options.images, task="sts", samples=256)
    model, drawn, judge = opened(given, "cpu")
    data, begin = drawn(0), time.perf_counter()
    example = select_samples(data[-1][0], slice(1))  # a long sentence
    length = example["input_ids"].shape[1]
    table = sc.latency(
        model, example, options.runtime, batch=options.batch, threads=options.threads, cache=options.cache
    )
    took = time.perf_counter() - begin
    whole = judge(copy.deepcopy(model).to(options.device))
    for share, blocks in todo:
        limits = Limits(round_to=8, blocks=blocks)
        result = sc.prune(model, data, keep={"latency": share}, limits=limits, latency=table, progress=False)
        before, after = result.cost_before.latency, result.cost_after.latency
        assert before is not None
        assert after is not None
        found = judge(copy.deepcopy(result.model).to(options.device))
        keep(options.out, "text", {
            **where, "share": share, "blocks": blocks, "tokens": length, "table_seconds": took, "before": before,
            "after": after, "macs": result.cost_after.macs / result.cost_before.macs, "whole": whole, "small": found,
            "tokens_per_second": [options.batch * length / before, options.batch * length / after],
            "blocks_gone": [block.name for block in result.plan.blocks] if result.plan else [],
        })  # fmt: skip
