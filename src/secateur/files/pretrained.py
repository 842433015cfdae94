"""Folders of Hugging Face models: written so that stock `from_pretrained` loads them, wherever its config can say it.

A model with the same widths in all blocks is written with a plain `config.json`. One whose blocks differ is written
with its plan, for `secateur.load`: no config of transformers can describe it, and stock `from_pretrained` refuses it.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from secateur import atomic
from secateur.arguments import check_path
from secateur.errors import SecateurError, SecateurWarning
from secateur.files.architecture import CONFIG, compact, is_pretrained, note_of, plain_config, stock_config, was_pruned
from secateur.files.fingerprint import made_inputs
from secateur.files.pretrained_folder import GUARDED, with_digests
from secateur.files.saved import check_replaceable, in_json_types, saved_files
from secateur.nest import tensors_of_output
from secateur.running.copies import shared_copy, unwrap
from secateur.running.sandbox import Example, leaves_no_trace, quiet, run
from secateur.surgery.provenance import plans_of, provenance_of
from secateur.version import __version__

CARD = "README.md"
# What belongs to a tokenizer or processor and is copied as it is.
_COMPANIONS = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
    "preprocessor_config.json", "processor_config.json",
)  # fmt: skip


@leaves_no_trace
def save_pretrained(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    facts: Mapping[str, str] | None = None,
    about: Mapping[str, Any] | None = None,
) -> Path:
    """Write a pruned Hugging Face model with config, tokenizer, generation config and a model card.

    `tokenizer` is saved too. Without one, its files and those of an image processor are copied from where the model was
    loaded from: a folder, or what was downloaded from the hub. `facts` are lines of the card. `about` is a note as
    that of `save`.
    """
    model = unwrap(model)
    check_path("path", path, "the folder to write, as in result.save_pretrained(path)")
    if not is_pretrained(model):
        raise SecateurError(f"{type(model).__name__} is not a model of transformers.", fix="sc.save(result, path)")
    if not was_pruned(model):
        raise SecateurError(
            f"this {type(model).__name__} carries no plan: it was not made by secateur.",
            fix="model.save_pretrained(path), for an unpruned model",
        )
    folder = Path(path)
    check_free(folder)
    config = stock_config(model)
    stock = None if config is None else _stock_files(model, config)
    files = {**dict(_companions(model, tokenizer)), **_generation(model)}
    mode = "per layer" if stock is None else "uniform"
    note = {"version": __version__, "widths": mode, **({"about": in_json_types(about)} if about else {})}
    if stock is None:
        described = {**plain_config(model.config), "architectures": [type(model).__name__]}
        files = {**saved_files(model), **files}
    else:
        files = {**stock, **files}
        described = json.loads(files[CONFIG])
    files[CONFIG] = with_digests(described, note, files)
    files[CARD] = card(model, mode, facts or {}).encode()
    with atomic.naming_failures(folder):
        atomic.write_together(folder, files)
        for name in GUARDED - files.keys():  # of the model that was here before
            (folder / name).unlink(missing_ok=True)
    return folder


def check_free(folder: Path) -> None:
    """Raise unless the folder is new, empty, or one of ours."""
    if folder.is_dir() and not folder.is_symlink() and note_of(folder) is not None:
        return
    check_replaceable(folder)


# -- files -------------------------------------------------------------------------------------------------------------
def _stock_files(model: Any, config: Any) -> dict[str, bytes] | None:
    """What transformers itself writes for the model of that config, if it loads that with the same output."""
    config.dtype = next(model.parameters()).dtype
    stock, state = type(model)(config), shared_copy(compact(model)[0]).state_dict()
    for name, tensor in stock.state_dict(keep_vars=True).items():
        if name in state:  # transformers keeps some weights of models in half precision in float32
            tensor.data = tensor.data.to(state[name].dtype)
    stock.load_state_dict(state)
    with TemporaryDirectory() as place:
        stock.save_pretrained(place, max_shard_size="1000GB")
        again = type(model).from_pretrained(place, local_files_only=True).eval()
        way = getattr(model.config, "_experts_implementation", None)
        if way is not None:  # grouped products do not take every width
            again.set_experts_implementation(way)
        doubt = _rounding(state, again) or _difference(shared_copy(model).eval().cpu(), again)
        if not doubt:
            return {file.name: file.read_bytes() for file in sorted(Path(place).iterdir())}
    warnings.warn(
        SecateurWarning(
            f"a {type(model).__name__} that transformers builds with these widths {doubt}. Only secateur.load will "
            "open the saved folder.",
            fix="protect the width between blocks by Limits(ignore=…), if transformers alone must load it",
        ),
        stacklevel=3,
    )
    return None


def _rounding(state: Mapping[str, Tensor], stock: nn.Module) -> str:
    """In words, which weight transformers rounds as it reads the files; empty if there is none."""
    for name, read in stock.state_dict().items():
        wanted = state[name].cpu()
        if read.dtype != wanted.dtype and not torch.equal(read.to(wanted.dtype), wanted):
            return f"has `{name}` in {read.dtype} instead of {wanted.dtype}".replace("torch.", "")
    return ""


def _difference(small: Any, stock: Any) -> str:
    """In words, how the stock model differs from the pruned one; empty if both compute the same."""
    _take_buffers(small, stock)
    try:
        with quiet():
            inputs = _inputs(small)
            outputs = [tensors_of_output(run(net, inputs)) for net in (small, stock)]
    except Exception as error:  # transformers' own inputs are not enough for every model
        return f"does not run on inputs to compare by ({type(error).__name__}: {str(error)[:200]})"
    gaps = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(*outputs, strict=True) if a.is_floating_point()]
    allowed = 16 * torch.finfo(next(small.parameters()).dtype).eps
    gap = max((math.inf if math.isnan(gap) else gap for gap in gaps), default=1.0)
    return f"computes something else: it differs by {gap:.2g} (allowed {allowed:.2g})" if gap > allowed else ""


def _take_buffers(small: nn.Module, stock: nn.Module) -> None:
    """Give the pruned model the buffers that transformers makes itself, where its own are those, but rounded.

    `model.half()` rounds also what no file holds, as the frequencies of rotary embeddings.
    """
    made = dict(stock.named_buffers())
    for name, tensor in list(small.named_buffers()):
        new = made.get(name)
        if new is not None and new.dtype != tensor.dtype and torch.equal(new.to(tensor.dtype), tensor):
            path, _, leaf = name.rpartition(".")
            setattr(small.get_submodule(path), leaf, new)


def _inputs(model: Any) -> Example:
    """Inputs like the example that the model was analysed with, or those that transformers gives."""
    form = provenance_of(model).inputs
    if form:
        return made_inputs(form, next(model.parameters()))
    torch.manual_seed(0)
    return {
        name: torch.rand(tensor.shape).to(tensor) if tensor.is_floating_point() else tensor
        for name, tensor in _dummies(model).items()
    }


def _dummies(model: Any) -> dict[str, Tensor]:
    """Inputs for a model. Transformers gives token numbers, also for models that take images."""
    if model.main_input_name != "pixel_values":
        return dict(model.dummy_inputs)
    size = getattr(model.config, "image_size", None) or 64
    sides = (size, size) if isinstance(size, int) else tuple(size)
    like = next(model.parameters())
    return {"pixel_values": like.new_zeros((2, getattr(model.config, "num_channels", 3), *sides), device="cpu")}


def _companions(model: Any, tokenizer: Any) -> Iterator[tuple[str, bytes]]:
    """The files of the tokenizer, from the object given, or with a processor's from where the model was loaded from: a
    folder, or what the hub's library has downloaded."""
    if tokenizer is not None:
        with TemporaryDirectory() as place:
            tokenizer.save_pretrained(place)
            yield from ((file.name, file.read_bytes()) for file in sorted(Path(place).iterdir()) if file.is_file())
        return
    name = getattr(model.config, "_name_or_path", "")  # empty for one that was not loaded
    for companion in _COMPANIONS if name else ():
        path = _beside(str(name), companion)
        if path is not None and path.is_file():
            yield companion, path.read_bytes()


