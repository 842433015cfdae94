"""Models of Hugging Face: `hf:FOLDER`, or `hf:NAME` of its hub. A folder needs no network. No code of theirs is run."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secateur.data.views import View
from secateur.errors import FileFormatError, ModelError, SecateurError
from secateur.files.architecture import CONFIG, architecture, is_pretrained, note_of
from secateur.files.formats import as_stock
from secateur.files.saved import load
from secateur.models.preparation import processor_view, timm_view
from secateur.models.weights import similar
from secateur.running.tensor_files import parse_json

HUB = "hf:"
_PROCESSOR = "preprocessor_config.json"
_PROCESSORS = "processor_config.json"  # of images and texts; transformers 5 notes both in it
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def pretrained_folder(path: Path) -> Path | None:
    """The folder of a model, if there is one: itself, or the `model` inside a run's output folder."""
    return next((folder for folder in (path, path / "model") if (folder / CONFIG).is_file()), None)


def source_of(spec: str) -> str:
    """The folder, or the name in the hub, that `hf:…` means."""
    name = spec.removeprefix(HUB).partition("?")[0]
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        found = pretrained_folder(folder)
        if found is None:
            raise ModelError(
                f"{folder} holds no model of Hugging Face ({CONFIG} is missing).", fix="hf:FOLDER or hf:NAME"
            )
        return str(found)
    if folder.is_file():
        raise ModelError(f"{folder} is a file.", fix=f"the folder that it lies in, {HUB}{folder.parent}")
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name):
        fix = _near(folder) or "hf:FOLDER, or hf:NAME such as hf:openai-community/gpt2"
        raise ModelError(f"there is no folder {name!r}.", fix=fix)
    return name


def _near(folder: Path) -> str:
    """A model beside a folder that is not there, of nearly the same name; empty if there is none."""
    near = similar(folder, lambda path: pretrained_folder(path) is not None)
    return f"{HUB}{near}" if near else ""


def open_hub(spec: str) -> tuple[nn.Module, torch.dtype | None]:
    """The model with its weights, as float32 unless `?dtype=` says otherwise, and the number format of its files."""
    # Scores and corrections are sums over many positions, and half precision is slow on a CPU.
    source, dtype = source_of(spec), _dtype(spec) or torch.float32
    with _reading(spec):
        safely = _safely(source)
        if note_of(Path(source)) is not None:  # ours: the blocks may have different widths
            model, missing = load(source), list[str]()
            stored = _format(model)
            as_stock(model, dtype)
        else:
            fix = "another model, or a factory of your own: FILE.py:FACTORY"
            kind, config = architecture(source, fix, safely["local_files_only"])
            stored = getattr(config, "dtype", None)
            if not isinstance(stored, torch.dtype):  # as in old folders: the weights say it
                stored = _format(kind.from_pretrained(source, dtype="auto", **safely))
            model, info = kind.from_pretrained(source, dtype=dtype, output_loading_info=True, **safely)
            missing = sorted(map(str, info["missing_keys"]))
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelError(
            f"{spec}: there are no weights for {', '.join(missing[:3])}{more}; they would be random.",
            fix="the folder of a model that was trained as a whole",
        )
    return model.eval(), stored


def fresh_hub(spec: str) -> nn.Module:
    """The architecture, with random weights."""
    source = source_of(spec)
    with _reading(spec), torch.random.fork_rng(devices=[]):
        kind, config = architecture(source, "another model", _safely(source)["local_files_only"])
        model: nn.Module = kind(config)
    return model.eval()


def tokenizer_of(spec: str) -> Any:
    """The tokenizer that lies beside a model."""
    source = source_of(spec)
    try:
        with _reading(spec):
            from transformers import AutoTokenizer

            # The user names the source, and no code of it runs.
            return AutoTokenizer.from_pretrained(source, **_safely(source))  # nosec B615
    except ModelError as error:
        raise ModelError(
            f"{spec} has no tokenizer that can be read ({error.what.removeprefix(spec).lstrip(' :').rstrip('.')}).",
            fix=f"tokenizer.save_pretrained({source!r}), with the tokenizer that the model was trained with",
        ) from error


def reads_text(model: nn.Module) -> bool:
    """Whether a model is one of transformers that reads token numbers. Those that read sound are refused."""
    kind = getattr(model, "main_input_name", "") if is_pretrained(model) else ""
    if kind not in ("", "input_ids", "pixel_values"):
        raise ModelError(
            f"{type(model).__name__} reads {kind}; the command line has text and images.", fix="the Python functions"
        )
    return kind == "input_ids"


def longest_text(model: nn.Module, tokenizer: Any = None) -> int:
    """The most tokens that a model takes; a very large number if it does not say."""
    config = getattr(model, "config", None)
    known = [getattr(config, "max_position_embeddings", None), getattr(tokenizer, "model_max_length", None)]
    return min((number for number in known if isinstance(number, int) and number > 0), default=2**31)


