"""Damage saved models, folders for transformers, checkpoints, run.json and weights, and see what loading makes of them.

    python -m benchmarks.fuzz_files --cases 20000          # about ten minutes on two cores
    python -m benchmarks.fuzz_files --cases 400 --seed 1   # a taste of it

Every damaged file must end in an error of ours, or in the same result as the undamaged one. What must not happen:

- silent: another result, without an error;
- foreign: an error that is not ours;
- slow: more than 5 s; large: more than 1 GB of memory on top.

"Resealed" files are those of a hostile author: their JSON is changed, and the digest fits again. Such a file may mean
another model, and a plain weights file has no digest; there, other numbers are not counted as silent.

A case is drawn from (seed, number), so that each can be repeated alone: `--only NUMBER`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import secateur as sc
from secateur.cli.output import Printer
from secateur.cli.run_folder import Run
from secateur.files.pretrained_folder import with_digests
from secateur.models.weights import read_weights
from secateur.plans import Limits
from secateur.running.tensor_files import read_sealed, sealed

SECONDS, BYTES = 5, 2**30
_EXTREMES: list[Any] = [
    None, True, -1, 0, 1, 2**31, -(2**31), 2**63, 10**30, 0.5, -0.0, 1e308, "", "x", "0", "\x1b[2J", [], [[]], {},
    {"": 0}, float("nan"), float("inf"), "a" * 10_000, list(range(1000)), {str(i): i for i in range(1000)},
]  # fmt: skip


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    ).eval()  # fmt: skip


def data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(12, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 4


class _Stop(BaseException):
    """Too slow. Not an Exception, which the code under test may catch."""


def prune(path: Path, stop_at: int | None = None) -> nn.Module:
    """A run with a checkpoint; it can be stopped while it measures a step."""
    seen = [0]

    def evaluate(model: nn.Module) -> float:
        seen[0] += 1
        if stop_at is not None and seen[0] > stop_at:
            raise KeyboardInterrupt
        return 0.5

    return sc.prune(
        network(), data(), "lrp", remove=0.45, schedule=0.15, evaluate=evaluate, checkpoint=path, progress=False
    ).model


# -- what is damaged ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Kind:
    """Files, the name of each that may be damaged, and what is read from them as numbers that must stay the same.

    `harm` is another damage than that of bytes. `guarded` files have a digest.
    """

    name: str
    files: tuple[str, ...]
    make: Callable[[Path], None]
    read: Callable[[Path], list[torch.Tensor]]
    guarded: bool = True
    harm: Callable[[Path, random.Random], None] | None = None

    @property
    def folder(self) -> str:
        return self.name.replace(" ", "-")


def _make_folder(place: Path) -> None:
    net, (x, y) = network(), data()
    graph = sc.analyze(net, x[:1])
    sc.save(sc.apply(net, sc.plan(graph, sc.score(net, (x, y), "lrp", graph=graph), remove=0.4)), place / "saved")


def _read_folder(place: Path) -> list[torch.Tensor]:
    small = sc.load(place / "saved", network())
    return [small(data()[0]), *small.state_dict().values()]


def _make_checkpoint(place: Path) -> None:
    try:
        prune(place / "run.safetensors", stop_at=3)
    except KeyboardInterrupt:
        return
    raise AssertionError("the run should have been stopped")


def _read_checkpoint(place: Path) -> list[torch.Tensor]:
    return list(prune(place / "run.safetensors").state_dict().values())


def _make_weights(place: Path) -> None:
    import safetensors.torch

    safetensors.torch.save_file(network().state_dict(), place / "w.safetensors")


def _read_weights(place: Path) -> list[torch.Tensor]:
    found = read_weights(place / "w.safetensors")
    return [found[name] for name in sorted(found)]


_ASKED = {"command": "prune", "model": "net.py:make", "remove": 0.4, "outputs": ["a", "b"], "view": {"size": 8}}


def _make_run(place: Path) -> None:
    _make_checkpoint(place)
    (place / "run.safetensors").rename(place / "checkpoint.safetensors")
    note = {"asked": _ASKED, "finished": False, "files": {"model": "model", "report": "report.html"}}
    (place / "run.json").write_text(json.dumps(note))


def _read_run(place: Path) -> list[torch.Tensor]:
    """A run may only go on if its note says that the same was asked for."""
    note = (place / "run.json").read_text(encoding="utf-8", errors="replace")
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        printer = Printer(as_json=True)
        printer.err.file = nowhere
        Run.begin(place, _ASKED, fresh=False, printer=printer).end({})
    return [torch.tensor(json.loads(note)["asked"].get(key) == value) for key, value in _ASKED.items()]


def _reseal_folder(place: Path, draw: random.Random) -> None:
    plan, weights = place / "saved" / "plan.json", place / "saved" / "model.safetensors"
    text, (state, seal, _) = _json_value(plan.read_bytes(), draw), read_sealed(weights)
    plan.write_bytes(text)
    digest = hashlib.sha256(text).hexdigest()
    weights.write_bytes(sealed(state, json.dumps({**json.loads(seal), "plan": digest})))


def _reseal_checkpoint(place: Path, draw: random.Random) -> None:
    path = place / "run.safetensors"
    tensors, text, _ = read_sealed(path)
    path.write_bytes(sealed(tensors, _json_value(text.encode(), draw).decode()))


_IDS = torch.arange(18).reshape(2, 9) * 5 % 32


def _make_llama(place: Path, **limits: Any) -> None:
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, use_cache=False)
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(place / "original")  # the generation config is copied from there
    model = transformers.LlamaForCausalLM.from_pretrained(place / "original")
    chosen = Limits(only="*.mlp.*", **limits)
    result = sc.prune(model, [({"input_ids": _IDS}, None)], "random", remove=0.3, limits=chosen, progress=False)
    result.save_pretrained(place / "hf")
    shutil.rmtree(place / "original")


def _make_uniform(place: Path) -> None:
    _make_llama(place, uniform=True)


def _make_per_layer(place: Path) -> None:
    _make_llama(place, scope="global")
    assert (place / "hf" / "plan.json").is_file()


def _read_hf(place: Path) -> list[torch.Tensor]:
    """Logits, weights, and the settings for generating, as numbers."""
    model: Any = sc.load(place / "hf")
    with torch.no_grad():
        logits = model(input_ids=_IDS, return_dict=True).logits
    settings = torch.frombuffer(bytearray(model.generation_config.to_json_string().encode()), dtype=torch.uint8)
    return [logits, *model.state_dict().values(), settings]


def reseal_hf(folder: Path, changed: Mapping[str, bytes]) -> None:
    """Change files, and make all digests fit again."""
    files = {file.name: file.read_bytes() for file in folder.iterdir()} | changed
    if "plan.json" in files:
        state, seal, _ = read_sealed(folder / "model.safetensors")
        digest = hashlib.sha256(files["plan.json"]).hexdigest()
        files["model.safetensors"] = sealed(state, json.dumps({**json.loads(seal), "plan": digest}))
    config = json.loads(files["config.json"])
    if isinstance(config, dict) and isinstance(note := config.pop("secateur", None), dict):
        kept = {key: value for key, value in note.items() if key not in ("files", "digest")}
        files["config.json"] = with_digests(config, kept, files)
    for name, raw in files.items():
        (folder / name).write_bytes(raw)


def _reseal_hf(place: Path, draw: random.Random) -> None:
    names = ["config.json"] * 4 + ["generation_config.json", "plan.json", "model.safetensors"]
    target = place / "hf" / draw.choice(names)
    if not target.is_file() or (target.name == "model.safetensors" and (place / "hf" / "plan.json").is_file()):
        target = place / "hf" / "config.json"
    reseal_hf(place / "hf", {target.name: _json_value(target.read_bytes(), draw)})


_HF = ("hf/config.json", "hf/generation_config.json", "hf/model.safetensors")
KINDS = [
    Kind("saved model", ("saved/plan.json", "saved/model.safetensors"), _make_folder, _read_folder),
    Kind("checkpoint", ("run.safetensors",), _make_checkpoint, _read_checkpoint),
    Kind("run.json", ("run.json",), _make_run, _read_run),
    Kind("weights", ("w.safetensors",), _make_weights, _read_weights, guarded=False),
    Kind("resealed model", (), _make_folder, _read_folder, False, _reseal_folder),
    Kind("resealed checkpoint", (), _make_checkpoint, _read_checkpoint, False, _reseal_checkpoint),
    Kind("uniform folder", _HF, _make_uniform, _read_hf),
    Kind("per-layer folder", (*_HF, "hf/plan.json"), _make_per_layer, _read_hf),
    Kind("resealed uniform", (), _make_uniform, _read_hf, False, _reseal_hf),
    Kind("resealed per-layer", (), _make_per_layer, _read_hf, False, _reseal_hf),
]


# -- how ---------------------------------------------------------------------------------------------------------------
def damaged(raw: bytes, draw: random.Random) -> bytes:
    """One damage, or a few at once."""
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        raw = draw.choice(_DAMAGES)(raw, draw)
    return raw


def _flip(raw: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(max(len(raw), 1))
    return raw[:at] + bytes([raw[at] ^ (1 << draw.randrange(8))]) + raw[at + 1 :] if raw else raw


def _header_flip(raw: bytes, draw: random.Random) -> bytes:
    return _flip(raw[:64], draw) + raw[64:]


def _cut(raw: bytes, draw: random.Random) -> bytes:
    return raw[: draw.randrange(len(raw) + 1)]


def _drop(raw: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(raw) + 1)
    return raw[:at] + raw[at + draw.choice([1, 2, 8, 100]) :]


def _insert(raw: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(raw) + 1)
    return raw[:at] + draw.randbytes(draw.choice([1, 8, 300])) + raw[at:]


def _repeat(raw: bytes, draw: random.Random) -> bytes:
    at, size = draw.randrange(len(raw) + 1), draw.choice([4, 64, 1000])
    return raw[: at + size] + raw[at:]


def _json_value(raw: bytes, draw: random.Random) -> bytes:
    """Another value somewhere in the JSON of a file: all of a text file, or the header of a safetensors file."""
    binary = not raw.startswith(b"{")
    length = int.from_bytes(raw[:8], "little") if binary else len(raw)
    head, rest = (raw[8 : 8 + length], raw[8 + length :]) if binary else (raw, b"")
    try:
        tree = json.loads(head)
    except (ValueError, RecursionError):
        return _flip(raw, draw)
    tree = _changed(tree, draw)
    new = json.dumps(tree).encode()
    return len(new).to_bytes(8, "little") + new + rest if binary else new


def _changed(tree: Any, draw: random.Random) -> Any:
    if isinstance(tree, str) and tree[:1] in "{[" and draw.random() < 0.9:  # JSON inside JSON
        try:
            return json.dumps(_changed(json.loads(tree), draw))
        except (ValueError, RecursionError):
            return draw.choice(_EXTREMES)
    if isinstance(tree, dict) and tree and draw.random() < 0.9:
        key = draw.choice(list(tree))
        if draw.random() < 0.1:
            return {k: v for k, v in tree.items() if k != key}
        return {**tree, key: _changed(tree[key], draw)}
    if isinstance(tree, list) and tree and draw.random() < 0.9:
        at = draw.randrange(len(tree))
        return [*tree[:at], _changed(tree[at], draw), *tree[at + 1 :]]
    if isinstance(tree, int) and draw.random() < 0.5:
        return tree + draw.choice([-1, 1, 2, -tree])
    return draw.choice(_EXTREMES)


_DAMAGES = [_flip, _flip, _flip, _header_flip, _cut, _drop, _insert, _repeat, _json_value, _json_value, _json_value]


# -- one case ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Found:
    number: int
    kind: str
    ending: str
    detail: str
    seconds: float


def case(number: int, seed: int, kind: Kind, place: Path, wanted: list[torch.Tensor]) -> Found:
    draw = random.Random(seed * 1_000_003 + number)
    if kind.harm is not None:
        kind.harm(place, draw)
    else:
        target = place / draw.choice(kind.files)
        target.write_bytes(damaged(target.read_bytes(), draw))
    begin = time.perf_counter()
    ending, detail = "named", ""
    signal.setitimer(signal.ITIMER_REAL, 2 * SECONDS)
    try:
        found = kind.read(place)
        ending = "identical" if _same(found, wanted) else "SILENT" if kind.guarded else "other numbers"
    except sc.SecateurError:
        pass
    except _Stop:
        ending = "SLOW"
    except MemoryError:
        ending = "LARGE"
    except BaseException as error:
        ending, detail = "FOREIGN", f"{type(error).__name__}: {error}"[:300]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    seconds = time.perf_counter() - begin
    if seconds > SECONDS and ending != "SLOW":
        ending, detail = "SLOW", f"{ending} after {seconds:.1f} s"
    return Found(number, kind.name, ending, detail, seconds)


def _same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, wanted, strict=True)
    )


def _alarm(*_: object) -> None:
    raise _Stop


def work(job: tuple[list[int], int, str]) -> list[Found]:
    """Some cases in a process of its own, with its own copies of the files."""
    numbers, seed, originals = job
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _alarm)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        prepared = {}
        for kind in KINDS:
            here = Path(folder) / kind.folder
            shutil.copytree(Path(originals) / kind.folder, here)
            prepared[kind.name] = kind.read(here)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
        for number in numbers:
            kind = KINDS[number % len(KINDS)]
            here = Path(folder) / kind.folder
            shutil.rmtree(here)
            shutil.copytree(Path(originals) / here.name, here)
            found.append(case(number, seed, kind, here, prepared[kind.name]))
    return found


def chunks(numbers: list[int], size: int) -> Iterator[list[int]]:
    for begin in range(0, len(numbers), size):
        yield numbers[begin : begin + size]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one case by its number, with its error")
    parser.add_argument("--kinds", nargs="+", help="only these, as in the table")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    numbers = [args.only] if args.only is not None else list(range(args.cases))
    numbers = [n for n in numbers if not args.kinds or KINDS[n % len(KINDS)].name in args.kinds]
    counts: Counter[tuple[str, str]] = Counter()
    bad: list[Found] = []
    with tempfile.TemporaryDirectory() as originals:
        for kind in KINDS:
            place = Path(originals) / kind.folder
            place.mkdir()
            kind.make(place)
        jobs = [(part, args.seed, originals) for part in chunks(numbers, 100)]
        with multiprocessing.get_context("fork").Pool(args.workers) as pool:
            for part in pool.imap_unordered(work, jobs):
                for found in part:
                    counts[found.kind, found.ending] += 1
                    if found.ending.isupper():
                        bad.append(found)
    endings = ["identical", "named", "other numbers", "SILENT", "FOREIGN", "SLOW", "LARGE"]
    print(f"| {len(numbers)} damaged files | " + " | ".join(endings) + " |\n|---|" + "---|" * len(endings))
    for kind in KINDS:
        print(f"| {kind.name} | " + " | ".join(str(counts[kind.name, ending]) for ending in endings) + " |")
    for found in bad[:40]:
        print(f"case {found.number} ({found.kind}): {found.ending} {found.detail} ({found.seconds:.1f} s)")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
