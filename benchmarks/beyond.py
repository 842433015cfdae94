"""Architectures that do not classify images: detectors, segmenters, video, audio, diffusion, and everyday networks.

Each is a function that returns the model, an example, and inputs of another size. Packages that are not installed are
left out. The networks at the end are our own: small look-alikes of what people write themselves.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: The model, an example, and inputs of another size.
Built = tuple[nn.Module, Any, Any]


def catalogue() -> dict[str, Callable[[], Built]]:
    """Every architecture by name, `package:model`."""
    found: dict[str, Callable[[], Built]] = {}
    for package, members in (
        ("torchvision", _torchvision),
        ("ultralytics", _ultralytics),
        ("segmentation_models_pytorch", _smp),
        ("monai", _monai),
        ("torchaudio", _torchaudio),
        ("diffusers", _diffusers),
        ("transformers", _transformers),
    ):
        if importlib.util.find_spec(package) is not None:
            short = {"segmentation_models_pytorch": "smp"}.get(package, package)
            found |= {f"{short}:{name}": make for name, make in members()}
    return found | {f"own:{name}": partial(_own, kind, shape, other) for name, (kind, shape, other) in OWN.items()}


def _images(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape)))


# -- torchvision -------------------------------------------------------------------------------------------------------
def _torchvision() -> Iterator[tuple[str, Callable[[], Built]]]:
    import torchvision

    models = torchvision.models
    for name in models.list_models(module=models.detection):
        yield name, partial(_detector, name)
    for name in models.list_models(module=models.segmentation):
        yield name, partial(_of_torchvision, name, (1, 3, 64, 64), (2, 3, 96, 64), num_classes=6)
    for name in models.list_models(module=models.video):
        frames = 16 if name.startswith(("mvit", "s3d")) else 4
        side = 224 if name.startswith(("mvit", "s3d")) else 64
        other = (
            (1, 3, frames, side, side) if name.startswith("mvit") else (2, 3, frames, side + max(32, side // 2), side)
        )
        yield name, partial(_of_torchvision, name, (1, 3, frames, side, side), other, num_classes=6)
    for name in models.list_models(module=models.optical_flow):
        yield name, partial(_flow, name)


def _of_torchvision(name: str, shape: tuple[int, ...], other: tuple[int, ...], **given: Any) -> Built:
    import torchvision

    if name.startswith(("fcn", "deeplab", "lraspp")):
        given["weights_backbone"] = None
    return torchvision.models.get_model(name, weights=None, **given), _images(*shape), _images(*other)


def _detector(name: str) -> Built:
    import torchvision

    given: dict[str, Any] = {} if name.startswith("ssd") else {"min_size": 96, "max_size": 160}
    if "rcnn" in name:
        given |= {"rpn_post_nms_top_n_test": 20, "box_detections_per_img": 5, "box_score_thresh": 0.0}
    model = torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=5, **given)
    return model, ([_images(3, 96, 128)],), ([_images(3, 120, 96), _images(3, 96, 140)],)


def _flow(name: str) -> Built:
    import torchvision

    model = torchvision.models.get_model(name, weights=None)
    return model, (_images(1, 3, 128, 128), _images(1, 3, 128, 128) * 0.9), (_images(1, 3, 128, 160),) * 2


# -- ultralytics -------------------------------------------------------------------------------------------------------
_YOLO = [
    "yolov3-tiny",
    "yolov5n",
    "yolov6n",
    "yolov8n",
    "yolov8n-seg",
    "yolov8n-pose",
    "yolov8n-obb",
    "yolov8n-cls",
    "yolov8n-p2",
    "yolov8n-ghost",
    "yolov9t",
    "yolov9c-seg",
    "yolov10n",
    "yolo11n",
    "yolo11n-seg",
    "yolo11n-pose",
    "yolo11n-obb",
    "yolo11n-cls",
    "yolo12n",
    "yolo12n-seg",
    "yolo26n",
    "yolo26n-seg",
    "yolo26n-pose",
    "yolo26n-obb",
    "yolo26n-cls",
    "yolo26n-sem",
    "yolov8n-rtdetr",
    "rtdetr-resnet50",
    "rtdetr-l",
]


def _ultralytics() -> Iterator[tuple[str, Callable[[], Built]]]:
    for name in _YOLO:
        yield name, partial(_yolo, name)


def _yolo(name: str) -> Built:
    from ultralytics.nn import tasks

    ends = {"-seg": "Segmentation", "-pose": "Pose", "-obb": "OBB", "-cls": "Classification", "-sem": "Semantic"}
    end = next((kind for tail, kind in ends.items() if name.endswith(tail)), "Detection")
    kind = getattr(tasks, "RTDETRDetectionModel" if "rtdetr" in name else f"{end}Model", None)
    if kind is None:
        kind = getattr(tasks, f"{end}SegmentationModel")
    model = kind(f"{name}.yaml", verbose=False)
    return model, _images(1, 3, 64, 64), _images(2, 3, 96, 64)


# -- segmentation_models_pytorch ---------------------------------------------------------------------------------------
def _smp() -> Iterator[tuple[str, Callable[[], Built]]]:
    for arch in [
        "Unet",
        "UnetPlusPlus",
        "MAnet",
        "Linknet",
        "FPN",
        "PSPNet",
        "PAN",
        "DeepLabV3",
        "DeepLabV3Plus",
        "UPerNet",
        "Segformer",
    ]:
        yield f"{arch}-resnet18", partial(_of_smp, arch, "resnet18", 256 if arch == "PAN" else 64)
    for encoder in [
        "mobilenet_v2",
        "efficientnet-b0",
        "densenet121",
        "vgg11_bn",
        "se_resnet50",
        "mit_b0",
        "xception",
        "mobileone_s0",
    ]:
        yield f"Unet-{encoder}", partial(_of_smp, "Unet", encoder)
    for arch in ["DeepLabV3Plus", "FPN", "UPerNet"]:
        yield f"{arch}-mobilenet_v2", partial(_of_smp, arch, "mobilenet_v2")
    yield "DPT-vit_tiny", partial(_of_smp, "DPT", "tu-vit_tiny_patch16_224")


def _of_smp(arch: str, encoder: str, side: int = 64) -> Built:
    smp = importlib.import_module("segmentation_models_pytorch")
    model = getattr(smp, arch)(encoder, encoder_weights=None, classes=4)
    if encoder.startswith("tu-vit"):
        return model, _images(1, 3, 224, 224), _images(2, 3, 224, 224)
    return model, _images(1, 3, side, side), _images(2, 3, side + max(32, side // 2), side)


# -- monai -------------------------------------------------------------------------------------------------------------
_FLAT, _SOLID = (
    {"spatial_dims": 2, "in_channels": 1, "out_channels": 3},
    {"spatial_dims": 3, "in_channels": 1, "out_channels": 3},
)
_STEPS = {"channels": (8, 16, 32), "strides": (2, 2)}
_MONAI: dict[str, tuple[str, dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "UNet": ("UNet", {**_FLAT, **_STEPS, "num_res_units": 2}, (1, 1, 32, 32), (2, 1, 48, 32)),
    "UNet-3d": ("UNet", {**_SOLID, **_STEPS}, (1, 1, 16, 16, 16), (2, 1, 16, 24, 16)),
    "UNet-batch": ("UNet", {**_FLAT, **_STEPS, "norm": "batch"}, (1, 1, 32, 32), (2, 1, 48, 32)),
    "BasicUNet": ("BasicUNet", {**_FLAT, "features": (8, 8, 16, 16, 32, 8)}, (1, 1, 32, 32), (2, 1, 48, 32)),
    "BasicUNetPlusPlus": (
        "BasicUNetPlusPlus",
        {**_FLAT, "features": (8, 8, 16, 16, 32, 8)},
        (1, 1, 32, 32),
        (2, 1, 48, 32),
    ),
    "AttentionUnet": ("AttentionUnet", {**_FLAT, **_STEPS}, (1, 1, 32, 32), (2, 1, 48, 32)),
    "SegResNet": ("SegResNet", {**_FLAT, "init_filters": 8}, (1, 1, 32, 32), (2, 1, 48, 32)),
    "SegResNet-3d": ("SegResNet", {**_SOLID, "init_filters": 8}, (1, 1, 16, 16, 16), (2, 1, 16, 24, 16)),
    "SegResNetDS": ("SegResNetDS", {**_FLAT, "init_filters": 8}, (1, 1, 64, 64), (2, 1, 96, 64)),
    "VNet": ("VNet", {"spatial_dims": 2, "in_channels": 1, "out_channels": 3}, (1, 1, 32, 32), (2, 1, 48, 32)),
    "DynUNet": (
        "DynUNet",
        {
            **_FLAT,
            "kernel_size": [3, 3, 3],
            "strides": [1, 2, 2],
            "upsample_kernel_size": [2, 2],
            "filters": [8, 16, 32],
        },
        (1, 1, 32, 32),
        (2, 1, 48, 32),
    ),
    "FlexibleUNet": (
        "FlexibleUNet",
        {"in_channels": 3, "out_channels": 3, "backbone": "efficientnet-b0"},
        (1, 3, 64, 64),
        (2, 3, 96, 64),
    ),
    "HighResNet": ("HighResNet", _FLAT, (1, 1, 24, 24), (2, 1, 32, 24)),
    "UNETR": (
        "UNETR",
        {
            "in_channels": 1,
            "out_channels": 3,
            "img_size": 32,
            "spatial_dims": 2,
            "feature_size": 8,
            "hidden_size": 48,
            "mlp_dim": 96,
            "num_heads": 4,
        },
        (1, 1, 32, 32),
        (2, 1, 32, 32),
    ),
    "SwinUNETR": (
        "SwinUNETR",
        {"in_channels": 1, "out_channels": 3, "spatial_dims": 2, "feature_size": 12},
        (1, 1, 64, 64),
        (2, 1, 64, 64),
    ),
    "AutoEncoder": ("AutoEncoder", {**_FLAT, "channels": (8, 16), "strides": (2, 2)}, (1, 1, 32, 32), (2, 1, 48, 32)),
    "VarAutoEncoder": (
        "VarAutoEncoder",
        {
            "spatial_dims": 2,
            "in_shape": (1, 32, 32),
            "out_channels": 1,
            "latent_size": 8,
            "channels": (8, 16),
            "strides": (2, 2),
        },
        (1, 1, 32, 32),
        (2, 1, 32, 32),
    ),
    "Discriminator": ("Discriminator", {"in_shape": (1, 32, 32), **_STEPS}, (1, 1, 32, 32), (2, 1, 32, 32)),
    "Regressor": ("Regressor", {"in_shape": (1, 32, 32), "out_shape": (2,), **_STEPS}, (1, 1, 32, 32), (2, 1, 32, 32)),
    "DenseNet121-3d": ("DenseNet121", _SOLID, (1, 1, 32, 32, 32), (2, 1, 32, 48, 32)),
    "resnet18-3d": (
        "resnet18",
        {"spatial_dims": 3, "n_input_channels": 1, "num_classes": 3},
        (1, 1, 32, 32, 32),
        (2, 1, 32, 48, 32),
    ),
    "ViTAutoEnc": (
        "ViTAutoEnc",
        {
            "in_channels": 1,
            "img_size": (32, 32),
            "patch_size": (4, 4),
            "hidden_size": 48,
            "mlp_dim": 96,
            "num_heads": 4,
            "num_layers": 2,
            "spatial_dims": 2,
        },
        (1, 1, 32, 32),
        (2, 1, 32, 32),
    ),
    "TorchVisionFCModel": (
        "TorchVisionFCModel",
        {"model_name": "resnet18", "num_classes": 3, "pool": None},
        (1, 3, 64, 64),
        (2, 3, 64, 64),
    ),
}


def _monai() -> Iterator[tuple[str, Callable[[], Built]]]:
    for name, (kind, given, shape, other) in _MONAI.items():
        yield name, partial(_of_monai, kind, given, shape, other)


def _of_monai(kind: str, given: dict[str, Any], shape: tuple[int, ...], other: tuple[int, ...]) -> Built:
    nets = importlib.import_module("monai.networks.nets")
    return getattr(nets, kind)(**given), _images(*shape), _images(*other)


# -- torchaudio --------------------------------------------------------------------------------------------------------
def _torchaudio() -> Iterator[tuple[str, Callable[[], Built]]]:
    for name in [
        "Conformer",
        "Conformer-conv_first",
        "Wav2Letter",
        "DeepSpeech",
        "ConvTasNet",
        "HDemucs",
        "wav2vec2",
        "hubert",
        "wavlm",
        "Emformer",
    ]:
        yield name, partial(_of_torchaudio, name)


def _of_torchaudio(name: str) -> Built:
    models = _audio_models()
    if name.startswith("Conformer"):
        model = models.Conformer(16, 4, 32, 2, 7, convolution_first=name.endswith("first"))
        return model, (_images(2, 12, 16), torch.tensor([12, 9])), (_images(2, 20, 16), torch.tensor([20, 14]))
    if name == "Wav2Letter":
        return (
            models.Wav2Letter(num_classes=8, input_type="mfcc", num_features=13),
            _images(1, 13, 60),
            _images(2, 13, 90),
        )
    if name == "DeepSpeech":
        return models.DeepSpeech(20, n_hidden=32, n_class=8), _images(1, 1, 12, 20), _images(2, 1, 18, 20)
    if name == "ConvTasNet":
        small = {
            "enc_num_feats": 32,
            "msk_num_feats": 16,
            "msk_num_hidden_feats": 24,
            "msk_num_layers": 2,
            "msk_num_stacks": 2,
        }
        return models.ConvTasNet(**small), _images(1, 1, 320), _images(2, 1, 480)
    if name == "HDemucs":
        return models.HDemucs(["a", "b"], channels=8, nfft=256, depth=4), _images(1, 2, 16384), _images(2, 2, 20480)
    if name == "Emformer":
        lengths = torch.tensor([12])
        return (
            models.Emformer(16, 4, 32, 2, 4, right_context_length=1),
            (_images(1, 13, 16), lengths),
            (_images(1, 21, 16), lengths + 8),
        )
    layers = [(16, 10, 5), (16, 3, 2), (16, 3, 2)]
    common: dict[str, Any] = {
        "extractor_mode": "group_norm", "extractor_conv_layer_config": layers, "extractor_conv_bias": False,
        "encoder_embed_dim": 24, "encoder_projection_dropout": 0.0, "encoder_pos_conv_kernel": 8,
        "encoder_pos_conv_groups": 4, "encoder_num_layers": 2, "encoder_num_heads": 4, "encoder_attention_dropout": 0.0,
        "encoder_ff_interm_features": 48, "encoder_ff_interm_dropout": 0.0, "encoder_dropout": 0.0,
        "encoder_layer_norm_first": False, "encoder_layer_drop": 0.0, "aux_num_out": 8,
    }  # fmt: skip
    if name == "wavlm":
        common |= {"encoder_num_buckets": 16, "encoder_max_distance": 32}
        return models.wavlm_model(**common), _images(1, 1000), _images(2, 1400)
    return models.wav2vec2_model(**common), _images(1, 1000), _images(2, 1400)


def _audio_models() -> Any:
    """The models alone: the package refuses a torch that was built with another CUDA."""
    try:
        return importlib.import_module("torchaudio.models")
    except (RuntimeError, OSError, ImportError):
        spec = importlib.util.find_spec("torchaudio")
        assert spec is not None
        assert spec.origin is not None
        bare = types.ModuleType("torchaudio")
        bare.__path__, bare.__spec__ = [str(Path(spec.origin).parent)], spec  # it is looked for again
        sys.modules["torchaudio"] = bare
        return importlib.import_module("torchaudio.models")


# -- diffusers ---------------------------------------------------------------------------------------------------------
_BLOCKS = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}
_TEXT = {"encoder_hidden_states": (1, 5, 16)}


def _diffusers() -> Iterator[tuple[str, Callable[[], Built]]]:
    attended = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    crossed = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 16,
        "attention_head_dim": 4,
    }
    wide = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    transformer = {
        "num_attention_heads": 4,
        "attention_head_dim": 4,
        "num_layers": 2,
        "sample_size": 8,
        "patch_size": 2,
    }
    yield from (
        ("UNet2DModel", partial(_of_diffusers, "UNet2DModel", {**_BLOCKS, **attended, "attention_head_dim": 4})),
        (
            "UNet2DModel-plain",
            partial(
                _of_diffusers,
                "UNet2DModel",
                {**_BLOCKS, "down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2},
            ),
        ),
        ("UNet2DConditionModel", partial(_of_diffusers, "UNet2DConditionModel", {**_BLOCKS, **crossed}, 4, _TEXT)),
        ("AutoencoderKL", partial(_of_diffusers, "AutoencoderKL", {**_BLOCKS, **wide}, timed=False)),
        (
            "AutoencoderTiny",
            partial(
                _of_diffusers,
                "AutoencoderTiny",
                {
                    "encoder_block_out_channels": (8, 8),
                    "decoder_block_out_channels": (8, 8),
                    "num_encoder_blocks": (1, 1),
                    "num_decoder_blocks": (1, 1),
                },
                timed=False,
            ),
        ),
        ("VQModel", partial(_of_diffusers, "VQModel", {**_BLOCKS, **wide, "num_vq_embeddings": 16}, timed=False)),
        (
            "AsymmetricAutoencoderKL",
            partial(
                _of_diffusers,
                "AsymmetricAutoencoderKL",
                {**wide, "down_block_out_channels": (16, 32), "up_block_out_channels": (16, 32), "norm_num_groups": 4},
                timed=False,
            ),
        ),
        (
            "DiTTransformer2DModel",
            partial(_dit, {**transformer, "in_channels": 4, "norm_num_groups": 4, "num_embeds_ada_norm": 10}),
        ),
        (
            "PixArtTransformer2DModel",
            partial(
                _of_diffusers,
                "PixArtTransformer2DModel",
                {
                    **transformer,
                    "in_channels": 4,
                    "out_channels": 8,
                    "cross_attention_dim": 16,
                    "caption_channels": 16,
                    "use_additional_conditions": False,
                },
                4,
                _TEXT,
                side=8,
            ),
        ),
        (
            "SD3Transformer2DModel",
            partial(
                _of_diffusers,
                "SD3Transformer2DModel",
                {
                    **transformer,
                    "in_channels": 4,
                    "out_channels": 4,
                    "joint_attention_dim": 16,
                    "caption_projection_dim": 16,
                    "pooled_projection_dim": 12,
                },
                4,
                {**_TEXT, "pooled_projections": (1, 12)},
                side=8,
            ),
        ),
        (
            "UNet1DModel",
            partial(
                _of_diffusers,
                "UNet1DModel",
                {"block_out_channels": (32, 32, 64), "in_channels": 2, "out_channels": 2, "extra_in_channels": 64},
                2,
                line=True,
            ),
        ),
        (
            "ControlNetModel",
            partial(
                _of_diffusers,
                "ControlNetModel",
                {
                    **_BLOCKS,
                    "down_block_types": crossed["down_block_types"],
                    "cross_attention_dim": 16,
                    "attention_head_dim": 4,
                    "conditioning_embedding_out_channels": (8, 16),
                },
                4,
                {**_TEXT, "controlnet_cond": (1, 3, 32, 32)},
            ),
        ),
        (
            "UNet3DConditionModel",
            partial(
                _of_diffusers,
                "UNet3DConditionModel",
                {
                    **_BLOCKS,
                    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
                    "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
                    "cross_attention_dim": 16,
                    "attention_head_dim": 8,
                },
                4,
                _TEXT,
                film=True,
            ),
        ),
        (
            "T2IAdapter",
            partial(_of_diffusers, "T2IAdapter", {"channels": (16, 32), "num_res_blocks": 1}, timed=False, side=64),
        ),
        ("PriorTransformer", partial(_prior)),
    )


def _of_diffusers(
    kind: str,
    given: dict[str, Any],
    channels: int = 3,
    more: dict[str, tuple[int, ...]] | None = None,
    *,
    timed: bool = True,
    side: int = 16,
    line: bool = False,
    film: bool = False,
) -> Built:
    diffusers = importlib.import_module("diffusers")
    model = getattr(diffusers, kind)(**given)
    free = kind not in ("PixArtTransformer2DModel", "SD3Transformer2DModel")

    def inputs(batch: int, *size: int) -> Any:
        x = _images(batch, channels, *size)
        extra = {name: _images(batch, *shape[1:]) for name, shape in (more or {}).items()}
        if not timed:
            return x
        first = "hidden_states" if kind in ("PixArtTransformer2DModel", "SD3Transformer2DModel") else "sample"
        steps = torch.full((batch,), 3.0) if first == "sample" else torch.full((batch,), 3)
        return {first: x, "timestep": steps, **extra}

    if line:
        return model, inputs(1, 64), inputs(2, 96)
    if film:
        return model, inputs(1, 2, 8, 8), inputs(2, 3, 8, 16)
    bare = kind != "ControlNetModel"
    return model, inputs(1, side, side), inputs(2, side + (8 if free and bare else 0), side)


def _dit(given: dict[str, Any]) -> Built:
    diffusers = importlib.import_module("diffusers")
    model = diffusers.DiTTransformer2DModel(**given)
    inputs = [
        {"hidden_states": _images(n, 4, 8, 8), "timestep": torch.full((n,), 3), "class_labels": torch.full((n,), 1)}
        for n in (1, 2)
    ]
    return model, *inputs


def _prior() -> Built:
    diffusers = importlib.import_module("diffusers")
    model = diffusers.PriorTransformer(
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        embedding_dim=16,
        num_embeddings=7,
        additional_embeddings=4,
    )
    inputs = [
        {
            "hidden_states": _images(n, 16),
            "timestep": torch.full((n,), 3),
            "proj_embedding": _images(n, 16),
            "encoder_hidden_states": _images(n, 7, 16),
        }
        for n in (1, 2)
    ]
    return model, *inputs


# -- transformers ------------------------------------------------------------------------------------------------------
_SWIN = {"embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [2, 2, 4, 4], "window_size": 4, "image_size": 64}
_QUERIES = {
    "num_queries": 6,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
}
_VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}
_STAGED = {
    "num_encoder_blocks": 4,
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [8, 16, 24, 32],
    "num_attention_heads": [1, 2, 2, 4],
    "sr_ratios": [8, 4, 2, 1],
    "decoder_hidden_size": 32,
}
_RT_DETR: dict[str, Any] = {
    "encoder_hidden_dim": 32,
    "encoder_in_channels": [16, 24, 32],
    "d_model": 32,
    "num_queries": 6,
    "decoder_layers": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_in_channels": [32] * 3,
    "hidden_expansion": 0.5,
    "num_denoising": 0,
}
_SAM = {"image_size": 64, "patch_size": 8}
_HF: dict[str, tuple[str, dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "detr": ("DetrForObjectDetection", _QUERIES, (1, 3, 64, 64), (2, 3, 96, 64)),
    "detr-seg": (
        "DetrForSegmentation",
        {**_QUERIES, "d_model": 64, "decoder_attention_heads": 8, "encoder_attention_heads": 8},
        (1, 3, 64, 64),
        (2, 3, 96, 64),
    ),
    "conditional_detr": ("ConditionalDetrForObjectDetection", _QUERIES, (1, 3, 64, 64), (2, 3, 96, 64)),
    "table-transformer": ("TableTransformerForObjectDetection", _QUERIES, (1, 3, 64, 64), (2, 3, 96, 64)),
    "deformable_detr": (
        "DeformableDetrForObjectDetection",
        {**_QUERIES, "decoder_layers": 2, "disable_custom_kernels": True},
        (1, 3, 128, 128),
        (2, 3, 160, 128),
    ),
    "rt_detr": ("RTDetrForObjectDetection", _RT_DETR, (1, 3, 64, 64), (2, 3, 96, 64)),
    "rt_detr_v2": ("RTDetrV2ForObjectDetection", _RT_DETR, (1, 3, 64, 64), (2, 3, 96, 64)),
    "yolos": (
        "YolosForObjectDetection",
        {**_VIT, "image_size": [32, 32], "num_detection_tokens": 5},
        (1, 3, 32, 32),
        (2, 3, 32, 32),
    ),
    "segformer": ("SegformerForSemanticSegmentation", _STAGED, (1, 3, 64, 64), (2, 3, 96, 64)),
    "upernet-convnext": (
        "UperNetForSemanticSegmentation",
        {"backbone": "convnext", "hidden_size": 32, "auxiliary_in_channels": 24, "use_auxiliary_head": False},
        (1, 3, 64, 64),
        (2, 3, 96, 64),
    ),
    "beit-seg": (
        "BeitForSemanticSegmentation",
        {
            **_VIT,
            "image_size": 64,
            "patch_size": 16,
            "num_hidden_layers": 4,
            "out_indices": [0, 1, 2, 3],
            "use_auxiliary_head": False,
            "use_relative_position_bias": False,
        },
        (1, 3, 64, 64),
        (2, 3, 64, 64),
    ),
    "mobilevit-seg": (
        "MobileViTForSemanticSegmentation",
        {
            "hidden_sizes": [16, 24, 32],
            "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 40],
            "num_attention_heads": 4,
            "aspp_out_channels": 24,
            "image_size": 64,
        },
        (1, 3, 64, 64),
        (2, 3, 64, 64),
    ),
    "mobilenet_v2-seg": (
        "MobileNetV2ForSemanticSegmentation",
        {"depth_multiplier": 0.35},
        (1, 3, 64, 64),
        (2, 3, 96, 64),
    ),
    "data2vec-seg": (
        "Data2VecVisionForSemanticSegmentation",
        {
            **_VIT,
            "image_size": 64,
            "patch_size": 16,
            "num_hidden_layers": 4,
            "out_indices": [0, 1, 2, 3],
            "use_auxiliary_head": False,
        },
        (1, 3, 64, 64),
        (2, 3, 64, 64),
    ),
    "glpn": ("GLPNForDepthEstimation", {**_STAGED, "decoder_hidden_size": 16}, (1, 3, 64, 64), (2, 3, 96, 64)),
    "dpt": (
        "DPTForDepthEstimation",
        {
            **_VIT,
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 16, 24, 32],
            "fusion_hidden_size": 16,
            "is_hybrid": False,
        },
        (1, 3, 32, 32),
        (2, 3, 32, 32),
    ),
    "vitmatte-like": (
        "ViTMAEForPreTraining",
        {
            **_VIT,
            "decoder_hidden_size": 24,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 4,
            "decoder_intermediate_size": 32,
        },
        (1, 3, 32, 32),
        (2, 3, 32, 32),
    ),
    "videomae": ("VideoMAEForVideoClassification", {**_VIT, "num_frames": 4}, (1, 4, 3, 32, 32), (2, 4, 3, 32, 32)),
    "timesformer": (
        "TimesformerForVideoClassification",
        {**_VIT, "num_frames": 4},
        (1, 4, 3, 32, 32),
        (2, 4, 3, 32, 32),
    ),
    "vivit": (
        "VivitForVideoClassification",
        {**_VIT, "num_frames": 4, "tubelet_size": [2, 8, 8]},
        (1, 4, 3, 32, 32),
        (2, 4, 3, 32, 32),
    ),
    "swin2sr": (
        "Swin2SRForImageSuperResolution",
        {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "image_size": 16},
        (1, 3, 16, 16),
        (2, 3, 24, 16),
    ),
    "dinov2": ("Dinov2Model", {**_VIT, "mlp_ratio": 2}, (1, 3, 32, 32), (2, 3, 32, 32)),
    "vit-embedding": ("ViTModel", _VIT, (1, 3, 32, 32), (2, 3, 32, 32)),
    "clip-vision": ("CLIPVisionModelWithProjection", {**_VIT, "projection_dim": 16}, (1, 3, 32, 32), (2, 3, 32, 32)),
    "superpoint": (
        "SuperPointForKeypointDetection",
        {
            "encoder_hidden_sizes": [8, 8, 16, 16],
            "decoder_hidden_size": 16,
            "keypoint_decoder_dim": 65,
            "descriptor_decoder_dim": 16,
        },
        (1, 3, 64, 64),
        (2, 3, 96, 64),
    ),
    "vitpose": ("VitPoseForPoseEstimation", {}, (1, 3, 256, 192), (2, 3, 256, 192)),
    "sam": (
        "SamModel",
        {
            "vision_config": {**_SAM, "hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "mlp_dim": 48,
                              "num_attention_heads": 4, "window_size": 4, "global_attn_indexes": [1],
                              "num_pos_feats": 8},
            "prompt_encoder_config": {**_SAM, "hidden_size": 16, "mask_input_channels": 12},
            "mask_decoder_config": {"hidden_size": 16, "mlp_dim": 24, "num_attention_heads": 2, "iou_head_depth": 2,
                                    "iou_head_hidden_dim": 20},
        },
        (1, 3, 64, 64),
        (2, 3, 64, 64),
    ),
}  # fmt: skip


def _transformers() -> Iterator[tuple[str, Callable[[], Built]]]:
    for name, (kind, given, shape, other) in _HF.items():
        yield name, partial(_of_transformers, kind, dict(given), shape, other)


def _of_transformers(kind: str, given: dict[str, Any], shape: tuple[int, ...], other: tuple[int, ...]) -> Built:
    transformers = importlib.import_module("transformers")
    model = getattr(transformers, kind)
    small = {"embedding_size": 16, "hidden_sizes": [16, 16, 24, 32], "depths": [1, 1, 1, 1], "out_features": ["stage4"]}
    if given.pop("backbone", "") == "convnext":
        stages = ["stage1", "stage2", "stage3", "stage4"]
        given["backbone_config"] = transformers.ConvNextConfig(
            hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], out_features=stages
        )
    elif "Deformable" in kind:
        given["backbone_config"] = transformers.ResNetConfig(**small | {"out_features": ["stage2", "stage3", "stage4"]})
    elif "RTDetr" in kind:
        given["backbone_config"] = transformers.RTDetrResNetConfig(
            **small | {"out_features": ["stage2", "stage3", "stage4"], "layer_type": "basic"}
        )
    elif "use_timm_backbone" in given:
        stages = ["stage1", "stage2", "stage3", "stage4"] if "Segmentation" in kind else ["stage4"]
        given["backbone_config"] = transformers.ResNetConfig(**small | {"out_features": stages})
    elif kind.startswith("VitPose"):
        given["backbone_config"] = transformers.VitPoseBackboneConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, out_indices=[2]
        )
    config = model.config_class(**given)
    config.num_labels = 4
    inputs = [{"pixel_values": _images(*sizes)} for sizes in (shape, other)]
    if kind == "SamModel":  # two points of an image, and a first mask
        prompts = [
            {"input_points": 64 * torch.rand(n, 1, 2, 2), "input_masks": torch.rand(n, 1, 32, 32)} for n in (1, 2)
        ]
        inputs = [given | prompt for given, prompt in zip(inputs, prompts, strict=True)]
    return model(config), inputs[0], inputs[1]


# -- our own -----------------------------------------------------------------------------------------------------------
class UNet(nn.Module):
    """Two levels down and up, with skips."""

    def __init__(self, classes: int = 3, up: str = "transposed") -> None:
        super().__init__()
        self.one, self.two, self.three = (_block(a, b) for a, b in ((3, 12), (12, 24), (24, 48)))
        self.up = (
            nn.ConvTranspose2d(48, 24, 2, 2)
            if up == "transposed"
            else nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(48, 24, 1))
        )
        self.four, self.five, self.head = _block(48, 24), _block(36, 12), nn.Conv2d(12, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.one(x)
        b = self.two(F.max_pool2d(a, 2))
        c = self.three(F.max_pool2d(b, 2))
        d = self.four(torch.cat([self.up(c), b], 1))
        return self.head(self.five(torch.cat([F.interpolate(d, scale_factor=2.0, mode="bilinear"), a], 1)))


def _block(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
        nn.Conv2d(after, after, 3, padding=1),
        nn.ReLU(),
    )


class PointNet(nn.Module):
    """Points as sets: shared layers, a maximum, and a matrix that turns the points."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU())
        self.matrix = nn.Linear(16, 9)
        self.body = nn.Sequential(nn.Conv1d(3, 24, 1), nn.ReLU(), nn.Conv1d(24, 48, 1), nn.ReLU())
        self.points = nn.Sequential(nn.Conv1d(72, 24, 1), nn.ReLU(), nn.Conv1d(24, 5, 1))

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.bmm(self.matrix(self.turn(x).max(2)[0]).view(-1, 3, 3), x)
        local = self.body[:2](turned)
        whole = self.body[2:](local).max(2, keepdim=True)[0].expand(-1, -1, x.shape[2])
        return self.points(torch.cat([local, whole], 1))


