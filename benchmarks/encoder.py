"""Sentence encoders without training afterwards: MiniLM on sentence similarity and, fine-tuned, on SST-2.

    python -m benchmarks.encoder train --model minilm --data DATA --classifier FOLDER     # resumable, 3 epochs
    python -m benchmarks.encoder sts --model minilm --data DATA --out results.jsonl
    python -m benchmarks.encoder sst2 --model FOLDER --data DATA --out results.jsonl
    python -m benchmarks.encoder sts --out results.jsonl --table

DATA has sst2_{train,dev,test}.tsv (sentence, class), SICK_{train,test}.txt and sts_2014_*.tsv (score, two sentences).
Similarity is Spearman's correlation of the cosine of mean-pooled states with the scores, on SICK's test pairs and, for
each part of STS 2014, in the mean. Scored and repaired with sentences of the training sets. Each setting that is not in
the results yet is measured; results are kept line by line.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import secateur as sc
from benchmarks.language import limits_for
from secateur.criteria import LRP, Taylor
from secateur.loop import Schedule
from secateur.repair import Repair

BATCH = 32
#: Two sentences, and how similar they are.
Pair = tuple[str, str, float]


# -- data --------------------------------------------------------------------------------------------------------------
def labelled(path: Path) -> tuple[list[str], Tensor]:
    """Sentences and their classes."""
    with path.open(newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [row[0] for row in rows], torch.tensor([int(row[1]) for row in rows])


def by_length(encoded: list[list[int]], size: int) -> list[list[int]]:
    """Indices in batches of similar length."""
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))
    return [order[i : i + size] for i in range(0, len(order), size)]


def padded(encoded: list[list[int]], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    longest = max(map(len, encoded))
    ids = torch.tensor([e + [0] * (longest - len(e)) for e in encoded], device=device)
    mask = torch.tensor([[1] * len(e) + [0] * (longest - len(e)) for e in encoded], device=device)
    return {"input_ids": ids, "attention_mask": mask}


# -- fine-tuning on SST-2 ----------------------------------------------------------------------------------------------
def accuracy(model: nn.Module, encoded: list[list[int]], classes: Tensor) -> float:
    right, device = 0, next(model.parameters()).device
    with torch.no_grad():
        for index in by_length(encoded, 256):
            answer = model(**padded([encoded[i] for i in index], device)).logits.argmax(-1).cpu()
            right += int((answer == classes[index]).sum())
    return right / len(classes)


def train(given: argparse.Namespace) -> None:
    """AdamW, linear warm-up and decay, on the upper layers; those below are run once. Ends after `minutes`; the next
    call goes on."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    torch.manual_seed(0)
    model = (
        AutoModelForSequenceClassification.from_pretrained(given.model, num_labels=2, dtype=torch.float32)
        .to(device)
        .eval()
    )
    sentences, classes = labelled(given.data / "sst2_train.tsv")
    encoded = tokenizer(sentences, truncation=True, max_length=64)["input_ids"]
    upper = model.bert.encoder.layer[given.frozen :]
    lower = _states(model, encoded, given)
    learnt = [*upper.parameters(), *model.bert.pooler.parameters(), *model.classifier.parameters()]
    optimizer = torch.optim.AdamW(learnt, weight_decay=0.01)
    steps_per_epoch = -(-len(encoded) // BATCH)
    steps, done, saved = given.epochs * steps_per_epoch, 0, given.classifier / "state.pt"
    if saved.exists():
        state = torch.load(saved, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    begin = time.perf_counter()
    while done < steps and time.perf_counter() - begin < 60 * given.minutes:
        epoch, place = divmod(done, steps_per_epoch)
        order = torch.randperm(len(encoded), generator=torch.Generator().manual_seed(epoch)).tolist()
        parts = [order[i : i + 16 * BATCH] for i in range(0, len(order), 16 * BATCH)]
        index = [batch for part in parts for batch in _sorted(part, encoded)][place]
        for group in optimizer.param_groups:
            group["lr"] = given.rate * min(1, 10 * (done + 1) / steps) * (1 - done / steps)
        model.train()
        torch.manual_seed(done)
        with torch.autocast(device, torch.bfloat16):
            x = nn.utils.rnn.pad_sequence([lower[i].to(device) for i in index], batch_first=True)
            mask = padded([encoded[i] for i in index], device)["attention_mask"][:, None, None] > 0
            for layer in upper:
                x = layer(x, mask)
            logits = model.classifier(model.dropout(model.bert.pooler(x)))
        loss = nn.functional.cross_entropy(logits.float(), classes[index].to(device))
        if not bool(torch.isfinite(loss)):
            raise SystemExit(f"the loss is {float(loss)} at step {done}")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        done += 1
        if done % 50 == 0:
            print(f"step {done} of {steps}: loss {float(loss):.3f}, {time.perf_counter() - begin:.0f} s", flush=True)
    given.classifier.mkdir(parents=True, exist_ok=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done}, saved)
    model.eval()
    model.save_pretrained(given.classifier)
    tokenizer.save_pretrained(given.classifier)
    sentences, classes = labelled(given.data / "sst2_dev.tsv")
    print(f"step {done}: dev accuracy {accuracy(model, tokenizer(sentences)['input_ids'], classes):.2%}")


def _states(model: Any, encoded: list[list[int]], given: argparse.Namespace) -> list[Tensor]:
    """What the lower layers, which are not trained, give for each sentence; kept in a file."""
    place = given.classifier / "lower.pt"
    if place.exists():
        return torch.load(place, weights_only=True)  # type: ignore[no-any-return]
    found: list[Any] = [None] * len(encoded)
    device = next(model.parameters()).device
    with torch.no_grad():
        for index in by_length(encoded, 64):
            batch = padded([encoded[i] for i in index], device)
            x, mask = model.bert.embeddings(batch["input_ids"]), batch["attention_mask"][:, None, None] > 0
            for layer in model.bert.encoder.layer[: given.frozen]:
                x = layer(x, mask)
            for i, row in zip(index, x.cpu(), strict=True):
                found[i] = row[: len(encoded[i])].clone()
    place.parent.mkdir(parents=True, exist_ok=True)
    torch.save(found, place)
    return found


def _sorted(indices: list[int], encoded: list[list[int]]) -> list[list[int]]:
    """A part of the data in batches of similar length, so that little is padding."""
    indices = sorted(indices, key=lambda i: len(encoded[i]))
    return [indices[i : i + BATCH] for i in range(0, len(indices), BATCH)]


# -- sentence similarity -----------------------------------------------------------------------------------------------
def pairs_in(data: Path) -> dict[str, list[Pair]]:
    """Pairs of sentences with their scores: SICK, and the parts of STS 2014."""
    rows = [line.split("\t") for line in (data / "SICK_test.txt").read_text().splitlines()[1:]]
    found = {"sick": [(row[1], row[2], float(row[3])) for row in rows]}
    for path in sorted(data.glob("sts_2014_*.tsv")):
        parts = [line.split("\t") for line in path.read_text().splitlines()]
        found[path.stem] = [(row[1], row[2], float(row[0])) for row in parts if row[0]]
    return found


def ranks(values: Tensor) -> Tensor:
    """From 1, the mean where several are equal."""
    _, place, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2)[place].double()


