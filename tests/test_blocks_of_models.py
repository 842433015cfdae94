"""Blocks of torchvision's networks and of language models, on the command line and on the report page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models.convnext import CNBlock
from torchvision.models.efficientnet import MBConv, MBConvConfig
from torchvision.models.mobilenetv2 import InvertedResidual as InvertedResidualV2
from torchvision.models.mobilenetv3 import InvertedResidual, InvertedResidualConfig
from torchvision.models.resnet import Bottleneck
from torchvision.models.vision_transformer import EncoderBlock
from torchvision.utils import save_image
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

import secateur as sc
from oracle import silenced
from secateur.files.pretrained import save_pretrained
from secateur.plans import Limits
from secateur.plans.plan import plan_for
from secateur.surgery.bypass import Bypass
from tests.command import succeed

SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 99,
    "max_position_embeddings": 64,
}  # fmt: skip
IDS = torch.randint(3, 99, (2, 12), generator=torch.Generator().manual_seed(0))


def llama() -> Any:
    torch.manual_seed(0)
    net = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)).eval()
    for parameter in net.parameters():  # as trained ones are: what is said depends on all of the text
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    return net


def without(net: Any, names: list[str]) -> Any:
    graph = sc.analyze(net, {"input_ids": IDS})
    removed = np.zeros(len(graph.root), np.bool_)
    removed[[block.group for block in graph.blocks if block.name in names]] = True
    assert removed.sum() == len(names)
    return sc.apply(net, plan_for(graph, removed))


CASES = [
    ["model.layers.0.self_attn"],
    ["model.layers.0.self_attn", "model.layers.0.mlp"],
    ["model.layers.1.self_attn", "model.layers.1.mlp", "model.layers.2.mlp", "model.layers.3.self_attn"],
]


@pytest.mark.parametrize("names", CASES, ids=["attention", "layer", "mixed"])
def test_language_models_without_blocks_go_on_with_their_cache(names: list[str]) -> None:
    net = llama()
    small = without(net, names)
    with torch.no_grad():
        whole = small(IDS).logits
        begun = small(IDS[:, :7], use_cache=True)
        rest = small(IDS[:, 7:], past_key_values=begun.past_key_values, use_cache=True).logits
    assert torch.allclose(whole, silenced(net, names, IDS).logits, atol=1e-4)
    assert torch.allclose(rest, whole[:, 7:], atol=1e-4)
    said = [small.generate(IDS[:1], max_new_tokens=8, do_sample=False, use_cache=use, pad_token_id=0, eos_token_id=None)
            for use in (True, False)]  # fmt: skip
    assert torch.equal(*said)


@pytest.mark.parametrize("layers", [False, True], ids=["attention", "whole layers"])
@pytest.mark.parametrize("kind", ["gpt2", "opt", "llama"])
def test_positions_go_on_when_no_attention_is_left(kind: str, layers: bool) -> None:
    """The length of a text is what the cache of the attention says; learnt positions depend on it."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": SIZES["vocab_size"]}
    if kind == "gpt2":
        net: Any = GPT2LMHeadModel(GPT2Config(n_positions=32, n_embd=12, n_layer=2, n_head=3, **sizes)).eval()
    elif kind == "opt":
        narrow = {"hidden_size": 12, "num_hidden_layers": 2, "ffn_dim": 16, "word_embed_proj_dim": 12}
        net = OPTForCausalLM(OPTConfig(**narrow, num_attention_heads=3, max_position_embeddings=32, **sizes)).eval()
    else:
        net = llama()
    graph = sc.analyze(net, {"input_ids": IDS})
    names = [block.name for block in graph.blocks if "attn" in block.name or layers]
    small = without(net, names)
    with torch.no_grad():
        whole = small(IDS).logits
        begun = small(IDS[:, :7], use_cache=True)
        rest = small(IDS[:, 7:], past_key_values=begun.past_key_values, use_cache=True).logits
    if not layers:
        assert torch.allclose(whole, silenced(net, names, IDS).logits, atol=1e-4)
    assert torch.allclose(rest, whole[:, 7:], atol=1e-4)


