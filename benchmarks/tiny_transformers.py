"""Tiny models of every family of `transformers`, built from configurations without a network, and inputs for them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto as auto

from secateur.structure.graph import Graph

#: Small sizes, by the names that configurations use for them.
SIZES: dict[int, str] = {
    1: "first_k_dense_replace num_dense_layers moe_layer_start_index topk_group",
    2: """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers num_blocks
        num_encoder_layers num_key_value_heads num_experts_per_tok moe_k moe_topk type_vocab_size num_kv_heads
        multi_query_group_num top_k_experts num_experts_per_token moe_top_k n_group num_expert_group""",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts
        num_local_experts moe_num_experts num_conv_pos_embedding_groups mamba_d_conv state_size
        n_groups_ num_codebooks linear_num_heads""",
    8: """head_dim patch_size d_kv attention_head_dim kv_channels v_head_dim qk_nope_head_dim qk_rope_head_dim
        linear_key_head_dim linear_value_head_dim global_head_dim mamba_d_head attention_head_size
        linear_head_dim n_routed_experts""",
    16: "kv_lora_rank q_lora_rank num_conv_pos_embeddings index_head_dim",
    32: """hidden_size d_model n_embd dim embed_dim emb_dim embedding_size width cross_attention_hidden_size image_size
        projection_dim word_embed_proj_dim d_embed num_mel_bins model_dim encoder_hidden_size attention_hidden_size
        lru_width""",
    48: """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner d_ff ffn_hidden_size d_inner
        moe_intermediate_size shared_expert_intermediate_size dense_intermediate_size intermediate_size_mlp""",
    64: "max_position_embeddings n_positions max_source_positions max_target_positions n_ctx context_length",
    128: "vocab_size",
}
_BY_NAME = {name: size for size, names in SIZES.items() for name in names.split()}
#: Sizes that must be given although their default is None.
_OPEN = ("head_dim", "n_routed_experts", "num_experts_per_tok", "num_key_value_heads", "vocab_size")
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0, "sep_token_id": 2}
_STAGES: dict[str, Any] = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "image_size": 64}
_WINDOWS = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "patch_size": 4, "window_size": 4}
_WAVES = {"conv_dim": [16] * 7}
_MIXED = {"layer_types": ["linear_attention", "full_attention"]}
#: What the sizes above do not fit.
SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _MIXED,
    "bamba": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "attn_layer_indices": [1],
        "mamba_chunk_size": 8,
    },
    "bigbird_pegasus": {"attention_type": "original_full"},
    "big_bird": {"attention_type": "original_full"},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"layer_types": ["full_attention", "sliding_attention"]},
    "esmc": {"num_key_value_heads": 4},
    "gptj": {"rotary_dim": 4},
    "detr": {
        "use_timm_backbone": False,
        "backbone": None,
        "use_pretrained_backbone": False,
        "num_queries": 6,
        "backbone_config": {"model_type": "resnet", **_STAGES, "embedding_size": 8, "out_features": ["stage4"]},
    },
    "convnext": _STAGES,
    "convnextv2": _STAGES,
    "data2vec-audio": _WAVES,
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_chunk_size": 8},
    "falcon_mamba": {"time_step_rank": 4},
    "funnel": {"block_sizes": [1, 1], "d_head": 8},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "laurel_rank": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 128,
        "activation_sparsity_pattern": 0.0,
    },
    "gemma4_text": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128, "num_kv_shared_layers": 0},
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
        "layer_types": ["mamba", "attention"],
    },
    "hubert": _WAVES,
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "mamba_dt_rank": 4},
    "kimi_linear": _MIXED,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "luke": {"entity_vocab_size": 16, "entity_emb_size": 8},
    "poolformer": _STAGES,
    "qwen3_5_moe_text": _MIXED,
    "qwen3_5_text": _MIXED,
    "qwen3_next": _MIXED,
    "qwen4_exp_text": _MIXED,
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "local"],
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 16],
        "local_attn_chunk_length": 8,
        "feed_forward_size": 48,
    },
    "roc_bert": {
        "pronunciation_vocab_size": 128,
        "shape_vocab_size": 128,
        "shape_embed_dim": 16,
        "pronunciation_embed_dim": 16,
    },
    "regnet": {**_STAGES, "embedding_size": 8, "groups_width": 4},
    "resnet": {**_STAGES, "embedding_size": 8},
    "segformer": {**_STAGES, "num_attention_heads": [1, 2, 2, 4]},
    "swin": _WINDOWS,
    "swinv2": _WINDOWS,
    "wav2vec2": _WAVES,
    "wavlm": _WAVES,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba": {"time_step_rank": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "modernbert": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8},
    "mpt": {"max_seq_len": 64},
    "mobilebert": {"intra_bottleneck_size": 16, "embedding_size": 16, "true_hidden_size": 16},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 8, "chunk_size": 8},
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2},  # or no layer has experts
    "nystromformer": {"num_landmarks": 4, "segment_means_seq_len": 8},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 16},
    "rwkv": {"attention_hidden_size": 32},
    "squeezebert": {f"{x}_groups": 2 for x in ("q", "k", "v", "post_attention", "intermediate", "output")},
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "whisper": {"max_source_positions": 16},
    "yolos": {"image_size": [32, 48], "num_detection_tokens": 6},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "zaya": {"num_experts_per_tok": 1},
    "zamba": {"layers_block_type": ["mamba", "hybrid"], "attention_hidden_size": 64, "attention_head_dim": 16},
}
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
_IMAGES = ("git", "tipsv2")
_OUTPUTS = ("model output", "entries of an embedding")


