"""Reading a folder of `Result.save_pretrained`: is it as it was written, and is what its config asks for possible?

The config holds digests of itself and of the other files. Files of a hostile author have fitting digests. Therefore the
model is first built without numbers, and building stops as soon as it outgrows the weights that are there.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as registration

from secateur.errors import FileFormatError, SecateurError
from secateur.files.architecture import CONFIG, FIELD, architecture
from secateur.running.tensor_files import parse_json, sizes_in

WEIGHTS = "model.safetensors"
# What else decides which model is loaded. The weights of a folder with a plan are guarded by that plan.
GUARDED = frozenset({"generation_config.json", "plan.json"})
# Entries that make transformers run other code or read other files. We never write them.
_FOREIGN = re.compile(r"auto_map|quantization_config|transformers_weights|.*_implementation(_internal)?")
# Whole numbers that count no modules and size no lists: they may be large.
_FREE = re.compile(r".*(_id|theta|seed|position\w*|max_\w+|window\w*)")
_LARGEST = 2**20
# An unpruned model may be so many times larger than its pruned weights. Small ones may have so many numbers more; masks
# for attention are among the buffers.
_TIMES, _PARAMETERS, _BUFFERS = 64, 2**20, 2**26
_FIX = "sc.load(path, model), with a freshly built original"


# -- digests -----------------------------------------------------------------------------------------------------------
def with_digests(config: Mapping[str, Any], note: Mapping[str, Any], files: Mapping[str, bytes]) -> bytes:
    """The text of `config.json` with a note that holds the digests of itself and of the files beside it."""
    guarded = [name for name in files if name in GUARDED or (name == WEIGHTS and "plan.json" not in files)]
    digests = {name: hashlib.sha256(files[name]).hexdigest() for name in guarded}
    # Empty entries, as those of a model that was quantised once, say nothing, and would be refused as foreign.
    own = {key: value for key, value in config.items() if value is not None or not _FOREIGN.fullmatch(key)}
    whole = {**own, FIELD: {**note, "files": digests}}
    whole[FIELD]["digest"] = _digest(whole)
    return (json.dumps(whole, indent=2, sort_keys=True) + "\n").encode()


def _digest(config: Mapping[str, Any]) -> str:
    note = {key: value for key, value in config[FIELD].items() if key != "digest"}
    try:
        text = json.dumps({**config, FIELD: note}, sort_keys=True)
    except RecursionError:  # nothing that we wrote
        return ""
    return hashlib.sha256(text.encode()).hexdigest()


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise SecateurError(f"{folder} does not say which model it was cut from.", fix=_FIX)
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{path} is damaged: {error}", where=path) from error
    return found if isinstance(found, dict) else {}


def _check_unchanged(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise unless config, generation config, plan and weights are those that were written together."""
    note = config[FIELD]
    files = note.get("files")
    changed = [] if note.get("digest") == _digest(config) else [CONFIG]
    for name in (*sorted(GUARDED), WEIGHTS):
        known = files.get(name) if isinstance(files, dict) else None
        path = folder / name
        found = _digest_of_file(path) if path.is_file() and (known or name != WEIGHTS) else None
        changed += [name] if found != known else []
    if changed:
        uniform = note.get("widths") == "uniform"
        raise FileFormatError(
            f"{folder} is not as it was written: {', '.join(changed)} changed.",
            where=folder,
            fix="copy the folder again; "
            + ("or load it with from_pretrained of transformers" if uniform else "or save the model again"),
        )


