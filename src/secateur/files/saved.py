"""Saving and loading smaller models: safetensors and JSON in one folder. Loading never executes code."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from secateur import atomic
from secateur.arguments import check_path
from secateur.errors import FileFormatError, PlanError, SecateurError
from secateur.files.architecture import note_of
from secateur.files.fingerprint import answer, answer_gap, differences, settings
from secateur.files.formats import formats_of, take_formats
from secateur.files.pretrained_folder import build_from
from secateur.plans.plan import Plan
from secateur.running.copies import unwrap
from secateur.running.sandbox import leaves_no_trace
from secateur.running.tensor_files import fill, parse_json, read_sealed, sealed
from secateur.surgery.cut import cut
from secateur.surgery.provenance import provenance_of, remember, remember_inputs

WEIGHTS, PLANS = "model.safetensors", "plan.json"
FORMAT = "secateur-model-1"
_LARGEST_PLAN, _MOST_PLANS = 64 * 2**20, 1000  # limits on what a file can make us use
# What hostile plans can raise while a model is cut.
_DAMAGE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_OURS = re.compile(rb'\s*\{\s*"format":\s*"secateur-model-')


@leaves_no_trace
def save(result: Any, path: str | os.PathLike[str], *, about: Mapping[str, Any] | None = None) -> None:
    """Write a pruned model (or a `Result`) to a folder: `model.safetensors` and `plan.json`.

    A model that was saved there before is replaced: whoever loads, even after a crash, gets the old one or the new. A
    folder with anything else in it is refused. `about` is a note in JSON types, read back by the function `about`. The
    command line uses it for where the model came from.
    """
    if isinstance(result, str | os.PathLike):
        raise SecateurError(
            f"save takes the model first, like torch.save, but got the path {os.fspath(result)!r}.",
            fix="sc.save(result, path)",
        )
    check_path("path", path, "the folder to write, as in sc.save(result, path)")
    model = result if isinstance(result, nn.Module) else getattr(result, "model", None)
    if not isinstance(model, nn.Module):
        raise SecateurError(f"cannot save a {type(result).__name__}.", fix="give a pruned module or a Result")
    folder = Path(path)
    check_replaceable(folder)
    timed = measured_with(result)
    files = saved_files(unwrap(model), {**timed, **(about or {})} if timed or about is not None else None)
    with atomic.naming_failures(folder):
        atomic.write_together(folder, files)


def measured_with(result: Any) -> dict[str, Any]:
    """For `about`: where a run measured its models, and how many seconds they took before and after, if it did."""
    where = getattr(result, "settings", {}).get("latency") if not isinstance(result, nn.Module) else None
    times = where and {**where, "before": result.cost_before.latency, "after": result.cost_after.latency}
    return {"latency": times} if times else {}


def in_json_types(about: Mapping[str, Any]) -> dict[str, Any]:
    """A note as it will be read back. Refuse what JSON cannot hold."""
    try:
        return dict(json.loads(json.dumps(dict(about))))
    except (TypeError, ValueError) as error:
        what = f"the note cannot be saved: {error}."
        raise SecateurError(what, where="about", value=about, fix="texts, numbers, lists and dicts") from error


def saved_files(model: nn.Module, about: Mapping[str, Any] | None = None) -> dict[str, bytes]:
    """What `save` writes, by the names of the files. The first one decides which of the others are valid."""
    origin = provenance_of(model)
    if not origin.plans:
        raise SecateurError(
            f"this {type(model).__name__} carries no plan: it was not made by secateur.apply, prune or load.",
            fix="for an unpruned model, use torch's state_dict and safetensors",
        )
    note = {"about": in_json_types(about)} if about is not None else {}
    known = {"settings": settings(model), "answer": answer(model, origin.inputs, origin.plans[-1].after.macs)}
    plans = [json.loads(plan.to_json()) for plan in origin.plans]
    kinds = {"buffers": formats} if (formats := formats_of(model)) else {}
    text = json.dumps({"format": FORMAT, **note, **kinds, "fingerprint": known, "plans": plans}).encode()
    if len(text) > _LARGEST_PLAN or len(plans) > _MOST_PLANS:
        raise SecateurError(
            f"the {len(plans)} plans of this model are too large for a file.", fix="save its state_dict"
        )
    own = _own_tensors(model)
    names = {id(tensor): name for name, tensor in reversed(own.items())}  # tied tensors once, by their first name
    state = {name: own[name].detach().contiguous().clone() for name in names.values()}
    weights = sealed(state, json.dumps({"format": FORMAT, "plan": hashlib.sha256(text).hexdigest()}))
    return {PLANS: text, WEIGHTS: weights}


def check_replaceable(folder: Path) -> None:
    """Raise unless a model may be saved there: nothing of the user's is ever removed or replaced."""
    why = ""
    with atomic.naming_failures(folder):
        if folder.name in ("", ".."):
            why = "is not a folder for one model"
        elif folder.is_symlink():
            why = "is a link"
        elif folder.exists() and not folder.is_dir():
            why = "is a file; a model is saved as a folder"
        elif folder.is_dir() and (others := _not_ours(folder)):
            more = f" and {len(others) - 3} more" if len(others) > 3 else ""
            why = f"holds what was not written by secateur ({', '.join(others[:3])}{more})"
    if why:
        fix = "the name of a new folder, or of one that holds only a saved model"
        raise SecateurError(f"{folder} {why}; nothing is saved.", where=folder, fix=fix)


