"""Language models: text that the teacher writes itself, and adapters instead of all weights."""

from __future__ import annotations

import re
import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from secateur.arguments import check_count
from secateur.errors import Argument, DataError, SecateurError
from secateur.running.copies import shared_copy, unwrap
from secateur.running.devices import device_of
from secateur.running.sandbox import leaves_no_trace
from secateur.running.targets import Reader

# The length of a sequence if nothing else is said.
_TOKENS = 128
_NO_LAYER = "{kind} has no linear layer for an adapter."


@leaves_no_trace
def write_text(
    model: nn.Module, sequences: int = 256, tokens: int | None = None, seed: int = 0, batch_size: int = 64
) -> dict[str, Tensor]:
    """Text that a language model of transformers writes itself: `{"input_ids": (sequences, tokens)}`.

    `tokens` is 128, or fewer if the model takes no more. `batch_size` sequences are written at a time.

    Each sequence begins with the model's mark of the start, if it has one, and a token at random. All others are drawn
    from the probabilities that the model gives, except that no sequence ends early. The `generation_config` changes
    nothing. It is something to train a smaller model on where there is no text.
    """
    check_count("sequences", sequences)
    check_count("batch_size", batch_size)
    writer: Any = shared_copy(unwrap(model)).eval()
    if not Reader(writer).causal:
        raise DataError(f"{type(writer).__name__} writes no text.", fix="data=…, texts or samples to train on")
    most = getattr(writer.config, "max_position_embeddings", None)
    tokens = min(_TOKENS, most or _TOKENS) if tokens is None else tokens
    check_count("tokens", tokens, 4)
    if most and tokens > most:
        raise DataError("{given}: this model takes at most {most}.", given=Argument("tokens", tokens), most=most)
    device, how = device_of(writer), _drawing(writer)
    torch.manual_seed(seed)
    first, words = _start(writer), len(writer.get_input_embeddings().weight)
    found = []
    for begin in range(0, sequences, batch_size):
        count = min(batch_size, sequences - begin)
        ids = torch.randint(words, (count, 1), device=device)
        if first is not None:
            ids = torch.cat([torch.full_like(ids, first), ids], 1)
        more = tokens - ids.shape[1]
        with torch.no_grad():
            made = writer.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=how, min_new_tokens=more,
                max_new_tokens=more,
            )  # fmt: skip
        found.append(made[:, :tokens].cpu())
    return {"input_ids": torch.cat(found)}


def _start(writer: Any) -> int | None:
    """The mark of the start. A small model may have the usual settings, whose mark lies beyond its words."""
    first = getattr(writer.config, "bos_token_id", None)
    return first if isinstance(first, int) and first < len(writer.get_input_embeddings().weight) else None


def _drawing(writer: Any) -> Any:
    """How tokens are drawn: as the model gives them, without an early end. The copy's own settings are replaced."""
    from transformers import GenerationConfig

    kind: Any = GenerationConfig
    marks = {"pad_token_id": _start(writer) or 0}
    end = getattr(getattr(writer, "generation_config", None), "eos_token_id", None)
    if end is not None:
        marks["eos_token_id"] = end
    # transformers completes what it is given by the model's own settings.
    writer.generation_config = kind(**marks)
    return kind(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **marks)


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """The model with trainable adapters on its linear layers, in place, and all else frozen."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        none = Argument("lora", 0)
        raise SecateurError("adapters need peft.", fix="pip install peft, or {none}", none=none) from None
    plain: Any = model
    head = plain.get_output_embeddings() if hasattr(plain, "get_output_embeddings") else None
    # GPT-2 has linear layers of transformers' own kind, whose weights lie the other way round.
    turned = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", nn.Linear)
    layers = {n: part for n, part in model.named_modules() if isinstance(part, nn.Linear | turned) and part is not head}
    if not layers or "" in layers:
        what = "{kind} is itself a linear layer, so an adapter has no place in it." if layers else _NO_LAYER
        kind, none = type(model).__name__, Argument("lora", 0)
        raise SecateurError(what, fix="{none}", kind=kind, none=none)
    # As an expression. In a list, "0" would also mean "block.0", whatever that is.
    names = "|".join(map(re.escape, layers))
    first = next(iter(layers.values()))
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=names, fan_in_fan_out=not isinstance(first, nn.Linear)
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out")  # peft finds it out for each layer
        found: nn.Module = get_peft_model(plain, config)
    return found


def merged(model: Any) -> nn.Module:
    """The model that `with_adapters` was given, its adapters added to the weights."""
    found: nn.Module = model.merge_and_unload()
    return found