def hub_view(spec: str, model: nn.Module) -> View:
    """What an image model expects: from the settings of its processor, or the size in its config."""
    size = getattr(model.config, "image_size", None)
    known = View(size if isinstance(size, int) else 224)
    if isinstance(notes := getattr(model.config, "pretrained_cfg", None), Mapping):  # one of timm, in a wrapper
        return timm_view(spec, notes, known)
    with _reading(spec):
        notes = _processor(source_of(spec))
    return processor_view(spec, notes) if notes else known


def label_names(model: nn.Module) -> tuple[str, ...]:
    """What the config calls the outputs of a classifier; empty if it has no names for them."""
    names = getattr(getattr(model, "config", None), "id2label", None)
    if not isinstance(names, Mapping) or sorted(names) != list(range(len(names))):
        return ()
    found = tuple(str(names[number]) for number in range(len(names)))
    generic = all(re.fullmatch(r"LABEL_\d+", name) for name in found)
    return () if generic or len(set(found)) < len(found) else found


# -- reading -----------------------------------------------------------------------------------------------------------
def _safely(source: str) -> dict[str, Any]:
    return {"trust_remote_code": False, "local_files_only": Path(source).is_dir() or not _answers(source)}


def _answers(source: str) -> bool:
    """Whether the hub answers. If not, what was downloaded before is used, and any other name is refused at once: the
    hub's own library tries for half a minute, also where a folder was mistyped."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(source, CONFIG))
    except HfHubHTTPError:  # what is wrong with the name is told by transformers
        return True
    except Exception as error:  # the kinds depend on the library that asks
        if isinstance(try_to_load_from_cache(source, CONFIG), str):
            return False
        what = f"{HUB}{source}: there is no folder {source!r}, and the hub, where that may be a name, cannot be reached"
        fix = _near(Path(source)) or "hf:FOLDER, or a name of the hub and a network"
        raise ModelError(f"{what} ({_first_line(error)}).", fix=fix) from error
    return True


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Keep transformers from drawing bars and from advice."""
    import transformers.utils.logging as module

    logging: Any = module
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _reading(spec: str) -> Iterator[None]:
    """Turn what transformers raises into an error with a name."""
    if importlib.util.find_spec("transformers") is None:
        raise SecateurError(f"{spec} needs transformers.", fix="pip install 'secateur[hf]'")
    try:
        with quiet_hub():
            yield
    except FileFormatError as error:
        raise ModelError(f"{spec}: {error.what}", where=error.where, fix=error.fix) from error
    except (SecateurError, MemoryError):
        raise
    except Exception as error:  # transformers raises many kinds of errors
        name = spec.removeprefix(HUB).partition("?")[0]
        folder = Path(name).expanduser().is_dir()
        what, fix = "cannot be read", "a folder written by save_pretrained"
        if not folder:
            what, fix = "is no folder, and the hub does not give it", _near(Path(name)) or "hf:FOLDER, or another name"
        raise ModelError(f"{spec} {what}: {_first_line(error)}.", fix=fix) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _format(model: nn.Module) -> torch.dtype | None:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), None)


def _dtype(spec: str) -> torch.dtype | None:
    """The number format in `?dtype=…`."""
    options = spec.partition("?")[2]
    if not options:
        return None
    name, _, value = options.partition("=")
    if name != "dtype" or value not in _DTYPES:
        raise ModelError(f"{spec}: {options!r} is no option of hf:….", fix=f"?dtype= with {', '.join(_DTYPES)}")
    return _DTYPES[value]


def _processor(source: str) -> dict[str, Any]:
    """All settings of an image processor; empty if there is none."""
    if _notes(source, _PROCESSOR) is None and not (_notes(source, _PROCESSORS) or {}).get("image_processor"):
        return {}
    from transformers import AutoImageProcessor

    # It knows what the file leaves open. The user names the source, and no code of it runs.
    reader: Any = AutoImageProcessor
    return dict(reader.from_pretrained(source, **_safely(source)).to_dict())  # nosec B615


def _notes(source: str, name: str) -> dict[str, Any] | None:
    """What a file beside the weights says, if it is there."""
    if Path(source).is_dir():
        path = Path(source) / name
    else:
        from transformers.utils.hub import cached_file

        local = _safely(source)["local_files_only"]
        found = cached_file(source, name, local_files_only=local, _raise_exceptions_for_missing_entries=False)
        path = Path(found or "")
    if not path.is_file():
        return None
    try:
        notes = parse_json(path.read_bytes())
        if not isinstance(notes, dict):
            raise ValueError("it holds no settings")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is damaged: {error}", where=path) from error
    return notes
