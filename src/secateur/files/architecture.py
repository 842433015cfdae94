"""Hugging Face models: the config that describes a pruned one, and building one from the config of a folder."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secateur.errors import FileFormatError
from secateur.plans.plan import Plan
from secateur.running.copies import meta_copy, named_modules, shared_copy, unwrap
from secateur.running.tensor_files import parse_json
from secateur.surgery.bypass import Bypass
from secateur.surgery.cut import cut
from secateur.surgery.provenance import plans_of, remember

CONFIG = "config.json"
#: The field of `config.json` that says what secateur did.
FIELD = "secateur"
# Sizes that a config may leave open, to be derived from others.
_OPEN = ("n_inner", "head_dim", "intermediate_size", "ffn_dim", "num_key_value_heads")
_TRIES = 400  # configs that are built, without numbers, before a model counts as one that no config describes


def is_pretrained(model: nn.Module) -> bool:
    """Whether a model is one of transformers: it has a config, and knows how to save itself."""
    config = getattr(unwrap(model), "config", None)
    return hasattr(config, "to_dict") and hasattr(type(config), "model_type") and hasattr(model, "save_pretrained")


def was_pruned(model: nn.Module) -> bool:
    """Whether secateur made a model smaller. One that transformers loaded carries no plan, but its config says so."""
    return bool(plans_of(model)) or isinstance(getattr(getattr(unwrap(model), "config", None), FIELD, None), dict)


# -- from a folder -----------------------------------------------------------------------------------------------------
def architecture(source: str | Path, fix: str, local: bool = True) -> tuple[Any, Any]:
    """The class that the config of a folder or of a name in the hub gives, one of transformers' own, and the config."""
    import transformers

    # The user names the source, and no code of it runs.
    config = transformers.AutoConfig.from_pretrained(  # nosec B615
        source, local_files_only=local, trust_remote_code=False
    )
    names = getattr(config, "architectures", None) or [""]
    kind = getattr(transformers, str(names[0]), None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        where = Path(source) / CONFIG
        raise FileFormatError(
            f"{where} names {names[0]!r}, which is no model of transformers {transformers.__version__}.",
            where=where,
            fix=fix,
        )
    return kind, config


def note_of(folder: Path) -> dict[str, Any] | None:
    """What the config of a folder says about secateur."""
    try:
        found = parse_json((folder / CONFIG).read_bytes())
    except (OSError, ValueError):
        return None
    note = found.get(FIELD) if isinstance(found, dict) else None
    return note if isinstance(note, dict) else None


# -- for a model -------------------------------------------------------------------------------------------------------
def stock_config(model: nn.Module) -> Any | None:
    """The config from which transformers builds a model of exactly these shapes, or None if there is none.

    It is searched for among configs in which sizes that shrank are replaced, and each is proven by building it.
    """
    model, base = compact(model)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    search = _Search(type(model), base, wanted)
    before = search.shapes({})
    if _differ(before, wanted):
        return None
    changes = _changes(model, before)
    fields = {path: options for path, value in _numbers(search.base) if (options := _options(path, value, changes))}
    best, found = search.score({}), dict[tuple[str, ...], int]()
    for size in (1, 1, 2, 1):  # some sizes fit only together: heads, and those of keys and values
        for paths in itertools.combinations(fields, size):
            for values in itertools.product(*(fields[path] for path in paths)):
                tried = found | dict(zip(paths, values, strict=True))
                if best < search.perfect and search.tries < _TRIES and (score := search.score(tried)) > best:
                    best, found = score, tried
    return search.made(found) if best == search.perfect else None


def compact(model: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    """A model without the layers that only pass on their input, sharing its weights, and its config as JSON types."""
    model = unwrap(model)
    config = plain_config(model.config)
    if not any(map(_idle, model.modules())):
        return model, config
    model = shared_copy(model)
    for path, module in named_modules(model):
        if isinstance(module, nn.ModuleList) and any(map(_idle, module)):
            kept = [i for i, layer in enumerate(module) if not _idle(layer)]
            config = _with_layers(config, len(module), kept)
            model.set_submodule(path, nn.ModuleList(module[i] for i in kept))
    return model, config


def _idle(layer: nn.Module) -> bool:
    return isinstance(layer, Bypass) and layer.returns == "input" and not layer.counts


def _with_layers(config: Any, had: int, kept: Sequence[int]) -> Any:
    """The config of a model with fewer layers: their number, and lists with an entry for each."""
    if not isinstance(config, dict):
        return config
    made = {}
    for key, value in config.items():
        if isinstance(value, list) and len(value) == had:
            value = [value[i] for i in kept]
        elif type(value) is int and value == had and "layer" in key:
            value = len(kept)
        made[key] = _with_layers(value, had, kept)
    return made


def _differ(before: Mapping[str, tuple[int, ...]], after: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether blocks that had the same shapes differ now. The numbers of a config hold for all blocks."""
    kinds: dict[str, list[str]] = {}
    for name in before.keys() & after.keys():
        kinds.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    return any(
        len({before[name] for name in names}) == 1 < len({after[name] for name in names}) for names in kinds.values()
    )


def describable(model: nn.Module, plan: Plan) -> bool:
    """Whether transformers can build what a plan leaves of a model."""
    small = cut(meta_copy(model), plan)
    remember(small, model, plan)
    return stock_config(small) is not None


class _Search:
    """Builds models without numbers from changed configs, and counts the sides of parameters that come out right."""

    def __init__(self, kind: Any, base: dict[str, Any], wanted: dict[str, tuple[int, ...]]) -> None:
        self.kind, self.base, self.wanted, self.tries = kind, base, wanted, 0
        self.perfect = sum(map(len, wanted.values()))

    def made(self, changed: Mapping[tuple[str, ...], int]) -> Any:
        """The config with these numbers."""
        text = json.loads(json.dumps(self.base, default=str), object_hook=_infinity)
        for path, value in changed.items():
            inner = text
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = value
        return self.kind.config_class.from_dict(text)

    def shapes(self, changed: Mapping[tuple[str, ...], int]) -> dict[str, tuple[int, ...]]:
        """The parameters of the model that a config describes."""
        self.tries += 1
        with torch.device("meta"):
            model = self.kind(self.made(changed))
        return {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}

    def score(self, changed: Mapping[tuple[str, ...], int]) -> int:
        """How many sides are as wanted; -1 if nothing can be built."""
        try:
            found = self.shapes(changed)
        except Exception:  # numbers that do not fit each other
            return -1
        if found.keys() != self.wanted.keys():
            return -1
        return sum(a == b for name in found for a, b in zip(found[name], self.wanted[name], strict=True))


def _infinity(item: dict[str, Any]) -> Any:
    """Numbers that JSON lacks are written by transformers as {"__float__": "Infinity"}."""
    return float(item["__float__"]) if item.keys() == {"__float__"} else item


def _changes(model: nn.Module, before: Mapping[str, tuple[int, ...]]) -> dict[int, set[int]]:
    """For each size that shrank what became of it, heads included."""
    found: dict[int, set[int]] = {}
    for name, tensor in model.named_parameters():
        for old, new in zip(before.get(name, ()), tensor.shape, strict=False):
            if old != new:
                found.setdefault(old, set()).add(new)
    heads: dict[str, tuple[int, int]] = {}
    for plan in plans_of(model):
        for head in plan.heads:
            heads[head.path] = heads.get(head.path, (head.heads, 0))[0], head.heads - len(head.removed)
    for had, has in heads.values():
        for count in range(1, had + 1):
            if count * has % had == 0:  # as many keys and values leave, in proportion
                found.setdefault(count, set()).add(count * has // had)
    return found


def _numbers(config: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int | None]]:
    """All whole numbers of a config, also of those inside it, and sizes that it leaves open."""
    for key, value in config.items():
        if isinstance(value, Mapping) and (not path or key.endswith("config")):
            yield from _numbers(value, (*path, key))
        elif (isinstance(value, int) and not isinstance(value, bool)) or (value is None and key in _OPEN):
            yield (*path, key), value


def _options(path: tuple[str, ...], value: int | None, changes: Mapping[int, set[int]]) -> list[int]:
    if path[-1].endswith("_id") or "layers" in path[-1] or path[-1] in ("vocab_size", "max_position_embeddings"):
        return []
    known = set().union(*changes.values()) if value is None else changes.get(value, set())
    return sorted(known)


def plain_config(config: Any) -> dict[str, Any]:
    """A config as JSON types. Where the model came from is left out."""
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    for key in ("_name_or_path", "transformers_version", FIELD, "dtype"):
        found.pop(key, None)
    return found