def config_of(kind: type, **given: Any) -> Any:
    """A small configuration of a class."""
    known = kind().to_dict()  # type: ignore[attr-defined]
    for name, inner in getattr(kind, "sub_configs", {}).items():
        if name not in given and isinstance(known.get(name), dict) and inner is not transformers.AutoConfig:
            given[name] = config_of(inner).to_dict()
    if "q_lora_rank" in known or "kv_lora_rank" in known:
        given.setdefault("num_key_value_heads", 4)  # all heads have their own keys, from one latent
    wanted = {**_BY_NAME, **_TOKENS}
    sizes = {
        name: size for name, size in wanted.items()
        if type(known.get(name)) is int or (name in _OPEN and name in known and known[name] is None)
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
    if sum(v for k, v in vars(config).items() if k in ("num_hidden_layers", "n_layer") and isinstance(v, int)) > 8:
        raise ValueError("no small configuration")
    with torch.device("meta"):
        count = sum(p.numel() for p in model(config).parameters())
    if count > 3_000_000:
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
    elif main == "input_values":
        given = {main: torch.randn(batch, 1000 + 200 * length, generator=generator).to(dtype)}
    elif main == "input_features":
        frames = 2 * config.max_source_positions if hasattr(config, "max_source_positions") else 32 + 4 * length
        given = {main: torch.randn(batch, config.num_mel_bins, frames, generator=generator).to(dtype)}
    else:
        given = tokens(batch, length, pad, seed)
        given |= _beside_text(model, batch, length, generator)
    if config.is_encoder_decoder:
        wide = tokens(batch, length + 1, 0, seed + 1)
        given["decoder_input_ids"] = wide["input_ids"]
    return {name: value for name, value in given.items() if name in taken}


def _beside_text(model: Any, batch: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    """What some families read in addition, so that no part of a model is left out."""
    config, dtype = model.config, next(model.parameters()).dtype
    kind = config.model_type

    def numbers(below: int, *shape: int) -> Tensor:
        return torch.randint(0, below, (batch, *shape), generator=generator)

    if getattr(config, "vision_config", None) is not None and (hasattr(model, "logit_scale") or kind in _IMAGES):
        size = config.vision_config.image_size
        return {"pixel_values": torch.randn(batch, 3, size, size, generator=generator).to(dtype)}
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