def _not_ours(folder: Path) -> list[str]:
    """Names in a folder that are not part of a saved model."""
    there = {file.name: file for file in sorted(folder.iterdir())}
    plan = there.get(PLANS)
    ours = {file.name for name in (PLANS, WEIGHTS) for file in atomic.leftovers(folder / name)}
    if plan is not None and plan.is_file():
        with plan.open("rb") as file:
            ours |= {PLANS, WEIGHTS} if _OURS.match(file.read(100)) else set()
    return [name for name, file in there.items() if name not in ours or file.is_symlink() or not file.is_file()]


@leaves_no_trace
def load(path: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """Rebuild a saved model from a freshly built original (its weights do not matter).

    A folder of `Result.save_pretrained` needs no original: it is built from the folder's config, by transformers. Else
    the model is in the mode of the original, and a network that was just built is in training mode: call `eval()`.

    An original that is built differently (another stride or activation) is refused, even if all shapes fit: the
    settings of torch's modules and the output on fixed inputs are compared with what was saved.

    >>> import tempfile, torch, secateur as sc
    >>> def build(): return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    >>> net = build()
    >>> graph = sc.analyze(net, torch.zeros(1, 4))
    >>> small = sc.apply(net, sc.plan(graph, sc.score(net, None, "weight", graph=graph), remove=0.5))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sc.save(small, folder + "/small")
    ...     again = sc.load(folder + "/small", build())
    >>> bool((small(torch.ones(1, 4)) == again(torch.ones(1, 4))).all())
    True
    """
    if isinstance(path, nn.Module):
        raise SecateurError("load takes the path first, but got a model.", fix="sc.load(path, model)")
    check_path("path", path, "the folder that sc.save wrote")
    folder = Path(path)
    if model is None:
        model, complete = build_from(folder)
        model.eval()
        if complete:
            return model
    fresh = unwrap(model)
    data, state = _read(folder)
    plans = [Plan.from_data(item) for item in data["plans"]]
    small: nn.Module = fresh
    for plan in plans:
        try:
            bigger, small = small, cut(small, plan)
        except (PlanError, *_DAMAGE) as error:
            what = f"{folder} does not fit {type(model).__name__}: {error}"
            raise FileFormatError(what, where=folder) from error
        remember(small, bigger, plan)
    own = _own_tensors(small)
    for name, tensor in state.items():
        if name in own and own[name].is_floating_point() and tensor.is_floating_point():
            own[name].data = own[name].data.to(tensor.dtype)
    fill(own, state, folder, type(model).__name__)
    take_formats(small, data.get("buffers"), data.get("fingerprint"), folder / PLANS)
    _recognise(small, data.get("fingerprint"), folder)
    return small


def about(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The note that a model was saved with, also by `Result.save_pretrained`; empty if there was none."""
    note = (note_of(Path(path)) or _read_json(Path(path))[0]).get("about", {})
    return note if isinstance(note, dict) else {}


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with the tensors themselves, without what modules add that is no tensor."""
    return {name: item for name, item in model.state_dict(keep_vars=True).items() if isinstance(item, Tensor)}


def _recognise(model: nn.Module, known: Any, folder: Path) -> None:
    """Raise unless the rebuilt model has the settings and outputs of the saved one. Older files hold neither."""
    if known is None:
        return
    noted, said = (known.get("settings"), known.get("answer")) if isinstance(known, Mapping) else (None, None)
    if not isinstance(noted, Mapping) or not isinstance(said, Mapping | None):
        raise FileFormatError(f"{folder / PLANS} is damaged: its fingerprint cannot be read.", where=folder / PLANS)
    other = list(differences(noted, model, "is"))
    if not other and said is not None:
        gap = answer_gap(said, model)
        if gap is not None:
            others = differences(noted, model, "own")
            other = [f"its output on fixed inputs differs by {gap:.2g} of the largest", *others]
        else:
            remember_inputs(model, json.dumps(said.get("inputs")))
    if other:
        more = f" (and {len(other) - 3} more)" if len(other) > 3 else ""
        raise FileFormatError(
            f"{folder} was saved from a model that computes something else than this {type(model).__name__}, "
            f"although all shapes fit: {'; '.join(other[:3])}{more}.",
            where=folder,
            fix="build the model that was pruned, by the same code with the same settings",
        )


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Plans and tensors. If a model is saved there at this moment, it is the old one or the new."""
    while True:
        before = _stamps(folder)
        data, digest = _read_json(folder)
        try:
            return data, _read_weights(folder, digest)
        except FileFormatError:
            if _stamps(folder) == before:
                raise


def _stamps(folder: Path) -> list[tuple[int, int]]:
    """What changes when a file is replaced."""
    found = [path.stat() for path in (folder / PLANS, folder / WEIGHTS) if path.exists()]
    return [(stat.st_ino, stat.st_mtime_ns) for stat in found]


def _read_json(folder: Path) -> tuple[dict[str, Any], str]:
    path = folder / PLANS
    if not folder.exists():
        raise FileFormatError(f"there is no folder {folder}.", where=folder, fix="the one that sc.save wrote")
    if not folder.is_dir():
        raise FileFormatError(f"{folder} is a file; a model is a folder.", where=folder, fix=str(folder.parent))
    if not path.is_file():
        raise FileFormatError(f"{folder} is not a model saved by secateur: it has no {PLANS}", where=folder)
    try:
        if path.stat().st_size > _LARGEST_PLAN:
            raise ValueError("it is larger than any plan")
        raw = path.read_bytes()
        data = parse_json(raw)
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{path} is damaged: {error}", where=path) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("plans"), list):
        what = f"{path} was not written by this version of secateur (expected format {FORMAT!r})"
        raise FileFormatError(what, where=path)
    if not 1 <= len(data["plans"]) <= _MOST_PLANS:
        raise FileFormatError(f"{path} is damaged: it has {len(data['plans'])} plans.", where=path)
    return data, hashlib.sha256(raw).hexdigest()


def _read_weights(folder: Path, digest: str) -> dict[str, Tensor]:
    """The tensors that belong to the plan of that digest. A save that was killed left them under a staged name."""
    first: FileFormatError | None = None
    for path in atomic.candidates(folder / WEIGHTS):
        try:
            state, text, older = read_sealed(path)
            known = parse_json(text.encode()) if text else older
            if isinstance(known, dict) and (known.get("format"), known.get("plan")) == (FORMAT, digest):
                return state
            raise ValueError
        except ValueError:
            what = f"{folder}: {WEIGHTS} and {PLANS} do not belong together (one was edited or replaced)"
            first = first or FileFormatError(what, where=folder)
        except FileFormatError as error:
            first = first or error
    raise first or FileFormatError(f"{folder} is not a model saved by secateur: it has no {WEIGHTS}", where=folder)