class Generator(nn.Module):
    """DCGAN."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.ConvTranspose2d(16, 32, 4),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.ConvTranspose2d(32, 16, 4, 2, 1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 3, 4, 2, 1),
            nn.Tanh(),
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.body(z[:, :, None, None])


class SuperResolution(nn.Module):
    """EDSR with sub-pixel convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.tail = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 12, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 16, 3, padding=1)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        for block in self.blocks:
            x = x + 0.1 * block(x)
        return F.pixel_shuffle(self.tail(x), 2)


class Recurrent(nn.Module):
    """Convolutions, then a recurrent layer, then one answer per step."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.conv, self.body, self.head = (
            nn.Conv1d(8, 24, 3, padding=1),
            kind(24, 32, batch_first=True),
            nn.Linear(32, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.conv(x).relu().transpose(1, 2))[0])


class Variational(nn.Module):
    """A variational autoencoder: noise in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mean, self.spread = (
            nn.Sequential(nn.Linear(20, 48), nn.ReLU()),
            nn.Linear(48, 8),
            nn.Linear(48, 8),
        )
        self.decoder = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 20))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x)
        mean, spread = self.mean(hidden), self.spread(hidden)
        return self.decoder(mean + torch.randn_like(mean) * (0.5 * spread).exp()), mean, spread