def test_stock_transformers_loads_a_model_without_some_layers(tmp_path: Path) -> None:
    small = without(llama(), ["model.layers.1.self_attn", "model.layers.1.mlp"])
    assert isinstance(small.model.layers[1], Bypass)
    save_pretrained(small, tmp_path / "small")
    stock = LlamaForCausalLM.from_pretrained(tmp_path / "small", local_files_only=True).eval()
    assert stock.config.num_hidden_layers == 3
    with torch.no_grad():
        assert torch.allclose(stock(IDS).logits, small(IDS).logits, atol=1e-5)
    half = without(llama(), ["model.layers.1.self_attn"])
    save_pretrained(half, tmp_path / "half")
    again: Any = sc.load(tmp_path / "half")
    with torch.no_grad():
        assert torch.allclose(again(IDS).logits, half(IDS).logits, atol=1e-5)


def test_uniform_widths_and_whole_layers(tmp_path: Path) -> None:
    limits = Limits("cost", uniform=True, blocks="only")
    result = sc.prune(llama(), {"input_ids": IDS}, keep={"params": 0.7}, limits=limits, repair=None, progress=False)
    assert result.plan is not None
    left = [isinstance(layer, Bypass) for layer in result.model.model.layers]
    assert len(result.plan.blocks) == 2 * sum(left) > 0
    result.save_pretrained(tmp_path / "small")
    assert json.loads((tmp_path / "small" / "config.json").read_text())["num_hidden_layers"] == 4 - sum(left)


def test_norms_after_the_addition_stay() -> None:
    torch.manual_seed(0)
    net = BertForSequenceClassification(BertConfig(**SIZES)).eval()
    names = ["bert.encoder.layer.1.attention", "bert.encoder.layer.2.intermediate"]
    small = without(net, names)
    ends = ["bert.encoder.layer.1.attention.output.dense", "bert.encoder.layer.2.output.dense"]
    assert torch.allclose(small(IDS).logits, silenced(net, ends, IDS).logits, atol=1e-5)
    assert list(small.bert.encoder.layer[1].attention.output.LayerNorm.parameters())
    assert not list(small.bert.encoder.layer[1].attention.self.parameters())


# -- torchvision's own blocks ------------------------------------------------------------------------------------------
def mbconv() -> nn.Module:
    """EfficientNet's: expansion, depthwise convolution, a gate, projection, stochastic depth."""
    config = MBConvConfig(2, 3, 1, 8, 8, 1, 1.0, 1.0)
    return MBConv(config, 0.2, nn.BatchNorm2d)


def inverted(activation: str) -> nn.Module:
    """MobileNetV3's, with its gate."""
    config = InvertedResidualConfig(8, 3, 16, 8, True, activation, 1, 1, 1.0)
    return InvertedResidual(config, nn.BatchNorm2d)


#: For each block, what it is made by and the module that ends its branch.
IMAGE_BLOCKS: dict[str, tuple[Any, str]] = {
    "efficientnet": (mbconv, "block"),
    "mobilenet v3, hardswish": (lambda: inverted("HS"), "block"),
    "mobilenet v3, relu": (lambda: inverted("RE"), "block"),
    "mobilenet v2": (lambda: InvertedResidualV2(8, 8, 1, 2), "conv"),
    "resnet": (lambda: Bottleneck(8, 2, base_width=64), "bn3"),
    "convnext": (lambda: CNBlock(8, 1.0, 0.2), "block"),
}


class Images(nn.Module):
    """Two blocks between a convolution and a classifier."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Conv2d(3, 8, 3), nn.Sequential(block(), block()), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Patches(nn.Module):
    """The same with layers of a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 3)
        layers = [EncoderBlock(2, 8, 16, 0.1, 0.1) for _ in range(2)]
        self.blocks = nn.Sequential(*layers)

    def forward(self, x: Any) -> Any:
        return self.head(self.blocks(self.stem(x).flatten(2).mT).mean(1))


