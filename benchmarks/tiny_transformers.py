"""Tiny models of every family of `transformers`, built from configurations without a network, and inputs for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto as auto

from benchmarks.tiny_configs import BESIDE_TEXT, BY_NAME, OPEN, SPECIAL, TEXTS_ALONE, TOKENS
from secateur.structure.graph import Graph

MAPPINGS = [
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "CAUSAL_LM",
    "MASKED_LM",
    "SEQUENCE_CLASSIFICATION",
    "IMAGE_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "CTC",
    "OBJECT_DETECTION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
]
#: They read images beside texts.
_IMAGES = ("align", "git", "tipsv2")
#: They read several rows of tokens for each sample.
_BOOKS = ("musicgen_decoder", "musicgen_melody_decoder")
_OUTPUTS = ("model output", "entries of an embedding")


def config_of(kind: type, **given: Any) -> Any:
    """A small configuration of a class."""
    known = kind().to_dict()  # type: ignore[attr-defined]
    for name, inner in getattr(kind, "sub_configs", {}).items():
        default = known.get(name)
        if not isinstance(default, dict) or not isinstance(given.get(name, {}), dict):
            continue
        own = given.get(name, {})
        if inner is transformers.AutoConfig:
            inner = transformers.CONFIG_MAPPING[own.get("model_type", default["model_type"])]
        own = {**SPECIAL.get(inner.model_type, {}), **own}
        if kind.model_type in TEXTS_ALONE and name != "text_config":  # type: ignore[attr-defined]
            own |= {size: count for size, count in BESIDE_TEXT.items() if size in default}
        given[name] = config_of(inner, **own).to_dict()
    if "q_lora_rank" in known or "kv_lora_rank" in known:
        given.setdefault("num_key_value_heads", 4)  # all heads have their own keys, from one latent
    wanted = {**BY_NAME, **TOKENS}
    sizes = {
        name: size for name, size in wanted.items()
        if type(known.get(name)) is int or (name in OPEN and name in known and known[name] is None)
    }  # fmt: skip
    return kind(**{**sizes, **given})


def families() -> Iterator[tuple[str, str]]:
    """The name of each family with the mapping that has its model: the whole of an encoder and decoder first."""
    seen: set[str] = set()
    for mapping in MAPPINGS:
        for family in getattr(auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", ()):
            if family not in seen:
                seen.add(family)
                yield family, mapping


def build(family: str, mapping: str, **given: Any) -> nn.Module:
    """A tiny model of a family, with weights with which mistakes show, in double precision."""
    kind = transformers.CONFIG_MAPPING[family]
    config = config_of(kind, **{**SPECIAL.get(family, {}), **given})
    config._experts_implementation = "eager"  # grouped products know no double precision
    names = getattr(auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")[family]
    model = getattr(transformers, names if isinstance(names, str) else names[0])
    for name, inner in kind.sub_configs.items():
        if inner is model.config_class:  # the class is that of a part
            config = getattr(config, name)
    if sum(v for k, v in vars(config).items() if k in ("num_hidden_layers", "n_layer") and isinstance(v, int)) > 8:
        raise ValueError("no small configuration")
    with torch.device("meta"):
        count = sum(p.numel() for p in model(config).parameters())
    if count > 3_100_000:
        raise ValueError(f"no small configuration: {count} parameters")
    torch.manual_seed(0)
    return randomise(model(config))


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights with which mistakes show: initial values are often zero or one. In double precision."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            new = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                inputs = parameter[0].numel() if parameter.ndim > 3 else parameter.shape[-1]
                parameter.copy_(new if "embed" in name else new / inputs**0.5)
            elif name.endswith("bias"):
                parameter.copy_(new * 0.1)
            else:
                parameter.copy_(parameter + 0.2 * new)
    return model.double().eval()


def tokens(batch: int, length: int, pad: int = 0, seed: int = 0, **more: Tensor) -> dict[str, Tensor]:
    """Token numbers; the last `pad` of the first sample are masked."""
    ids = torch.randint(3, 100, (batch, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    if pad:
        ids[0, length - pad :], mask[0, length - pad :] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, **more}


def inputs(model: Any, batch: int = 2, length: int = 8, pad: int = 0, seed: int = 0) -> dict[str, Tensor]:
    """An example for a model of any family."""
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    config, main, taken = model.config, model.main_input_name, inspect.signature(model.forward).parameters
    if main == "pixel_values":
        size = getattr(config, "image_size", 32)
        size = tuple(size) if isinstance(size, list | tuple) else (size, size)
        given = {main: torch.randn(batch, getattr(config, "num_channels", 3), *size, generator=generator).to(dtype)}
        given |= _beside_images(config, batch, length, given[main])
    elif main == "input_values" or config.model_type == "speech-encoder-decoder":
        shape = _SOUNDS.get(config.model_type, lambda _, length: (1000 + 200 * length,))(config, length)
        given = {"input_values": torch.randn(batch, *shape, generator=generator).to(dtype)}
    elif main == "input_features":
        shape = _SOUNDS.get(config.model_type, _spectrogram)(config, length)
        given = {main: torch.randn(batch, *shape, generator=generator).to(dtype)}
    else:
        books = config.num_codebooks if config.model_type in _BOOKS else 1
        given = tokens(batch, length, pad, seed)
        given["input_ids"] = tokens(batch * books, length, pad, seed)["input_ids"]
        given |= _beside_text(model, batch, length, generator)
    if config.is_encoder_decoder:
        wide = tokens(batch, length + 1, 0, seed + 1)
        given["decoder_input_ids"] = wide["input_ids"]
    return {name: value for name, value in given.items() if name in taken}


def _spectrogram(config: Any, length: int) -> tuple[int, ...]:
    frames = 2 * config.max_source_positions if hasattr(config, "max_source_positions") else 32 + 4 * length
    return config.num_mel_bins, frames


def _frames(name: str) -> Callable[[Any, int], tuple[int, ...]]:
    """The shape of sounds whose frames come first. The configuration, or that of the encoder, has their width."""
    return lambda config, length: (32 + 4 * length, getattr(getattr(config, "encoder_config", config), name))


#: The shapes of sounds, where they are neither waves nor spectrograms.
_SOUNDS: dict[str, Callable[[Any, int], tuple[int, ...]]] = {
    "audio-spectrogram-transformer": lambda config, _: (config.max_length, config.num_mel_bins),
    "canary": _frames("num_mel_bins"),
    "cohere_asr": _frames("num_mel_bins"),
    "granite_speech5_ctc": lambda config, length: (32 + 4 * length, 4 * config.encoder_config.num_mel_bins),
    "lasr_ctc": _frames("num_mel_bins"),
    "moonshine_streaming": lambda _, length: (80 * (16 + 2 * length),),
    "parakeet_ctc": _frames("num_mel_bins"),
    "speech_to_text": _frames("input_feat_per_channel"),
    "wav2vec2-bert": _frames("feature_projection_input_dim"),
}


def _beside_images(config: Any, batch: int, length: int, images: Tensor) -> dict[str, Tensor]:
    """What some families read beside images, or instead of them."""
    if config.model_type == "siglip2":  # patches in a row, and how many rows and columns there are
        side = config.vision_config.patch_size
        patches = torch.nn.functional.unfold(images, side, stride=side).mT
        shapes = torch.tensor([[size // side for size in images.shape[2:]]] * batch)
        ones = torch.ones(patches.shape[:2], dtype=torch.long)
        return {"pixel_values": patches, "pixel_attention_mask": ones, "spatial_shapes": shapes}
    return tokens(batch, length) if config.model_type == "blip-2" else {}


def _beside_text(model: Any, batch: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    """What some families read in addition, so that no part of a model is left out."""
    config, dtype = model.config, next(model.parameters()).dtype
    kind = config.model_type

    def numbers(below: int, *shape: int) -> Tensor:
        return torch.randint(0, below, (batch, *shape), generator=generator)

    if getattr(config, "vision_config", None) is not None and (hasattr(model, "logit_scale") or kind in _IMAGES):
        size = config.vision_config.image_size
        return {"pixel_values": torch.randn(batch, 3, size, size, generator=generator).to(dtype)}
    if kind in ("layoutlmv3", "lilt"):
        boxes = numbers(60, length, 4).sort(-1).values
        size = getattr(config, "input_size", 0)
        return {"bbox": boxes, "pixel_values": torch.randn(batch, 3, size, size, generator=generator).to(dtype)}
    if kind == "videoprism":
        shape = (config.vision_config.num_frames, 3, config.vision_config.image_size, config.vision_config.image_size)
        return {"pixel_values_videos": torch.randn(batch, *shape, generator=generator).to(dtype)}
    if kind == "trocr":
        return {"encoder_hidden_states": torch.randn(batch, 5, config.d_model, generator=generator).to(dtype)}
    if kind == "luke":
        return {"entity_ids": numbers(16, 2), "entity_position_ids": numbers(length, 2, 3)}
    if kind == "markuplm":
        depth = config.max_depth
        return {"xpath_tags_seq": numbers(200, length, depth), "xpath_subs_seq": numbers(1000, length, depth)}
    return {}


def parts(graph: Graph) -> dict[str, tuple[int, int, str]]:
    """How many units of each part of a transformer may leave, of how many, and why others may not."""
    found: dict[str, tuple[int, int, str]] = {}
    for layer in graph.layers:
        if layer.reason in _OUTPUTS:
            continue
        # A router whose operations cannot be followed is no layer of experts for the graph.
        other = "experts" if "router" in layer.name.split(".") else "width" if len(layer.paths) > 2 else "neurons"
        part = {"head": "heads", "expert": "experts"}.get(layer.kind, other)
        free, all_units, why = found.get(part, (0, 0, ""))
        units = int(graph.units[layer.groups].sum())
        found[part] = free + units * layer.prunable, all_units + units, why or layer.reason or ""
    return found