class CenterNet(nn.Module):
    """An anchor-free detector: three maps in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.up = _block(3, 24), nn.ConvTranspose2d(24, 16, 4, 2, 1)
        self.heat, self.size, self.offset = (
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, n, 1)) for n in (4, 2, 2)
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.up(F.max_pool2d(self.body(x), 2))
        return {"heat": self.heat(x).sigmoid(), "size": self.size(x), "offset": self.offset(x)}


class Pyramid(nn.Module):
    """Feature maps of several sizes and one head for all of them, as in RetinaNet; a list of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = _block(3, 16), _block(16, 32)
        self.sides, self.head = (
            nn.ModuleList([nn.Conv2d(16, 24, 1), nn.Conv2d(32, 24, 1)]),
            nn.Sequential(
                nn.Conv2d(24, 24, 3, padding=1), nn.GroupNorm(4, 24), nn.ReLU(), nn.Conv2d(24, 9, 3, padding=1)
            ),
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        a = self.one(x)
        b = self.two(F.max_pool2d(a, 2))
        low = self.sides[1](b)
        high = self.sides[0](a) + F.interpolate(low, size=a.shape[-2:], mode="nearest")
        return [self.head(level) for level in (high, low)]


class Radiance(nn.Module):
    """NeRF: sines of coordinates, a skip, two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(39, 48), nn.Linear(48, 48), nn.Linear(87, 48)
        self.density, self.colour = nn.Linear(48, 1), nn.Sequential(nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 3))

    def forward(self, x: Tensor) -> Tensor:
        waves = [x] + [f(x * 2**i) for i in range(6) for f in (torch.sin, torch.cos)]
        x = torch.cat(waves, -1)
        hidden = self.two(self.one(x).relu()).relu()
        hidden = self.three(torch.cat([hidden, x], -1)).relu()
        return torch.cat([self.colour(hidden).sigmoid(), self.density(hidden).relu()], -1)


class WaveNet(nn.Module):
    """Gated dilated convolutions with skips."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(1, 16, 1), nn.Conv1d(24, 10, 1)
        self.gates = nn.ModuleList(nn.Conv1d(16, 32, 2, dilation=2**i) for i in range(4))
        self.residuals, self.skips = (nn.ModuleList(nn.Conv1d(16, n, 1) for _ in range(4)) for n in (16, 24))

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.first(x), 0
        for gate, residual, skip in zip(self.gates, self.residuals, self.skips, strict=True):
            a, b = gate(x).chunk(2, 1)
            made = a.tanh() * b.sigmoid()
            x = x[..., -made.shape[-1] :] + residual(made)
            made = skip(made)
            total = made if isinstance(total, int) else total[..., -made.shape[-1] :] + made
        return self.last(total.relu())


class ActorCritic(nn.Module):
    """Two answers from one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh())
        self.actor, self.critic = nn.Linear(48, 4), nn.Linear(48, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        return self.actor(x).log_softmax(-1), self.critic(x)


class DeepSets(nn.Module):
    """Sums over the members of a set."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.all = (
            nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32)),
            nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 2)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.all(self.each(x).sum(1))


