"""Fresh models from a text: `torchvision:NAME`, `timm:NAME`, `hf:FOLDER`, `FILE.py:FACTORY`, options after a `?`."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from torch import nn

from secateur.errors import Argument, ModelError
from secateur.models.hub import HUB, fresh_hub
from secateur.models.weights import similar

FORMS = "torchvision:NAME, timm:NAME, hf:FOLDER, hf:NAME, FILE.py:FACTORY, or a folder saved by secateur"

# Options that would download or read weights without the user asking for it.
_RESERVED = {"weights", "weights_backbone", "pretrained", "checkpoint_path", "pretrained_cfg", "cache_dir"}


def fresh(spec: str, pretrained: bool = False) -> nn.Module:
    """Build a model. Only `pretrained` needs a network; `FILE.py:FACTORY` runs that file.

    >>> fresh("torchvision:resnet18?num_classes=3").fc
    Linear(in_features=512, out_features=3, bias=True)
    """
    if spec.startswith(HUB):
        return fresh_hub(spec)
    body, options = _options(spec)
    zoo, colon, name = body.partition(":")
    if colon and zoo in ("torchvision", "timm"):
        return _from_zoo(zoo, name, options, pretrained)
    if own := re.fullmatch(r"(.*\.py)(?::(.*))?", body):
        if pretrained:
            raise ModelError(
                "{spec}: a factory of your own has no weights to download.", fix="{weights}",
                spec=spec, weights=Argument("weights", "FILE"),
            )  # fmt: skip
        return _factory(Path(own[1]), own[2] or "", options)
    if zoo == "yolo":
        raise ModelError(
            f"{spec}: the files of Ultralytics are pickled, and reading them runs code. The command line reads none.",
            fix="prune(YOLO(FILE).model, …) in Python; see the how-to 'Prune a YOLO'",
        )
    near = [f"torchvision:{name}" for name in _near(body, _torchvision_names())] if ":" not in body else []
    near += [f"{zoo}.py:{name}"] if colon and Path(f"{zoo}.py").is_file() else []
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise ModelError(f"{spec!r} is no model: give {FORMS}.{hint}")


def runs_code(spec: str) -> bool:
    """Whether building this model runs a file of the user's."""
    return not spec.startswith(("torchvision:", "timm:", HUB))


def _options(spec: str) -> tuple[str, dict[str, Any]]:
    body, _, query = spec.partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise ModelError(f"{spec!r}: options look like ?num_classes=10&width=64.") from None
    reserved = sorted(_RESERVED & {key for key, _ in pairs})
    if reserved:
        raise ModelError(
            "{spec!r}: {reserved} is not an option.", fix="{weights}, or 'default'",
            spec=spec, reserved=", ".join(reserved), weights=Argument("weights", "FILE"),
        )  # fmt: skip
    return body, {key: _value(text) for key, text in pairs}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def _from_zoo(zoo: str, name: str, options: dict[str, Any], pretrained: bool) -> nn.Module:
    if zoo == "torchvision":
        import torchvision

        known, bare = _torchvision_names(), name
        make = partial(torchvision.models.get_model, name, weights="DEFAULT" if pretrained else None, **options)
    else:
        import timm

        known, bare = timm.list_models(), name.partition(".")[0]  # `resnet50.a1_in1k` names weights as well
        make = partial(timm.create_model, name, pretrained=pretrained, **options)
    if bare not in known:
        near = " or ".join(f"{zoo}:{other}" for other in _near(bare, known))
        hint = f"Did you mean {near}?" if near else f"It has {len(known)} models."
        raise ModelError(f"{zoo} has no model {bare!r}. {hint}")
    return _made(f"{zoo}:{name}", make)


def _torchvision_names() -> list[str]:
    try:
        import torchvision
    except ModuleNotFoundError:
        return []
    # Classifiers are in the package itself, other models in its subpackages.
    return list(torchvision.models.list_models(module=torchvision.models))


def _near(name: str, names: Sequence[str]) -> list[str]:
    plain = name.lower().replace("-", "")
    return [plain] if plain in names else difflib.get_close_matches(plain, names, 3, 0.6)


def _made(spec: str, make: Callable[[], Any]) -> nn.Module:
    try:
        model = make()
    except Exception as error:
        raise ModelError(f"{spec} could not be built: it raised {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{spec} returned {type(model).__name__}, not a torch.nn.Module.")
    return model.eval()


def _factory(path: Path, name: str, options: dict[str, Any]) -> nn.Module:
    if not path.is_file():
        beside = similar(path)
        fix = f"{beside}:{name}" if beside else "the path of a .py file that is there"
        raise ModelError(f"there is no file {path}.", fix=fix)
    module = _run(path)
    own = [
        key for key, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__ and not key.startswith("_")
    ]  # fmt: skip
    if not name or not callable(getattr(module, name, None)):
        what = f"has no function or class {name!r}" if name else "needs the name of a function or class after it"
        near = [*_near(name, own), *own][:4]
        raise ModelError(f"{path} {what}.", fix=" or ".join(f"{path}:{n}" for n in dict.fromkeys(near)))
    factory = getattr(module, name)
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        raise ModelError(
            f"{path}:{name} cannot be called with these options: {error}.",
            fix=f"give options as {path.name}:{name}?NAME=VALUE",
        ) from error
    except ValueError:
        pass  # built-in: it has no signature
    return _made(f"{path}:{name}", partial(factory, **options))


def _run(path: Path) -> Any:
    """Import the user's file as a module. It can import from its own folder, as when it is run."""
    where = path.resolve()
    name = f"secateur_user_{where.stem}"
    spec = importlib.util.spec_from_file_location(name, where)
    if spec is None or spec.loader is None:
        raise ModelError(f"{path} cannot be imported.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look it up
    sys.path.insert(0, str(where.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ModelError(f"{path} raised {type(error).__name__} when it was run: {error}") from error
    finally:
        sys.path.remove(str(where.parent))
    return module