def _beside(source: str, name: str) -> Path | None:
    """Where a file beside a model lies on this machine."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if Path(source).is_dir():
        return Path(source) / name if (Path(source) / CONFIG).is_file() else None
    try:
        found = try_to_load_from_cache(source, name)
    except HFValidationError:  # no name of the hub
        return None
    return Path(found) if isinstance(found, str) else None


def _generation(model: Any) -> dict[str, bytes]:
    """How the model writes text, as it is set now."""
    found = getattr(model, "generation_config", None)
    return {} if found is None else {"generation_config.json": found.to_json_string().encode()}


def card(model: nn.Module, mode: str, facts: Mapping[str, str]) -> str:
    """The model card, from the facts of the run."""
    plans, kind = plans_of(model), type(model).__name__
    base = str(getattr(model.config, "_name_or_path", "") or "")
    named = base if base and not Path(base).exists() else ""
    head = ["library_name: transformers", "tags: [pruned, secateur]", *([f"base_model: {named}"] if named else [])]
    loading = (
        [f"from transformers import {kind}", f'model = {kind}.from_pretrained("FOLDER")']
        if mode == "uniform"
        else ["import secateur", 'model = secateur.load("FOLDER")']
    )  # fmt: skip
    why = "" if mode == "uniform" else "No config of transformers describes its widths.\n"
    if plans:
        before, after = plans[0].before, plans[-1].after
        share = 100 * after.params / max(before.params, 1)
        costs = {
            "parameters": f"{before.params:,} → {after.params:,} ({share:.1f} %)",
            "MACs of the example": f"{before.macs:,} → {after.macs:,}",
        }
        gone = list(plans[-1].layers.items())
    else:  # loaded by transformers: what it had before is not known
        costs, gone = {"parameters": f"{sum(part.numel() for part in model.parameters()):,}"}, []
    rows = {**costs, **facts}
    widths = "\n".join(f"| {name} | {had} | {has} |" for name, (had, has) in gone if has < had)
    left = f"\n## What left\n\n| layer | units before | units after |\n|---|---|---|\n{widths}\n" if plans else ""
    blocks = [block.name for plan in plans for block in plan.blocks]
    rows |= {"whole blocks that left": ", ".join(blocks)} if blocks else {}
    lines = "\n".join(f"| {name} | {text} |" for name, text in rows.items())
    code = "\n".join(loading)
    return (
        "---\n" + "\n".join(head) + f"\n---\n\n# {kind}, pruned\n\n"
        f"Units that the data needed least were removed by secateur "
        f"{__version__}.\n{why}\n| | |\n|---|---|\n{lines}\n\n```python\n{code}\n```\n{left}"
    )