class Siamese(nn.Module):
    """Embeddings of two images, and how alike they are."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = _block(3, 24), nn.Linear(24, 16)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        one, two = (F.normalize(self.head(self.body(x).mean((2, 3)))) for x in (a, b))
        return one, two


class Dueling(nn.Module):
    """A dueling network of reinforcement learning."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(4, 16, 4, 2), nn.ReLU(), nn.Conv2d(16, 24, 3), nn.ReLU(), nn.Flatten())
        self.value, self.gain = (nn.Sequential(nn.Linear(24 * 25, 32), nn.ReLU(), nn.Linear(32, n)) for n in (1, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        gain = self.gain(x)
        return self.value(x) + gain - gain.mean(1, keepdim=True)


class Messages(nn.Module):
    """A graph network: sums over the neighbours of each node."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(7, 32), nn.Linear(32, 24), nn.Linear(24, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in (self.one, self.two):
            x = layer(x).relu()
            x = x + torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]])
        return self.out(x)


class Spectral(nn.Module):
    """An attention over channels and a convolution on a spectrum."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(1, 24, 3, padding=1), nn.Conv2d(24, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.stft(x, 32, 16, window=torch.hann_window(32, dtype=x.dtype), return_complex=True).abs()
        return self.two(self.one(spectrum[:, None]).relu())


class StyleGenerator(nn.Module):
    """StyleGAN: a mapping, and scales for each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mapping, self.constant = (
            nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()),
            nn.Parameter(torch.randn(1, 24, 4, 4)),
        )
        self.convs, self.styles = (
            nn.ModuleList(nn.Conv2d(24, 24, 3, padding=1) for _ in range(2)),
            nn.ModuleList(nn.Linear(32, 48) for _ in range(2)),
        )
        self.last = nn.Conv2d(24, 3, 1)

    def forward(self, z: Tensor) -> Tensor:
        w, x = self.mapping(z), self.constant.expand(len(z), -1, -1, -1)
        for conv, style in zip(self.convs, self.styles, strict=True):
            x = F.interpolate(F.leaky_relu(conv(x), 0.2), scale_factor=2.0)
            scale, shift = style(w)[..., None, None].chunk(2, 1)
            x = F.instance_norm(x) * (1 + scale) + shift
        return self.last(x)


def _mlp(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    parts: list[nn.Module] = []
    for a, b in pairwise(widths):
        parts += [nn.Linear(a, b), act()]
    return nn.Sequential(*parts[:-1])


_IMAGE, _LARGER = (1, 3, 32, 32), (2, 3, 48, 32)
#: What makes the model, the shape of its input, and another; several inputs are in a list.
OWN: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "unet": (UNet, _IMAGE, _LARGER),
    "unet-upsample": (partial(UNet, up="bilinear"), _IMAGE, _LARGER),
    "unet-binary": (partial(UNet, classes=1), _IMAGE, _LARGER),
    "pointnet": (PointNet, (2, 3, 30), (3, 3, 44)),
    "dcgan-generator": (Generator, (2, 16), (3, 16)),
    "dcgan-discriminator": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 16, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(16, 32, 4, 2, 1),
            nn.BatchNorm2d(32),
            nn.LeakyReLU(0.2),
            nn.Conv2d(32, 1, 4),
        ),
        (1, 3, 16, 16),
        (2, 3, 24, 16),
    ),
    "super-resolution": (SuperResolution, _IMAGE, _LARGER),
    "lstm": (Recurrent, (1, 8, 12), (2, 8, 20)),
    "gru": (partial(Recurrent, nn.GRU), (1, 8, 12), (2, 8, 20)),
    "vae": (Variational, (2, 20), (5, 20)),
    "centernet": (CenterNet, _IMAGE, _LARGER),
    "pyramid": (Pyramid, _IMAGE, _LARGER),
    "nerf": (Radiance, (9, 3), (20, 3)),
    "wavenet": (WaveNet, (1, 1, 40), (2, 1, 60)),
    "actor-critic": (ActorCritic, (2, 12), (5, 12)),
    "deepsets": (DeepSets, (2, 5, 6), (3, 9, 6)),
    "siamese": (Siamese, [_IMAGE, _IMAGE], [_LARGER, _LARGER]),
    "dueling-dqn": (Dueling, (1, 4, 16, 16), (3, 4, 16, 16)),
    "graph-network": (Messages, [(6, 7), "edges 6"], [(9, 7), "edges 9"]),
    "spectrogram-cnn": (Spectral, (1, 400), (2, 640)),
    "style-generator": (StyleGenerator, (2, 12), (3, 12)),
    "regression-mlp": (partial(_mlp, 10, 48, 32, 2), (3, 10), (7, 10)),
    "siren": (partial(_mlp, 2, 48, 48, 3, act=nn.Tanh), (9, 2), (20, 2)),
    "autoencoder": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(16, 24, 3, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(24, 16, 2, 2),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 3, 2, 2),
        ),
        _IMAGE,
        _LARGER,
    ),
}


def _own(kind: Callable[[], nn.Module], shape: Any, other: Any) -> Built:
    def given(shapes: Any) -> Any:
        if isinstance(shapes, list):
            return tuple(given(one) for one in shapes)
        if isinstance(shapes, str):
            count = int(shapes.split()[1])
            return torch.stack([torch.arange(count), (torch.arange(count) + 1) % count])
        return _images(*shapes)

    return kind(), given(shape), given(other)