def lively(net: nn.Module) -> Any:
    """The network with norms as training leaves them, so that no branch is 0 by chance."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
            nn.init.uniform_(module.running_mean, -0.5, 0.5)
    return net.eval()


@pytest.mark.parametrize("kind", IMAGE_BLOCKS)
def test_a_block_of_an_image_model_leaves_as_its_zeroed_branch(kind: str) -> None:
    torch.manual_seed(0)
    make, end = IMAGE_BLOCKS[kind]
    net, x = lively(Images(make)), torch.rand(2, 3, 12, 12)
    graph = sc.analyze(net, x)
    assert [block.name for block in graph.blocks.prunable] == ["blocks.0", "blocks.1"]
    removed = np.zeros(len(graph.root), np.bool_)
    removed[graph.blocks.prunable[1].group] = True
    small = sc.apply(net, plan_for(graph, removed))
    expected = silenced(net, [f"blocks.1.{end}"], x)
    with torch.no_grad():
        assert torch.allclose(small(x), expected, atol=1e-5)
        assert not torch.allclose(net(x), expected, atol=1e-2)
    assert not list(small.blocks[1].parameters())
    assert len(list(small.blocks[0].parameters())) == len(list(net.blocks[0].parameters()))


BRANCHES = [["blocks.0.self_attention"], ["blocks.1.mlp"], ["blocks.1.self_attention", "blocks.1.mlp"]]


@pytest.mark.parametrize("names", BRANCHES, ids=["attention", "mlp", "layer"])
def test_a_block_of_a_vision_transformer_leaves_as_its_zeroed_branch(names: list[str]) -> None:
    torch.manual_seed(0)
    net, x = Patches().eval(), torch.rand(2, 3, 12, 12)
    graph = sc.analyze(net, x)
    assert [block.name for block in graph.blocks.prunable] == [
        f"blocks.{i}.{branch}" for i in (0, 1) for branch in ("self_attention", "mlp")
    ]
    removed = np.zeros(len(graph.root), np.bool_)
    removed[[block.group for block in graph.blocks.prunable if block.name in names]] = True
    small: Any = sc.apply(net, plan_for(graph, removed))
    expected = silenced(net, names, x)
    with torch.no_grad():
        assert torch.allclose(small(x), expected, atol=1e-5)
        assert not torch.allclose(net(x), expected, atol=1e-2)
    if len(names) == 2:
        assert not list(small.blocks[1].parameters())  # the norms leave with the branches


# -- the command line and the page -------------------------------------------------------------------------------------
FACTORY = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))

    def forward(self, x):
        return x + self.body(x)

def make(classes=3):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), Block(), Block(), Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8, classes))
"""


def test_commands_name_blocks(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(FACTORY)
    generator = torch.Generator().manual_seed(0)
    for name in "abc":
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(6):
            save_image(torch.rand(3, 24, 24, generator=generator), tmp_path / "images" / name / f"{i}.png")
    model, size = f"{tmp_path / 'net.py'}:make", ("--input-size", 16)
    seen = succeed("inspect", model, *size)
    assert [block["block"] for block in seen["blocks"]] == ["2", "3", "4"]
    out = tmp_path / "small"
    done = succeed("prune", model, "--images", tmp_path / "images", "--keep-macs", 0.7, "--blocks", "only", *size,
                   "--no-latency", "--out", out)  # fmt: skip
    assert done["removed_blocks"]
    assert set(done["removed_blocks"]) <= {"2", "3", "4"}
    page = (out / "report.html").read_text(encoding="utf-8")
    assert f"left as a whole: {', '.join(done['removed_blocks'])}." in page
    assert json.loads((out / "run.json").read_text())["removed_blocks"] == done["removed_blocks"]