def similarity(model: nn.Module, ids: dict[str, list[int]], sets: dict[str, list[Pair]]) -> dict[str, float]:
    """Spearman's correlation in per cent: on SICK, and the mean over the parts of STS 2014."""
    device, found = next(model.parameters()).device, dict[str, float]()
    for name, rows in sets.items():
        sentences = sorted({sentence for row in rows for sentence in row[:2]})
        encoded = [ids[sentence] for sentence in sentences]
        place = {sentence: i for i, sentence in enumerate(sentences)}
        embedded: Any = [None] * len(sentences)
        with torch.no_grad():
            for index in by_length(encoded, 256):
                batch = padded([encoded[i] for i in index], device)
                mask = batch["attention_mask"].unsqueeze(-1)
                pooled = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
                for i, row in zip(index, nn.functional.normalize(pooled, dim=-1).cpu(), strict=True):
                    embedded[i] = row
        table = torch.stack(embedded)
        cosine = (table[[place[a] for a, _, _ in rows]] * table[[place[b] for _, b, _ in rows]]).sum(1)
        both = torch.stack([ranks(cosine), ranks(torch.tensor([score for _, _, score in rows]))])
        found[name] = 100 * float(torch.corrcoef(both)[0, 1])
    parts = [value for name, value in found.items() if name != "sick"]
    return {"sick": found["sick"], **({"sts14": sum(parts) / len(parts)} if parts else {})}


