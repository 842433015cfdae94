"""One member of each large family of `transformers`: what may leave, and removal against zeros in the weights.

The reference is independent: weights of removed units are zero, and each norm is the module itself, built for fewer
channels. It is compared in double precision, on other lengths and with padding.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from benchmarks.tiny_transformers import build, inputs, parts, randomise
from oracle import random_scores, zeroed
from secateur.plans.plan import plan_for

# Forwards cast to single precision in places.
_ROUNDING = 1e-6
_LM, _MASKED, _SEQ2SEQ = "CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM"
_EAGER = {"attn_implementation": "eager"}
#: Family, mapping, settings, and for each part how many units may leave, of how many.
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, tuple[int, int]]]] = {
    "llama": ("llama", _LM, {}, {"width": (160, 160), "heads": (4, 4), "neurons": (192, 192)}),
    "llama, every head its own key": (
        "llama",
        _LM,
        {"num_key_value_heads": 4},
        {"width": (160, 160), "heads": (8, 8), "neurons": (192, 192)},
    ),
    "llama, one key": (
        "llama",
        _LM,
        {"num_key_value_heads": 1},
        {"width": (160, 160), "heads": (8, 8), "neurons": (192, 224)},
    ),
    "llama, one key, eager": (
        "llama",
        _LM,
        {"num_key_value_heads": 1, **_EAGER},
        {"width": (160, 160), "heads": (8, 8), "neurons": (192, 224)},
    ),
    "qwen3": ("qwen3", _LM, {}, {"width": (160, 160), "heads": (4, 4), "neurons": (192, 192)}),
    "gemma3": ("gemma3_text", _LM, _EAGER, {"width": (160, 160), "heads": (4, 4), "neurons": (192, 192)}),
    "phi3": ("phi3", _LM, {}, {"width": (160, 160), "heads": (4, 4), "neurons": (192, 192)}),
    "gpt_bigcode": ("gpt_bigcode", _LM, {}, {"width": (192, 192), "heads": (8, 8), "neurons": (256, 288)}),
    "gpt2": ("gpt2", _LM, {}, {"width": (192, 192), "heads": (8, 8), "neurons": (256, 256)}),
    "gpt_neox": ("gpt_neox", _LM, {}, {"width": (160, 160), "heads": (8, 8), "neurons": (96, 96)}),
    "bert": ("bert", _MASKED, {}, {"width": (256, 256), "heads": (8, 8), "neurons": (96, 96)}),
    "modernbert": ("modernbert", _MASKED, {}, {"width": (192, 192), "heads": (8, 8), "neurons": (192, 192)}),
    "deberta": ("deberta-v2", _MASKED, {}, {"width": (256, 256), "heads": (8, 8), "neurons": (96, 96)}),
    "mixtral": (
        "mixtral",
        _LM,
        {},
        {"width": (160, 160), "heads": (4, 4), "neurons": (192, 192), "experts": (8, 8)},
    ),
    "mamba": ("mamba", _LM, {}, {"width": (96, 96), "neurons": (312, 312)}),
    # Heads, their gates and states lie in one layer. Heads share a state, or each group of heads has its own.
    "mamba2": ("mamba2", _LM, {"chunk_size": 8}, {"width": (96, 96), "heads": (16, 16), "neurons": (0, 32)}),
    "mamba2, two groups": ("mamba2", _LM, {"chunk_size": 8, "n_groups": 2}, {"width": (96, 96), "heads": (4, 4)}),
    # Linear attention: a triangular system, a state that begins as zeros, a norm inside each head.
    "olmo_hybrid": (
        "olmo_hybrid",
        _LM,
        {},
        {"width": (160, 160), "heads": (6, 6), "neurons": (192, 192)},
    ),
    "t5": ("t5", _SEQ2SEQ, {}, {"width": (352, 352), "heads": (24, 24), "neurons": (192, 192)}),
    # The forward of BART takes one channel out by position, to ask for its shape.
    "bart": ("bart", _SEQ2SEQ, {}, {"width": (403, 416), "heads": (24, 24), "neurons": (192, 192)}),
    "whisper": (
        "whisper",
        "SPEECH_SEQ_2_SEQ",
        {},
        {"width": (416, 416), "heads": (24, 24), "neurons": (224, 224)},
    ),
    "mistral": ("mistral", _LM, {}, {"width": (160, 160), "heads": (4, 4), "neurons": (192, 192)}),
    "opt": ("opt", _LM, {}, {"width": (192, 192), "heads": (8, 8), "neurons": (96, 96)}),
    # The slopes of its position biases are computed from the number of heads.
    "bloom": ("bloom", _LM, {}, {"width": (160, 160), "heads": (0, 8), "neurons": (256, 256)}),
    # Keys and values are counted from the end of the queries.
    "falcon": ("falcon", _LM, {}, {"width": (160, 160), "heads": (8, 8), "neurons": (96, 128)}),
    # Latent attention, and rotary factors that are complex numbers.
    "deepseek_v2": (
        "deepseek_v2",
        _LM,
        {"first_k_dense_replace": 2},
        {"width": (160, 160), "heads": (8, 8), "neurons": (256, 272)},
    ),
    "roberta": ("roberta", _MASKED, {}, {"width": (256, 256), "heads": (8, 8), "neurons": (96, 96)}),
    "distilbert": (
        "distilbert",
        _MASKED,
        {"hidden_dim": 48},
        {"width": (224, 224), "heads": (8, 8), "neurons": (96, 96)},
    ),
    "swin": ("swin", "IMAGE_CLASSIFICATION", {}, {"width": (144, 144), "heads": (6, 6), "neurons": (192, 192)}),
    "clip": ("clip", "ZERO_SHOT_IMAGE_CLASSIFICATION", {}, {"heads": (16, 16), "neurons": (192, 192)}),
    # Weight norm makes the position embedding.
    "wav2vec2": ("wav2vec2", "CTC", {}, {"width": (0, 160), "heads": (8, 8), "neurons": (208, 208)}),
    "vit": ("vit", "IMAGE_CLASSIFICATION", {}, {"width": (160, 160), "heads": (8, 8), "neurons": (96, 96)}),
}


@pytest.mark.parametrize("name", MODELS)
def test_removal_equals_zeros_in_the_weights(name: str) -> None:
    family, mapping, given, expected = MODELS[name]
    model = build(family, mapping, **given)
    graph = sc.analyze(model, inputs(model))
    assert {part: counts[:2] for part, counts in parts(graph).items()} == expected
    others = [inputs(model), inputs(model, 3, 11, 0, 1), inputs(model, 2, 13, 4, 2)]
    for seed, share in enumerate((0.3, 0.6)):
        plan = sc.plan(graph, random_scores(graph, seed), remove=share)
        small, reference = sc.apply(model, plan), zeroed(model, graph, plan)
        for example in others:
            expected_logits = logits(reference, example)
            assert float(expected_logits.std()) > 1e-3
            gap = (logits(small, example) - expected_logits).abs().max() / expected_logits.abs().max()
            assert float(gap) < _ROUNDING
        assert sc.measure(small, inputs(model), latency=False) == plan.after


def logits(model: nn.Module, example: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        made = model(**example)
        return made["logits"] if "logits" in made else made["logits_per_image"]


# -- relevance -----------------------------------------------------------------------------------------------------
def _dpt() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import DPTConfig, DPTForDepthEstimation

    config = DPTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48, image_size=32, patch_size=8,
        backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 12, 16, 20], fusion_hidden_size=16,
    )  # fmt: skip
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return randomise(DPTForDepthEstimation(config)).float(), {"pixel_values": x}


def _convbert(**given: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    model = build("convbert", _MASKED, **given).float()
    return model, inputs(model)


@pytest.mark.parametrize(
    "made",
    [
        _convbert,
        partial(_convbert, num_attention_heads=8, hidden_size=64),
        partial(_convbert, num_hidden_layers=3, num_attention_heads=12, hidden_size=96, embedding_size=96),
        _dpt,
    ],
    ids=["convbert", "convbert, four heads", "convbert, six heads", "dpt"],
)
def test_layers_whose_sizes_must_be_equal_are_found_by_analysis(made: Any) -> None:
    # ConvBERT joins heads of attention with heads of a convolution, and DPT a token with the others: the code reads one
    # size and takes it for both. What analysis calls free must be free for every plan.
    model, example = made()
    graph = sc.analyze(model, example)
    for seed in range(8):
        sc.apply(model, sc.plan(graph, random_scores(graph, seed), remove=0.3))  # or VerificationError
    for layer in graph.layers:
        if layer.prunable:  # alone
            removed = np.zeros(len(graph.root), np.bool_)
            removed[layer.groups[0]] = True
            sc.apply(model, plan_for(graph, removed))


@pytest.mark.parametrize(
    ("family", "mapping", "given"),
    [
        ("phimoe", _LM, {}),  # its router switches gradients off
        ("deepseek_v3", _LM, {}),  # keys are written through views of an empty tensor
        ("deepseek_v2", _LM, {}),  # the same, and rotary embeddings by complex numbers
        ("fnet", _MASKED, {}),  # a Fourier transform
        ("mobilebert", _MASKED, {}),  # the last layer is a product with two weights side by side
        ("longformer", _MASKED, {"attention_window": [4, 4]}),  # masks of minus infinity
    ],
)
def test_relevance_is_conserved_where_forwards_are_odd(family: str, mapping: str, given: dict[str, Any]) -> None:
    model = build(family, mapping, **given).float()
    example = inputs(model, 2, 8, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seen = sc.explain(model, example, 3)
    assert seen.composite == "attnlrp"
    torch.testing.assert_close(seen.output, logits(model, example), rtol=1e-4, atol=1e-5)
    assert abs(seen.conservation.missing) < 1e-4
    assert bool(torch.isfinite(seen.heat).all())
    assert float(seen.heat.abs().max()) > 0
    if family not in ("fnet", "mobilebert"):  # they mix neighbouring tokens whatever the mask says
        assert float(seen.heat[0, 5:].abs().max()) < 1e-6 * float(seen.heat.abs().max())


@pytest.mark.parametrize("composite", ["attnlrp", "alpha1beta0"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_changes_nothing_where_attention_has_a_window(side: str, attention: str, composite: str) -> None:
    """Padding beyond the window sees nothing at all: rows of attention in which everything is masked. ModernBert knows
    only distances between positions, so padding may be on either side."""
    model: Any = build("modernbert", _MASKED, attn_implementation=attention, sliding_window=2).float()
    short, length, pad = inputs(model, 1, 6)["input_ids"], 16, 10
    kept = slice(0, 6) if side == "right" else slice(pad, length)
    batch = inputs(model, 2, length)
    batch["input_ids"][0], batch["attention_mask"][0] = 0, 0
    batch["input_ids"][0, kept], batch["attention_mask"][0, kept] = short[0], 1
    place = (torch.arange(2), torch.tensor([kept.start + 4, 4]), 3)

    def at_place(output: Tensor) -> Tensor:
        seed = torch.zeros_like(output)
        seed[place] = output[place]
        return seed

    def at_fifth(output: Tensor) -> Tensor:
        seed = torch.zeros_like(output)
        seed[0, 4, 3] = output[0, 4, 3]
        return seed

    seen = sc.explain(model, batch, at_place, composite=composite)
    given = [{"input_ids": short}, {"input_ids": batch["input_ids"][1:]}]
    alone = [sc.explain(model, one, at_fifth, composite=composite) for one in given]
    padded, first, second = (s.input[0] if isinstance(s.input, list) else s.input for s in (seen, *alone))
    assert bool(torch.isfinite(padded).all())
    assert float(first.abs().max()) > 1e-3
    torch.testing.assert_close(padded[:1, kept], first, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(padded[1:], second, rtol=1e-3, atol=1e-5)
    assert float(padded[0][batch["attention_mask"][0] == 0].abs().max()) <= 1e-12


@pytest.mark.filterwarnings("ignore:the model returns several tensors")
def test_samples_that_are_compared_are_explained_one_by_one() -> None:
    model = build("chinese_clip", "ZERO_SHOT_IMAGE_CLASSIFICATION").float()
    example = inputs(model)
    with pytest.raises(sc.errors.DataError, match=r"\(2, 2\) for 2 samples and \(1, 1\) for 1\..*one sample"):
        sc.explain(model, example, 1)
    seen = sc.explain(model, {name: tensor[:1] for name, tensor in example.items()})
    assert abs(seen.conservation.missing) < 1e-4


def test_a_model_without_a_head_starts_at_all_numbers_of_its_states() -> None:
    whole: Any = build("bert", _MASKED).float()
    model, example = whole.bert, inputs(whole, 2, 8, 3)
    counts = example["attention_mask"].unsqueeze(-1)
    with pytest.warns(sc.errors.SecateurWarning, match=r"output\['last_hidden_state'\] has states and no"):
        seen = sc.explain(model, example)
    wanted = sc.explain(model, example, lambda states: states.square() * counts)
    torch.testing.assert_close(seen.heat, wanted.heat)
    with torch.no_grad():
        squares = model(**example).last_hidden_state.square() * counts
    assert abs(seen.conservation.start - float(squares.sum())) < 1e-3
    with pytest.warns(sc.errors.SecateurWarning, match="states and no classes"):
        scores = sc.score(model, [(example, None)])
    said = sc.score(model, [(example, squares)])  # relevance to start with
    for site, values in said.units.items():
        np.testing.assert_allclose(scores.units[site], values, rtol=1e-4, atol=1e-5 * abs(values).max())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sc.explain(model, example, 5)  # a number of the states that somebody asks for
    with pytest.raises(sc.errors.DataError, match="targets"):
        sc.score(model, [(example, None)], "taylor")


@pytest.mark.parametrize("left", [True, False])
def test_the_unknowns_of_a_system_pass_relevance_to_its_right_side(left: bool) -> None:
    class Solve(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("matrix", torch.randn(4, 4).tril())
            self.head = nn.Linear(16, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            found = torch.linalg.solve_triangular(self.matrix.expand(len(x), 4, 4), x, upper=False, left=left)
            return self.head(found.flatten(1))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, x = Solve().double(), torch.randn(2, 4, 4, dtype=torch.float64)
    inverse, row = torch.linalg.inv(model.matrix), model.head.weight[1].detach().view(4, 4)
    expected = x * (inverse.T @ row if left else row @ inverse.T)
    torch.testing.assert_close(sc.explain(model, x, 1, composite="attnlrp").input, expected, rtol=1e-4, atol=1e-4)
