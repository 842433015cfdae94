"""Every family of `transformers` that builds from a tiny configuration without a network: what may leave, is it exact?

    python -m benchmarks.zoo --hf --workers 16 --log out/hf.jsonl
    python -m benchmarks.zoo --hf --only llama gpt2

For each family: analyse, remove 30 % and 60 % of the units at random, and compare with masking in double precision, on
the example, on another length, and with padding. Then save as a folder, load it, and check that relevance is conserved
under attnlrp. A row says which share of heads, neurons, width and experts may leave, and why the rest may not. Each
family runs in a process of its own, with a time limit. With `--log`, rows are kept as they come, and families that
have a row are not run again.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

import secateur as sc
from benchmarks.tiny_transformers import build, families, inputs, parts
from benchmarks.zoo import keep, rows_in
from secateur.files.pretrained import save_pretrained
from secateur.nest import tensors_of_output

# Relative to the largest output. Forwards cast to single precision in places.
_ROUNDING = 1e-5
_SINGLE = ("dab-detr", "inkling2_text", "mra", "xglm")  # their forwards know no double precision
_SECONDS = 150  # for one family
_SLOW = ("yolos", "kimi_linear")  # these begin first
_LOSS = 0.05  # of the relevance, as for the other zoos with layer norms
_PARTS = ("heads", "neurons", "width", "experts")


def mill(family: str, mapping: str) -> dict[str, Any]:
    """One family; the row of the table. A model that cannot be built is no member of the zoo."""
    row: dict[str, Any] = {"model": family}
    try:
        model = build(family, mapping).float()
        examples = [inputs(model), inputs(model, 3, 11, 0, 1), inputs(model, 2, 13, 4, 2)]
        with torch.no_grad():
            finite = all(bool(torch.isfinite(_logits(model, example)).all()) for example in examples)
        if not finite:
            raise ValueError("the model itself computes NaN or infinity")
    except Exception as error:
        return row | {"unbuilt": _said(error)}
    begin = time.process_time()
    graph = sc.analyze(model, examples[0])
    row["analyse_s"] = round(time.process_time() - begin, 2)
    gone = np.zeros(len(graph.root), np.bool_)
    gone[graph.candidates] = True
    left = graph.cost_of(gone)
    row["free"] = [1 - left.params / graph.cost.params, 1 - left.macs / max(graph.cost.macs, 1)]
    rng = np.random.default_rng(0)
    scores = sc.Scores("random", {p.sites[0]: rng.random(len(p.labels)) for p in graph.producers})
    small = None
    row["gap"] = 0.0
    for share in (0.3, 0.6):
        try:
            graph, small, plan = _removed(model, graph, scores, share)
        except sc.SecateurError as error:
            if "at most" not in str(error):
                raise
            continue
        masked = sc.apply(model, plan, how="mask")
        for example in examples:
            a, b = (_logits(net, example, double=True) for net in (small, masked))
            row["gap"] = max(row["gap"], float((a - b).abs().max() / b.abs().max()))
    if small is None:
        raise ValueError("neither 30 % nor 60 % of the units can leave")
    row["parts"] = parts(graph)
    row["reload"] = _reload(small.float(), examples[0])
    row["relevance"] = _conserved(model.float(), examples[0])
    row["ok"] = row["gap"] < (10 * _ROUNDING if _single(model) else _ROUNDING) and row["reload"] in ("stock", "ours")
    return row


def _removed(model: nn.Module, graph: sc.Graph, scores: sc.Scores, share: float) -> tuple[sc.Graph, nn.Module, sc.Plan]:
    """Remove a share. As in a run, layers whose removal fails its check stay, and the rest is tried again."""
    for _ in range(4):
        plan = sc.plan(graph, scores, remove=share)
        try:
            return graph, sc.apply(model, plan), plan
        except sc.errors.VerificationError as error:
            if not error.layers:
                raise
            graph = graph.frozen(dict.fromkeys(error.layers, "found by the check of the removal"))
    raise ValueError("the check of the removal fails again and again")


def _reload(small: nn.Module, example: dict[str, Tensor]) -> str:
    """Who opens the folder again, with equal logits: transformers itself, or we."""
    with tempfile.TemporaryDirectory() as folder:
        where = save_pretrained(small, Path(folder, "m"))
        note = json.loads((where / "config.json").read_text())["secateur"]["widths"]
        again: Any = sc.load(where).eval()
        if hasattr(again, "set_experts_implementation"):
            again.set_experts_implementation("eager")  # as the model was built: other widths fit no grouped product
        equal = torch.equal(_logits(small, example), _logits(again, example))
    return "differs" if not equal else "stock" if note == "uniform" else "ours"


def _conserved(model: nn.Module, example: dict[str, Tensor]) -> float | str:
    """The largest share of the relevance that is lost or created under attnlrp, or why there is none."""
    kind = getattr(model, "config", None) and model.config.model_type
    if hasattr(model, "logit_scale") or kind in ("align", "blip-2"):  # it compares the samples of a batch
        example = {name: tensor[:1] for name, tensor in example.items()}
    try:
        return sc.explain(model, example, 3 % _logits(model, example).shape[-1], composite="attnlrp").conservation.worst
    except Exception as error:
        return _said(error)


def _logits(model: nn.Module, example: dict[str, Tensor], double: bool = False) -> Tensor:
    wanted = torch.float64 if double and not _single(model) else torch.float32
    given = {name: t.to(wanted) if t.is_floating_point() else t for name, t in example.items()}
    with torch.no_grad():
        made = tensors_of_output(model.to(wanted)(**given))[0]
    model.train().eval()  # LeViT then forgets the biases that it keeps, which have this precision
    return made


def _single(model: nn.Module) -> bool:
    """Whether a forward knows no double precision."""
    return getattr(model, "config", None) is not None and model.config.model_type in _SINGLE


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _work(family: str, mapping: str, end: Any) -> None:
    """One family, in a process of its own."""
    torch.set_num_threads(1)
    begin = time.perf_counter()
    try:
        row = mill(family, mapping)
    except Exception as error:
        row = {"model": family, "error": _said(error)}
    end.send(row | {"seconds": round(time.perf_counter() - begin, 1)})


def _rows(waiting: list[tuple[str, str]], workers: int, seconds: float) -> Iterator[dict[str, Any]]:
    """A row for each family, as they come. A family that takes too long, or whose process dies, has an error."""
    context = multiprocessing.get_context("fork")  # what was imported need not be imported again
    running: dict[Any, tuple[str, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            (family, mapping), (ours, theirs) = waiting.pop(0), context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(family, mapping, theirs), daemon=True)
            process.start()
            theirs.close()
            running[ours] = family, process, time.perf_counter()
        ready = wait(list(running), timeout=1)
        for ours, (family, process, begin) in list(running.items()):
            late = time.perf_counter() - begin > seconds
            if ours not in ready and not late:
                continue
            row = {"model": family, "error": f"TimeoutError: took longer than {seconds:g} s"}
            if ours in ready:
                try:
                    row = ours.recv()
                except EOFError:
                    row["error"] = "the process died"
            else:
                process.kill()
            process.join()
            del running[ours]
            yield row


def main(only: Sequence[str] | None, log: Path | None, workers: int = 1, seconds: float = _SECONDS) -> None:
    """Print a line for each family as it comes, and the table."""
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    rows = rows_in(log)
    known = {family for family, _ in families()}
    waiting = [(f, mapping) for f, mapping in families() if f not in rows and (not only or f in only)]
    waiting.sort(key=lambda pair: pair[0] not in _SLOW)
    begin = time.perf_counter()
    for row in _rows(waiting, workers, seconds):
        rows[row["model"]] = row
        keep(log, row)
    took = f"{time.perf_counter() - begin:.0f} s"
    print(f"\ntransformers {transformers.__version__}, torch {torch.__version__}, {workers} workers: {took}\n")
    print(table([row for row in rows.values() if row["model"] in known]))


def _lost(share: float | str) -> str:
    if isinstance(share, str):
        return share[:80]
    return f"{100 * share:.1g} %" if share <= _LOSS else f"**{100 * share:.0f} %**"


def table(rows: list[dict[str, Any]]) -> str:
    """One line for each family that could be built, the counts, and the families that have no tiny model."""
    names = ["family", *_PARTS, "parameters / MACs that may leave", "removal = masking", "opened by", "relevance lost"]
    lines = [f"| {' | '.join(names)} | what stays, and why |", "|" + "---|" * (len(names) + 1)]
    built = sorted((row for row in rows if "unbuilt" not in row), key=lambda row: str(row["model"]))
    for row in built:
        found = row.get("parts", {})
        shares = [f"{found[p][0]} of {found[p][1]}" if p in found else "" for p in _PARTS]
        if "error" in row:
            cells = [*shares, "", "**error**", "", "", row["error"]]
        else:
            why = dict.fromkeys(f"{part}: {found[part][2]}" for part in _PARTS if part in found and found[part][2])
            free = " / ".join(f"{100 * share:.0f} %" for share in row["free"])
            gap = f"{row['gap']:.0e}" if row["gap"] < _ROUNDING else f"**{row['gap']:.0e}**"
            cells = [*shares, free, gap, row["reload"], _lost(row["relevance"]), "; ".join(why)]
        lines.append(f"| {row['model']} | {' | '.join(text.replace('|', '/')[:220] for text in cells)} |")
    good = sum(bool(row.get("ok")) for row in built)
    kept = [row for row in built if isinstance(row.get("relevance"), float)]
    conserved = sum(row["relevance"] <= _LOSS for row in kept)
    lines += [
        "",
        f"{good} of {len(built)} families pass: removal equals masking on all three inputs, and the saved folder opens "
        "with equal outputs. This says nothing about relevance.",
        f"Relevance can be computed in {len(kept)} of {sum('relevance' in row for row in built)} families, and is "
        f"conserved (at most {100 * _LOSS:g} % lost) in {conserved} of these.",
        *(
            f"{sum(part in row.get('parts', {}) and row['parts'][part][0] > 0 for row in built)} of "
            f"{sum(part in row.get('parts', {}) for row in built)} families that have {part} can lose some."
            for part in _PARTS
        ),
    ]
    unbuilt = sorted((row for row in rows if "unbuilt" in row), key=lambda row: str(row["model"]))
    lines += ["", f"{len(unbuilt)} families have no tiny model here:", ""]
    lines += [f"- {row['model']}: {row['unbuilt'][:160].replace('[', chr(92) + '[')}" for row in unbuilt]
    return "\n".join(lines)