def errors_by_word(model: nn.Module, small: nn.Module, data: Any, ids: dict[str, list[int]], sets: Any) -> str:
    """Markdown: for every set the median error of a token's state, squared and relative, by whether the data have the
    token, and the share of tokens that they have not."""
    known = torch.cat([x["input_ids"][x["attention_mask"] > 0] for x, _ in data]).unique()
    lines = ["| texts | tokens that the data lack | error, others | error, these |", "|---|---|---|---|"]
    for name, rows in sets.items():
        encoded, found, new = [ids[row[0]] for row in rows[:: max(1, len(rows) // 100)]], [], []
        with torch.no_grad():
            for index in by_length(encoded, 32):
                batch = padded([encoded[i] for i in index], known.device)
                here = batch["attention_mask"] > 0
                state, other = (net(**batch).last_hidden_state[here] for net in (model, small))
                found.append((state - other).square().sum(-1) / state.square().sum(-1))
                new.append(~torch.isin(batch["input_ids"][here], known))
        error, lacking = torch.cat(found), torch.cat(new)
        sides = " | ".join(f"{float(error[side].median()):.2f}" for side in (~lacking, lacking))
        lines.append(f"| {name} | {100 * float(lacking.float().mean()):.0f} % | {sides} |")
    return "\n".join(lines)


def signs(output: Any, targets: Any) -> Tensor:
    """A random projection of the states, as a loss for criteria by gradients: there are no classes."""
    states = output if isinstance(output, Tensor) else output.last_hidden_state
    flips = torch.randint(0, 2, states.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return (states * flips.to(states)).sum() / len(states)


# -- settings ----------------------------------------------------------------------------------------------------------
def criteria(task: str) -> dict[str, Any]:
    """Each by a name for the table."""
    loss = {"loss": signs} if task == "sts" else {}
    return {
        "default": "lrp",
        "lrp, |sum|": LRP(absolute="after"),
        "lrp, start 1": LRP(start="one"),
        "taylor": Taylor(**loss),
        "taylor, squares": Taylor(norm=None, absolute="square", **loss),
        "activation": "activation",
        "weight": "weight",
        "random": "random",
    }


def settings(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for share in given.shares:
        for seed in range(given.seeds):
            for name in given.criteria:
                for scope in given.scopes:
                    for repair in given.repairs:
                        yield {
                            "task": given.task, "left": share, "criterion": name, "scope": scope, "repair": repair,
                            "of": given.of, "only": given.only, "samples": given.samples, "seed": seed,
                        }  # fmt: skip


def repair_named(name: str) -> Repair | str | None:
    """None, a method, or a setting of a repair such as "relevance 0.5" or "copies 0"."""
    words = name.split()
    if len(words) == 2:
        number = float(words[1]) if words[0] == "relevance" else int(words[1])
        return Repair(**{words[0]: number})  # type: ignore[arg-type]
    return None if name == "none" else name


def body(model: nn.Module) -> int:
    return sum(p.numel() for name, p in model.named_parameters() if "embeddings" not in name)


def opened(given: argparse.Namespace, device: str) -> tuple[Any, Callable[[int], Any], Callable[[nn.Module], Any]]:
    """The model, the data to prune it with by seed, and what measures it."""
    from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    if given.task == "sts":
        model = AutoModel.from_pretrained(given.model, add_pooling_layer=False, dtype=torch.float32)
        rows = [line.split("\t") for line in (given.data / "SICK_train.txt").read_text().splitlines()[1:]]
        sentences, classes = sorted({s for row in rows for s in row[1:3]}), None
        sets = pairs_in(given.data)
        texts = sorted({sentence for rows in sets.values() for row in rows for sentence in row[:2]})
        known = dict(zip(texts, tokenizer(texts, truncation=True, max_length=128)["input_ids"], strict=True))
        judge: Any = partial(similarity, ids=known, sets=sets)
    else:
        model = AutoModelForSequenceClassification.from_pretrained(given.model, dtype=torch.float32)
        sentences, classes = labelled(given.data / "sst2_train.tsv")
        texts, right = labelled(given.data / "sst2_test.tsv")
        others, answers = labelled(given.data / "sst2_dev.tsv")
        ids, more = tokenizer(texts)["input_ids"], tokenizer(others)["input_ids"]
        judge = lambda net: {  # noqa: E731
            "accuracy": 100 * accuracy(net, ids, right), "dev": 100 * accuracy(net, more, answers)
        }  # fmt: skip
    encoded = tokenizer(sentences, truncation=True, max_length=64)["input_ids"]

    def drawn(seed: int) -> Any:
        order = torch.randperm(len(encoded), generator=torch.Generator().manual_seed(seed)).tolist()
        if classes is not None:  # as many of each class
            half = given.samples // 2
            order = [i for c in (0, 1) for i in [j for j in order if int(classes[j]) == c][:half]]
        chosen = order[: given.samples]
        batches = by_length([encoded[i] for i in chosen], 32)
        parts = [[chosen[i] for i in batch] for batch in batches]
        return [
            (padded([encoded[i] for i in part], device), None if classes is None else classes[part].to(device))
            for part in parts
        ]

    return model.to(device).eval(), drawn, judge


def study(given: argparse.Namespace) -> None:
    done = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    if given.table:
        print(table([row for row in done if row["task"] == given.task]))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, drawn, judge = opened(given, device)
    whole, inner = sum(p.numel() for p in model.parameters()), body(model)
    if not given.words and not any(row["left"] == 1 and row["task"] == given.task for row in done):
        none = dict.fromkeys(("criterion", "scope", "repair", "only", "of"), "")
        _keep({"task": given.task, "left": 1, **none, "samples": 0, "seed": 0, **judge(model)}, done, given.out)
    for setting in settings(given):
        if any(all(row.get(k) == v for k, v in setting.items()) for row in done):
            continue
        begin = time.perf_counter()
        share = setting["left"] if given.of == "all" else (whole - inner + setting["left"] * inner) / whole
        try:
            small = sc.prune(
                model,
                drawn(setting["seed"]),
                criteria(given.task)[setting["criterion"]],
                keep={"params": share},
                schedule=Schedule(one_shot=True, rescore=False),
                limits=limits_for(setting["scope"], setting["only"]),
                repair=repair_named(setting["repair"]),
                memory=given.memory,
                progress=False,
            ).model
        except sc.SecateurError as error:
            print(setting, type(error).__name__, error, flush=True)
            continue
        if given.words:
            print(setting, errors_by_word(model, small, drawn(setting["seed"]), **judge.keywords), sep="\n", flush=True)
            continue
        seconds = time.perf_counter() - begin
        left = {"body": body(small) / inner, "whole": sum(p.numel() for p in small.parameters()) / whole}
        _keep({**setting, **judge(small), **left, "seconds": seconds}, done, given.out)


def _keep(row: dict[str, Any], done: list[dict[str, Any]], out: Path) -> None:
    done.append(row)
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line per setting, a column per share; means over draws."""
    shares = sorted({row["left"] for row in rows}, reverse=True)
    lines = ["| criterion | ranking | samples | repair | " + " | ".join(f"{100 * s:.0f} %" for s in shares) + " |"]
    lines.append("|---" * (4 + len(shares)) + "|")
    names = ("criterion", "scope", "only", "samples", "repair", "of")
    for key in dict.fromkeys(tuple(row[n] for n in names) for row in rows):
        cells = []
        for share in shares:
            own = [row for row in rows if tuple(row[n] for n in names) == key and row["left"] == share]
            found = [[row[m] for row in own] for m in ("sick", "sts14", "accuracy", "dev") if own and m in own[0]]
            cells.append(" / ".join(_mean(values) for values in found))
        where = key[1] + (f", {key[2]}" if key[2] else "")
        where += f", {key[5]}" if key[5] == "all" else ""
        lines.append(f"| {key[0]} | {where} | {key[3]} | {key[4]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _mean(values: list[float]) -> str:
    """The mean, and with several draws their standard deviation."""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["train", "sts", "sst2"])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--classifier", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--frozen", type=int, default=3, help="layers that are not trained")
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--words", action="store_true", help="for sts: errors by whether a word was among the samples")
    parser.add_argument("--samples", type=int, help="sentences to prune with; default 256, for sst2 32")
    parser.add_argument("--seeds", type=int, default=1, help="how many draws of them")
    parser.add_argument("--shares", type=float, nargs="+", help="default 0.75 0.5; for sst2 0.6")
    parser.add_argument("--criteria", nargs="+", default=["default"])
    parser.add_argument("--scopes", nargs="+", default=["default"])
    parser.add_argument("--repairs", nargs="+", default=["best", "none"])
    parser.add_argument("--memory", help='what a run may take, such as "4 GiB", if several share a device')
    parser.add_argument("--only", default="")
    parser.add_argument("--of", choices=["body", "all"], default="body", help="what shares are of")
    given = parser.parse_args()
    given.samples = given.samples or (32 if given.task == "sst2" else 256)
    given.shares = given.shares or ([0.6] if given.task == "sst2" else [0.75, 0.5])
    warnings.simplefilter("ignore")
    if given.task == "train":
        train(given)
    else:
        study(given)


if __name__ == "__main__":
    main()