def _digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- building ----------------------------------------------------------------------------------------------------------
def build_from(folder: Path) -> tuple[nn.Module, bool]:
    """The model that a folder's config describes, and whether its weights are in it already. No code there is run.

    A folder of uniform widths is loaded as transformers does. Of others the unpruned model is built.
    """
    config = _read_config(folder)
    if not isinstance(config.get(FIELD), dict):
        raise SecateurError(f"{folder} does not say which model it was cut from.", fix=_FIX)
    _check_unchanged(folder, config)
    sizes = sizes_in(folder / WEIGHTS)
    _check_numbers(folder, config, sum(sizes))
    try:
        return _build(folder, config, sizes)
    except (SecateurError, MemoryError):
        raise
    except Exception as error:  # transformers raises many kinds of errors
        what = f"transformers cannot build the model of {folder / CONFIG}: {type(error).__name__}: {str(error)[:300]}"
        raise FileFormatError(what, where=folder / CONFIG, fix=_FIX) from error


def _build(folder: Path, config: Mapping[str, Any], sizes: list[int]) -> tuple[nn.Module, bool]:
    import transformers

    kind, made = architecture(folder, _FIX)
    uniform = config[FIELD].get("widths") == "uniform"
    times = 3 if uniform else _TIMES  # a tied table is registered three times
    with _limited(folder, times * sum(sizes), _TIMES * (len(sizes) + 16)), torch.device("meta"):
        kind(copy.deepcopy(made))
    if not uniform:
        model = kind(made)
        if model.can_generate() and (folder / "generation_config.json").is_file():
            # A folder: nothing is downloaded.
            read = transformers.GenerationConfig.from_pretrained
            model.generation_config = read(folder, local_files_only=True)  # nosec B615
        return model, False
    model, info = kind.from_pretrained(
        folder,
        config=made,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    wrong = {key: sorted(map(str, names)) for key, names in info.items() if names}
    if wrong:
        text = "; ".join(f"{key} {', '.join(names[:3])}" for key, names in wrong.items())
        raise FileFormatError(f"{folder} does not fit {kind.__name__}: {text}", where=folder)
    return model, True


# -- limits ------------------------------------------------------------------------------------------------------------
def _check_numbers(folder: Path, config: Mapping[str, Any], weights: int) -> None:
    """Raise if a config has entries that lead elsewhere, or sizes that the weights cannot have."""
    if (folder / "adapter_config.json").exists():
        raise FileFormatError(f"{folder} also holds an adapter.", where=folder, fix="remove adapter_config.json")
    path, most = folder / CONFIG, max(weights, _LARGEST)
    for key, value in _entries({name: value for name, value in config.items() if name != FIELD}):
        if _FOREIGN.fullmatch(key):
            raise FileFormatError(f"{path} has the entry {key!r}, which secateur does not write.", where=path, fix=_FIX)
        if isinstance(value, int) and abs(value) > most and not _FREE.fullmatch(key):
            what = f"{path} says {key} = {value}, but there are only {weights} weights."
            raise FileFormatError(what, where=path, fix=_FIX)


def _entries(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """All entries of nested JSON with their keys; those of a list have the key of the list."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield name, None
            yield from _entries(value, name)
    elif isinstance(tree, list):
        for value in tree:
            yield from _entries(value, key)
    else:
        yield key, tree


@contextmanager
def _limited(folder: Path, numbers: int, parts: int) -> Iterator[None]:
    """Stop the building of modules that have many more numbers, or more modules and tensors, than these."""
    left, thread = [numbers + _PARAMETERS, numbers + _BUFFERS, parts], threading.get_ident()

    def count(module: nn.Module, name: str, item: Any) -> None:
        if threading.get_ident() != thread:  # the hooks see all modules of the process
            return
        if isinstance(item, torch.Tensor):
            left[0 if isinstance(item, nn.Parameter) else 1] -= item.numel()
        left[2] -= 1
        if min(left) < 0:
            what = f"{folder / CONFIG} asks for a model that is far larger than the weights beside it."
            raise FileFormatError(what, where=folder / CONFIG, fix=_FIX)

    hooks = [
        registration.register_module_parameter_registration_hook(count),
        registration.register_module_buffer_registration_hook(count),
        registration.register_module_module_registration_hook(count),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
