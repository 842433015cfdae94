"""Sizes with which configurations of `transformers` are tiny: by the names that they use, and by family."""

from __future__ import annotations

from typing import Any

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
BY_NAME = {name: size for size, names in SIZES.items() for name in names.split()}
#: Language models that are run with texts alone, although they read images or sounds too. Units around a part that
#: never runs stay where their number is one of its sizes. So these parts have sizes of their own, as they have in the
#: default configurations.
TEXTS_ALONE = [
    "audioflamingo3",
    "gemma3",
    "glmasr",
    "granite_speech",
    "granite_speech_plus",
    "moss_transcribe_diarize",
    "musicflamingo",
    "phi4_multimodal",
    "qwen2_audio",
    "qwen3_asr",
    "shieldgemma2",
    "voxtral",
]
BESIDE_TEXT = {
    "hidden_size": 40, "d_model": 40, "hidden_dim": 40, "encoder_hidden_size": 40, "intermediate_size": 56,
    "encoder_ffn_dim": 56, "num_mel_bins": 24, "image_size": 24, "input_dim": 24,
}  # fmt: skip
#: Sizes that must be given although their default is None.
OPEN = ("head_dim", "n_routed_experts", "num_experts_per_tok", "num_key_value_heads", "vocab_size")
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0, "sep_token_id": 2}
_STAGES: dict[str, Any] = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "image_size": 64}
_EVEN = {"mlp_ratios": [2, 2, 2, 2], "num_attention_heads": [1, 2, 2, 4]}
_WINDOWS = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "patch_size": 4, "window_size": 4}
_WAVES = {"conv_dim": [16] * 7}
_CODES = {"num_codevectors_per_group": 8, "codevector_dim": 16, "proj_codevector_dim": 16, "classifier_proj_size": 16}
_FRAMES = {"subsampling_conv_channels": 8, "num_key_value_heads": 4, "conv_kernel_size": 5}
_BACKBONE = {"model_type": "resnet", "out_features": ["stage4"]}
_DETR: dict[str, Any] = {"num_queries": 6, "backbone_config": _BACKBONE}
_SCALES = ["stage2", "stage3", "stage4"]
_RT_DETR: dict[str, Any] = {
    "encoder_in_channels": [16, 24, 32],
    "encoder_hidden_dim": 32,
    "decoder_in_channels": [32, 32, 32],
    "num_queries": 4,
    "num_denoising": 0,
    "hidden_expansion": 0.5,
    "backbone_config": {"model_type": "rt_detr_resnet", "out_features": _SCALES},
}
_CONFORMER = {"hidden_dim": 32, "dim_head": 8, "input_dim": 16, "context_size": 16, "max_pos_emb": 16}
_DOC = {**_RT_DETR, "backbone_config": {"model_type": "hgnet_v2", "out_features": _SCALES}}
_QUERIES = {"num_queries": 4, "group_detr": 1, "decoder_self_attention_heads": 4, "decoder_cross_attention_heads": 4}
_MBCONV = {
    "kernel_sizes": [3, 5],
    "in_channels": [32, 16],
    "out_channels": [16, 24],
    "strides": [1, 2],
    "num_block_repeats": [1, 1],
    "expand_ratios": [1, 4],
    "width_coefficient": 0.25,
    "depth_coefficient": 1.0,
    "hidden_dim": 320,
}
_ROPES = {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")}
_MIXED = {"layer_types": ["linear_attention", "full_attention"]}
#: What the sizes above do not fit.
SPECIAL: dict[str, dict[str, Any]] = {
    "align": {"projection_dim": 8},
    "align_vision_model": _MBCONV,
    "audio-spectrogram-transformer": {"max_length": 32, "frequency_stride": 8, "time_stride": 8},
    "bailing_hybrid": _MIXED,
    "bamba": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "attn_layer_indices": [1],
        "mamba_chunk_size": 8,
    },
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "bit": {**_STAGES, "embedding_size": 8, "num_groups": 4},
    "blip-2": {
        "num_query_tokens": 4,
        "image_text_hidden_size": 32,
        "qformer_config": {"use_qformer_text_input": True},
    },
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"layer_types": ["full_attention", "sliding_attention"], "rope_parameters": _ROPES},
    "conditional_detr": _DETR,
    "convnext": _STAGES,
    "convnextv2": _STAGES,
    "cvt": {"embed_dim": [8, 16, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 3]},
    "d_fine": {
        **_RT_DETR,
        "lqe_hidden_dim": 8,
        "backbone_config": {"model_type": "hgnet_v2", "out_features": _SCALES},
    },
    "dab-detr": _DETR,
    "data2vec-audio": _WAVES,
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8}},
    "deformable_detr": {
        **_DETR,
        "num_feature_levels": 2,
        "disable_custom_kernels": True,
        "backbone_config": {**_BACKBONE, "out_features": ["stage3", "stage4"]},
    },
    "deimv2": {**_RT_DETR, "lqe_hidden_dim": 8, "backbone_config": {"model_type": "hgnet_v2", "out_features": _SCALES}},
    "detr": _DETR,
    "donut-swin": _WINDOWS,
    "dots1": {"n_shared_experts": 1},
    "efficientnet": _MBCONV,
    "esm": {"mask_token_id": 4, "pad_token_id": 0},
    "esmc": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_chunk_size": 8},
    "falcon_mamba": {"time_step_rank": 4},
    "focalnet": {"embed_dim": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "image_size": 64},
    "fsmt": {"src_vocab_size": 128, "tgt_vocab_size": 128},
    "funnel": {"block_sizes": [1, 1], "d_head": 8},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "laurel_rank": 8,
        "intermediate_size": [48, 48],
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 128,
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "gemma4_text": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128, "num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "granite_speech5_encoder": {"context_size": 16, "num_key_value_heads": 4},
    "granite_speech_encoder": _CONFORMER,
    "granite_speech_plus_encoder": _CONFORMER,
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
        "layer_types": ["mamba", "attention"],
    },
    "hgnet_v2": {
        **_STAGES,
        "hidden_sizes": [8, 16, 24, 32],
        "stem_channels": [3, 8, 8],
        "stage_in_channels": [8, 8, 16, 24],
        "stage_mid_channels": [8, 8, 8, 8],
        "stage_out_channels": [8, 16, 24, 32],
        "stage_num_blocks": [1, 1, 1, 1],
        "stage_numb_of_layers": [2, 2, 2, 2],
    },
    "hiera": {"embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 4], "image_size": [64, 64]},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8, "H_cycles": 1, "L_cycles": 1, "L_bp_cycles": [1]},
    "hubert": _WAVES,
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "mamba_dt_rank": 4},
    "kimi_linear": _MIXED,
    "lasr_encoder": _FRAMES,
    "layoutlmv3": {"coordinate_size": 5, "shape_size": 6, "input_size": 32, "max_2d_position_embeddings": 64},
    "levit": {
        "hidden_sizes": [16, 24, 32],
        "num_attention_heads": [2, 2, 4],
        "depths": [1, 1, 1],
        "key_dim": [8, 8, 8],
        "patch_size": 16,
        "image_size": 64,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 48},
    "longcat_flash": {"expert_ffn_hidden_size": 48, "zero_expert_num": 2},
    "luke": {"entity_vocab_size": 16, "entity_emb_size": 8},
    "lw_detr": {
        **_QUERIES,
        "projector_scale_factors": [1.0],
        "backbone_config": {"model_type": "lw_detr_vit", "image_size": 64, "num_windows": 4},
    },
    "mamba": {"time_step_rank": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "mistral4": {"head_dim": 16},
    "mobilebert": {"intra_bottleneck_size": 16, "embedding_size": 16, "true_hidden_size": 16},
    "mobilenet_v1": {"depth_multiplier": 0.25},
    "mobilevit": {
        "hidden_sizes": [16, 24, 32],
        "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 32],
        "patch_size": 2,
        "image_size": 64,
    },
    "mobilevitv2": {
        "base_attn_unit_dims": [16, 24, 32],
        "n_attn_blocks": [1, 1, 1],
        "width_multiplier": 0.25,
        "patch_size": 2,
        "image_size": 64,
    },
    "modernbert": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "mpt": {"max_seq_len": 64},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 8, "chunk_size": 8},
    "neomme": {"head_dim": 16},
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2},  # or no layer has experts
    "nystromformer": {"num_landmarks": 64, "segment_means_seq_len": 64},
    "parakeet_encoder": _FRAMES,
    "perceiver": {
        "num_latents": 8,
        "d_latents": 32,
        "num_self_attends_per_block": 2,
        "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
    },
    "poolformer": _STAGES,
    "pp_doclayout_v2": {**_DOC, "class_thresholds": [0.5, 0.5], "class_order": [0, 1]},
    "pp_doclayout_v3": _DOC,
    "pp_doclayout_v4": _DOC,
    "pvt": {**_STAGES, **_EVEN},
    "pvt_v2": {**_STAGES, **_EVEN, "image_size": [64, 64]},
    "qwen3_5_moe_text": _MIXED,
    "qwen3_5_text": _MIXED,
    "qwen3_asr_encoder": {"downsample_hidden_size": 20, "output_dim": 32},
    "qwen3_next": _MIXED,
    "qwen4_exp_text": {
        **_MIXED,
        "hc_lowrank": 8,
        "ngram_vocab_size_base": 200,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 16},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "local"],
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 16],
        "local_attn_chunk_length": 8,
        "feed_forward_size": 48,
    },
    "regnet": {**_STAGES, "embedding_size": 8, "groups_width": 4},
    "resnet": {**_STAGES, "embedding_size": 8},
    "rf_detr": _QUERIES,
    "roc_bert": {
        "pronunciation_vocab_size": 128,
        "shape_vocab_size": 128,
        "shape_embed_dim": 16,
        "pronunciation_embed_dim": 16,
    },
    "rt_detr": _RT_DETR,
    "rt_detr_resnet": {**_STAGES, "embedding_size": 8},
    "rt_detr_v2": _RT_DETR,
    "rwkv": {"attention_hidden_size": 32},
    "segformer": {**_STAGES, "num_attention_heads": [1, 2, 2, 4]},
    "shieldgemma2": {"yes_token_index": 5, "no_token_index": 6},
    "siglip2_vision_model": {"num_patches": 16},
    "speech_to_text": {"conv_channels": 16, "input_feat_per_channel": 16, "max_source_positions": 64},
    "speecht5": {
        **_WAVES,
        "speech_decoder_prenet_units": 16,
        "speech_decoder_postnet_units": 16,
        "speaker_embedding_dim": 16,
        "max_speech_positions": 64,
    },
    "squeezebert": {f"{x}_groups": 2 for x in ("q", "k", "v", "post_attention", "intermediate", "output")},
    "swiftformer": {"embed_dims": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "image_size": 64},
    "swin": _WINDOWS,
    "swinv2": _WINDOWS,
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "table-transformer": _DETR,
    "textnet": {"hidden_sizes": [8, 8, 16, 24, 32], "stem_out_channels": 8, "image_size": [64, 64]},
    "timm_wrapper": {"architecture": "test_resnet"},
    "unispeech": {**_WAVES, **_CODES},
    "unispeech-sat": {**_WAVES, **_CODES, "xvector_output_dim": 16, "tdnn_dim": [16] * 5},
    "videoprism_vision_model": {
        "num_frames": 4,
        "tubelet_size": [1, 8, 8],
        "num_spatial_layers": 2,
        "num_temporal_layers": 2,
    },
    "wav2vec2": _WAVES,
    "wav2vec2-bert": {"feature_projection_input_dim": 16, "conv_depthwise_kernel_size": 5, "classifier_proj_size": 16},
    "wav2vec2-conformer": {**_WAVES, **_CODES, "conv_depthwise_kernel_size": 5},
    "wavlm": _WAVES,
    "whisper": {"max_source_positions": 16},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "chunk_size": 8},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "yolos": {"image_size": [32, 48], "num_detection_tokens": 6},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "mamba_d_state": 8,
        "chunk_size": 8,
        "adapter_rank": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}
