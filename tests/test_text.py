"""Texts: batches as tokenizers and collators return them, what a token should have been, padding, words in colours."""

from __future__ import annotations

import sys
import warnings
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import secateur as sc
from browser import A4, SCHEMES, WIDTHS, check, opened
from secateur.criteria import LRP, Activation, Taylor
from secateur.errors import CriterionError, DataError, ForwardError
from secateur.recover import Recover, recover
from secateur.relevance import Epsilon, RelevancePass, unit_relevance
from secateur.relevance.starts import Starter
from secateur.repair import Repair
from secateur.repair.samples import Samples, exchange_words
from secateur.running.accuracy import accuracy
from secateur.running.targets import Reader

VOCABULARY, LENGTHS = 23, (9, 6, 4)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2
    )
    return GPT2LMHeadModel(config).eval()


def bert(kind: Any = BertForSequenceClassification, labels: int = 3) -> Any:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, num_labels=labels,
    )  # fmt: skip
    return kind(config).eval()


def texts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def padded(rows: list[Tensor], left: bool = False, fill: int = 0) -> dict[str, Tensor]:
    longest = max(map(len, rows))

    def pad(row: Tensor, value: int) -> Tensor:
        more = longest - len(row)
        return F.pad(row, (more, 0) if left else (0, more), value=value)

    ids = torch.stack([pad(row, fill) for row in rows])
    mask = torch.stack([pad(torch.ones_like(row), 0) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


BATCH = padded(texts())


# -- targets: written out, one text at a time, without padding ---------------------------------------------------------
def by_hand(model: nn.Module, measure: Any, labels: list[Tensor] | None = None) -> dict[str, Tensor]:
    """Σ over texts of the mean over positions of measure(z, g) at linear layers; g of the text's mean loss."""
    sums: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    for number, row in enumerate(texts()):
        seen.clear()
        hooks = [
            module.register_forward_hook(lambda m, i, o, name=name: seen.update({name: o}))  # type: ignore[misc]
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
        ]
        logits = model(input_ids=row[None]).logits[0]
        for hook in hooks:
            hook.remove()
        if labels is None:  # the next token
            loss = F.cross_entropy(logits[:-1], row[1:])
        else:
            loss = F.cross_entropy(logits, labels[number])
        grads = torch.autograd.grad(loss, list(seen.values()))
        for (name, z), g in zip(seen.items(), grads, strict=True):
            sums[name] = sums.get(name, 0) + measure(z[0].detach(), g[0]).mean(0)
    return sums


def compare(scores: Any, wanted: dict[str, Tensor], scale: float) -> None:
    found = {site.path: values for site, values in scores.units.items() if site.path in wanted}
    assert len(found) > 5
    for path, values in found.items():
        known = wanted[path].abs().double() * scale
        torch.testing.assert_close(torch.as_tensor(values), known, rtol=1e-3, atol=1e-6 * float(known.max()))


@pytest.mark.parametrize("left", [False, True])
def test_taylor_of_a_language_model_is_that_of_the_next_token(left: bool) -> None:
    model = llama()
    wanted = by_hand(model, lambda z, g: z * g)
    data = padded(texts(), left)
    if left:  # without these, positions begin in the padding
        data["position_ids"] = (data["attention_mask"].cumsum(1) - 1).clamp_min(0)
    compare(sc.score(model, data, Taylor(norm=None)), wanted, 1 / 9)


def test_taylor_of_tokens_that_are_classified() -> None:
    model, labels = bert(BertForTokenClassification, 5), [row % 5 for row in texts()]
    wanted = by_hand(model, lambda z, g: z * g, labels)
    full = torch.stack([F.pad(row, (0, 9 - len(row)), value=-100) for row in labels])
    compare(sc.score(model, {**BATCH, "labels": full}, Taylor(norm=None)), wanted, 1 / 9)
    # Labels of padding do not count, whatever they are.
    compare(sc.score(model, (BATCH, full.clamp_min(0)), Taylor(norm=None)), wanted, 1 / 9)


def test_activations_of_padding_do_not_count() -> None:
    model = llama()
    wanted = by_hand(model, lambda z, g: z.abs())
    compare(sc.score(model, BATCH, Activation(norm=None)), wanted, 1 / 3)


def test_the_loss_is_that_of_transformers() -> None:
    model, ids = llama(), torch.stack([row[:4] for row in texts()])
    labels = ids.clone()
    labels[:, 1] = -100  # the same number for each text, so that both means are the same
    out = model(input_ids=ids, labels=labels)
    for targets in (labels, labels.tolist()):
        assert float(Reader(model).read(ids, targets, out.logits).loss()) == pytest.approx(float(out.loss), rel=1e-5)
    assert float(Reader(model).read(ids, None, out.logits).loss()) == pytest.approx(
        float(model(input_ids=ids, labels=ids).loss), rel=1e-5
    )


def test_relevance_starts_at_the_next_token() -> None:
    model = llama()
    engine = RelevancePass(model, "alpha1beta0", heat_map=False)
    for row in texts():
        seed = torch.zeros(1, len(row), VOCABULARY)
        seed[0, torch.arange(len(row) - 1), row[1:]] = 1
        engine.run(row[None], lambda output, seed=seed: seed)  # type: ignore[misc]
    scores = sc.score(model, BATCH, LRP(composite="alpha1beta0", start="one"))
    for site, values in scores.units.items():
        known = engine.units.get(f"{site.path}.weight")
        if known is not None:
            torch.testing.assert_close(torch.as_tensor(values), known, rtol=1e-3, atol=1e-5)


def test_relevance_without_targets_starts_at_the_classes_that_won() -> None:
    model = bert(BertForTokenClassification, 5)
    logits = model(**BATCH).logits
    seed = F.one_hot(logits.argmax(-1), 5).float() * BATCH["attention_mask"][..., None]
    engine = RelevancePass(model, "alpha1beta0", heat_map=False)
    engine.run(BATCH, lambda output: seed)
    for found in (
        unit_relevance(model, [(BATCH, None)], composite="alpha1beta0", start="one")[0],
        unit_relevance(model, [(BATCH, seed)], composite="alpha1beta0")[0],
    ):
        for name, values in engine.units.items():
            torch.testing.assert_close(found[name], values)


def test_accuracy_counts_tokens() -> None:
    model, right, total = llama(), 0, 0
    for row in texts():
        said = model(input_ids=row[None]).logits[0, :-1].argmax(-1)
        right, total = right + int((said == row[1:]).sum()), total + len(row) - 1
    found = accuracy(model, {**BATCH, "labels": BATCH["input_ids"]})
    assert (found.overall, found.samples) == (right / total, total)
    tagger, tags = bert(BertForTokenClassification, 5), torch.arange(9).repeat(3, 1) % 5
    hits = (tagger(**BATCH).logits.argmax(-1) == tags)[BATCH["attention_mask"] == 1]
    assert accuracy(tagger, (BATCH, tags)).overall == pytest.approx(float(hits.float().mean()))


# -- batches -----------------------------------------------------------------------------------------------------------
class Encoding(UserDict):  # as BatchEncoding is one
    pass


def test_batches_come_in_many_forms() -> None:
    model, labels = bert(), torch.tensor([0, 2, 1])
    known = sc.score(model, (BATCH, labels), "taylor").units
    halves = [({k: v[i : i + 1] for k, v in BATCH.items()}, labels[i : i + 1]) for i in range(3)]
    rows = [{"ids": row, "label": int(y)} for row, y in zip(texts(), labels, strict=True)]

    def collate(items: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {**padded([item["ids"] for item in items]), "labels": torch.tensor([item["label"] for item in items])}

    forms: list[Any] = [
        {**BATCH, "labels": labels},
        Encoding({**BATCH, "labels": labels}),
        {**{k: v.numpy() for k, v in BATCH.items()}, "labels": [0, 2, 1]},
        (Encoding(BATCH), [0, 2, 1]),
        [{**BATCH, "labels": labels}],
        halves,
        [{**x, "labels": y} for x, y in halves],
        ({**halves[0][0], "labels": labels[:1]}, {**{k: v[1:] for k, v in BATCH.items()}, "labels": labels[1:]}),
        DataLoader(rows, batch_size=2, collate_fn=collate),  # type: ignore[arg-type]
        iter([{**BATCH, "labels": labels}]),
    ]
    for form in forms:
        found = sc.score(model, form, "taylor").units
        assert found.keys() == known.keys()
        for site, values in found.items():
            if "position" in site.path:
                continue  # samples share it, so that their lengths are not told apart
            torch.testing.assert_close(torch.as_tensor(values), torch.as_tensor(known[site]), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"input_ids": [[1, 2, 3]]}, "return_tensors"),
        ({"input_ids": torch.tensor([1, 2, 3])}, "DataLoader"),
        (({**BATCH, "labels": torch.tensor([0, 1, 2])}, torch.tensor([0, 1, 2])), "one of the two"),
        ([torch.zeros(3), 1, 2], "or a dict"),
        ({**BATCH, "labels": [{"boxes": torch.zeros(2, 4)}] * 3}, "loss="),
        ((BATCH, torch.zeros(3, 8).long()), "(3,)"),
        ((BATCH, [[0], [1, 2], [0]]), "targets are lists that are no tensor"),
        ((BATCH, torch.tensor(1)), "3 inputs but a single number for targets"),
    ],
)
def test_batches_that_make_no_sense_are_named(data: Any, said: str) -> None:
    with pytest.raises(DataError) as error:
        sc.score(bert(), data, "taylor", graph=sc.analyze(bert(), BATCH))
    assert said in str(error.value)


def test_a_decoder_needs_its_own_text() -> None:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    model, labels = T5ForConditionalGeneration(config).eval(), BATCH["input_ids"][:, :4].contiguous()
    with pytest.raises(ForwardError, match="DataCollatorForSeq2Seq"):
        sc.score(model, {**BATCH, "labels": labels}, "taylor")
    logits = torch.zeros(3, 9, VOCABULARY)
    with pytest.raises(DataError, match="decoder_input_ids"):
        Reader(model).read(BATCH, labels, logits)
    # Labels are not moved: the decoder reads them one position later.
    data = {**BATCH, "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels)}
    out = model(**data, labels=labels)
    assert float(Reader(model).read(data, labels, out.logits).loss()) == pytest.approx(float(out.loss), rel=1e-5)
    seen = sc.explain(model, data, composite="alpha1beta0", start="one")
    assert seen.heat.shape == (3, 9)
    assert [(row >= 0).nonzero().ravel().tolist() for row in seen.classes] == [[3]] * 3


def test_a_dict_goes_through_the_whole_run() -> None:
    model, data = llama(), {**BATCH, "labels": BATCH["input_ids"]}
    options: dict[str, Any] = {"remove": 0.2, "evaluate": lambda m: float(accuracy(m, data)), "progress": False}
    result = sc.prune(model, data, "taylor", repair="ridge", **options)
    assert sum(p.numel() for p in result.model.parameters()) < sum(p.numel() for p in model.parameters())
    table = sc.compare(model, [data], ["activation", "weight"], **options)
    assert set(table.curves) == {"activation", "weight"}
    tuned = llama()
    before = float(tuned(**data).loss)
    tuned = recover(tuned, None, data, Recover.scenario1(epochs=5, lr=0.1), progress=False).model
    assert float(tuned(**data).loss) < before


# -- where the classes are ---------------------------------------------------------------------------------------------
class Net(nn.Module):
    """Layers, and what happens to their output."""

    def __init__(self, *layers: nn.Module, then: Any = lambda x: x) -> None:
        super().__init__()
        self.layers, self.then = nn.Sequential(*layers), then

    def forward(self, x: Tensor) -> Any:
        return self.then(self.layers(x))


def tagged(then: Any = lambda x: x) -> Net:
    torch.manual_seed(0)
    return Net(nn.Embedding(11, 6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), then=then)


IDS = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(0))  # as many positions as classes
SIGNAL = torch.rand(2, 3, 7, generator=torch.Generator().manual_seed(0))
PICTURE = torch.rand(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("net", "x", "axis"),
    [
        (tagged(), IDS, 2),
        (tagged(lambda x: x.log_softmax(-1) / 2 + 1), IDS, 2),
        (tagged(lambda x: {"logits": torch.tanh(x.float())}), IDS, 2),
        (tagged(lambda x: x.transpose(1, 2)), IDS, 1),
        (tagged(lambda x: x.permute(1, 0, 2)), IDS, 2),
        (tagged(lambda x: x.reshape(-1, 5, 5).movedim(-1, 1).contiguous()), IDS, 1),
        (tagged(lambda x: x[:, None].expand(-1, 2, -1, -1).mean(1)), IDS, 2),
        (tagged(lambda x: x[..., :4]), IDS, 2),
        (Net(nn.Conv1d(3, 7, 3, padding=1)), SIGNAL, 1),
        (Net(nn.Conv1d(3, 4, 1), nn.ReLU(), nn.ConvTranspose1d(4, 7, 1), nn.BatchNorm1d(7)), SIGNAL, 1),
        (Net(nn.Conv1d(3, 7, 1), then=lambda x: x.mT), SIGNAL, 2),
        (Net(nn.Conv2d(3, 6, 1), then=lambda x: F.interpolate(x, scale_factor=2)), PICTURE, 1),
        (Net(nn.Conv2d(3, 6, 1), then=lambda x: x.movedim(1, -1)), PICTURE, 3),
        (Net(nn.Conv2d(3, 6, 1), then=lambda x: x.flatten(2)), PICTURE, 1),
        (Net(nn.Linear(6, 6), then=torch.linalg.pinv), PICTURE, 1),  # nobody knows, and pictures have classes first
        (bert(BertForTokenClassification), BATCH, 2),
        (llama(), BATCH, 2),
    ],
)
def test_the_last_layer_tells_where_classes_are(net: nn.Module, x: Any, axis: int) -> None:
    with torch.no_grad():
        made = net(**x) if isinstance(x, dict) else net(x)
    output = made if isinstance(made, Tensor) else made["logits"]
    assert Reader(net.eval()).axis(x, None, output) == axis


def test_targets_tell_where_classes_are_if_no_layer_does() -> None:
    net, x = Net(nn.Linear(4, 4), then=lambda x: torch.einsum("btc,cd->bdt", x, torch.ones(4, 3))), torch.rand(2, 5, 4)
    output, reader = net(x), Reader(net)
    assert output.shape == (2, 3, 5)
    assert reader.axis(x, torch.zeros(2, 5, dtype=torch.long), output) == 1
    assert reader.axis(x, torch.zeros(2, 3, dtype=torch.long), output) == 2
    for targets in (None, torch.zeros(2, dtype=torch.long)):
        with pytest.raises(DataError, match="dimension 1 or 2"):
            reader.axis(x, targets, output)


def test_a_text_without_transformers() -> None:
    net, x, y = tagged(), IDS, IDS % 5
    y[0, 3:] = -100
    scores = sc.score(net, (x, y), [Taylor(norm=None), LRP(composite="alpha1beta0")])
    z = net.layers[:2](x).detach().requires_grad_()
    losses = F.cross_entropy(net.layers[2:](z).mT, y, reduction="none")
    loss = torch.stack([losses[i][y[i] >= 0].mean() for i in range(3)]).mean()
    (g,) = torch.autograd.grad(loss * 3, z)
    wanted = (z * g).mean(1).sum(0).abs() / 9
    found = {site.path: torch.as_tensor(values) for site, values in scores["taylor"].units.items()}
    torch.testing.assert_close(found["layers.1"].float(), wanted.detach(), rtol=1e-4, atol=1e-7)
    assert scores["lrp"].conservation.start == int((y >= 0).sum())
    with pytest.raises(CriterionError, match="one answer per sample"):
        sc.score(net, (x, y), "captum:GradientXActivation")
    with pytest.raises(DataError, match="labels run from 0 to 5"):
        sc.score(net, (x, y.clamp_min(0) + (y == 4)), "lrp")


def test_queries_by_classes() -> None:
    """As detectors answer: every query has classes, and no query is a sample."""
    torch.manual_seed(0)
    net = Net(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 7), then=lambda x: {"logits": x, "pred_boxes": x[..., :4]})
    x = torch.rand(2, 7, 4)
    seen = sc.explain(net, x, start="one", composite="alpha1beta0")
    assert torch.equal(seen.classes, net(x)["logits"].argmax(-1))
    assert seen.conservation.start == 14


# -- explanations ------------------------------------------------------------------------------------------------------
class Unbatched(nn.Module):
    """Looks positions up without a dimension of texts."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, places: Tensor) -> Tensor:
        return self.table(places[0])


class Bag(nn.Module):
    """Words, positions and kinds of tokens, added up, and one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.word, self.kind = nn.Embedding(11, 6), nn.Embedding(2, 6)
        self.place: nn.Module = nn.Embedding(8, 6)
        self.head = nn.Linear(6, 3, bias=False)

    def vectors(self, ids: Tensor) -> Tensor:
        return self.word(ids) + self.place(torch.arange(ids.shape[1])[None]) + self.kind(ids % 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.vectors(ids).mean(1))


def test_a_token_has_the_relevance_of_all_its_embeddings() -> None:
    net = Bag()
    seen = sc.explain(net, IDS, target=1, composite=Epsilon(0.0), start="logit")
    wanted = (net.vectors(IDS) * net.head.weight[1] / 5).sum(-1)
    torch.testing.assert_close(seen.heat, wanted.detach(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(seen.heat.sum(1), net(IDS)[:, 1].detach())
    size = seen.heat.abs()
    assert seen.first_token == pytest.approx(float(size[:, 0].sum() / size.sum()))
    assert f"{seen.first_token:.1%} of it on the first token" in repr(seen)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("ids", [IDS, torch.arange(25).view(5, 5) % 11, IDS[:1]], ids=["3x5", "5x5", "1x5"])
@pytest.mark.parametrize("most", [1, 2, 8])
def test_positions_may_be_looked_up_once_for_all_texts(
    monkeypatch: pytest.MonkeyPatch, ids: Tensor, batched: bool, most: int
) -> None:
    monkeypatch.setattr(sys.modules["secateur.relevance.explain"], "together", lambda *given, **options: most)
    net = Bag()
    if not batched:  # as nanoGPT does
        net.place = Unbatched(net.place)
    seen = sc.explain(net, ids, target=1, composite=Epsilon(0.0), start="logit")
    wanted = (net.vectors(ids) * net.head.weight[1] / 5).sum(-1)
    torch.testing.assert_close(seen.heat, wanted.detach(), rtol=1e-4, atol=1e-6)


def test_what_all_pictures_share_is_one_sum_in_parts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = Patches(), torch.rand(5, 3, 4, 4)
    whole = sc.explain(net, x, target=1, composite="alpha1beta0").input
    monkeypatch.setattr(sys.modules["secateur.relevance.explain"], "together", lambda *given, **options: 2)
    for one, two in zip(whole, sc.explain(net, x, target=1, composite="alpha1beta0").input, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


class Patches(nn.Module):
    """Pixels as tokens with places that all pictures share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pixels, self.place, self.head = nn.Conv2d(3, 6, 1), nn.Embedding(16, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.pixels(x).flatten(2).mT + self.place(torch.arange(16)[None])).mean(1))


class Mean(Bag):
    """The mean over the tokens that count, as of embeddings of sentences."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask[..., None]
        return self.head((self.vectors(input_ids) * mask).sum(1) / mask.sum(1))


def test_padding_has_no_relevance() -> None:
    net, mask = Mean(), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 1, 1, 0]])
    seen = sc.explain(net, {"input_ids": IDS, "attention_mask": mask}, 2, composite=Epsilon(0.0), start="logit")
    wanted = (net.vectors(IDS) * net.head.weight[2]).sum(-1) * mask / mask.sum(1, keepdim=True)
    torch.testing.assert_close(seen.heat, wanted.detach(), rtol=1e-4, atol=1e-6)
    assert [[word.tokens[0] for word in words] for words in seen.tokens()] == [[0, 1, 2, 3, 4], [0, 1], [1, 2, 3]]
    size = seen.heat.abs()
    assert seen.first_token == pytest.approx(float((size[0, 0] + size[1, 0] + size[2, 1]) / size.sum()))


@pytest.mark.parametrize("make", [llama, gpt2, bert])
def test_texts_are_explained_one_by_one(make: Any) -> None:
    model = make()
    seen = sc.explain(model, BATCH, composite="alpha1beta0", start="one")
    assert seen.heat.shape == (3, 9)
    torch.testing.assert_close(seen.heat.sum(1), torch.ones(3), rtol=1e-3, atol=1e-3)
    for i, row in enumerate(texts()):
        alone = sc.explain(model, {"input_ids": row[None]}, composite="alpha1beta0", start="one")
        torch.testing.assert_close(seen.heat[i, : len(row)], alone.heat[0], rtol=1e-3, atol=1e-4)
    assert float(seen.heat[BATCH["attention_mask"] == 0].abs().max()) < 1e-6


def test_embeddings_may_be_given_instead_of_numbers() -> None:
    model, row = gpt2(), texts()[0][None]
    known = sc.explain(model, row, composite="alpha1beta0")
    seen = sc.explain(model, {"inputs_embeds": model.transformer.wte(row).detach()}, composite="alpha1beta0")
    torch.testing.assert_close(seen.heat, known.heat)
    assert [word.text for word in seen.tokens()[0]][:2] == ["0", "1"]


def test_the_position_is_that_of_a_text_which_ends_there() -> None:
    model, row = llama(), texts()[0][None]
    seen = sc.explain(model, BATCH, position=[3, -1, 0], composite="alpha1beta0")
    short = sc.explain(model, row[:, :4], composite="alpha1beta0")
    torch.testing.assert_close(seen.heat[0, :4], short.heat[0], rtol=1e-3, atol=1e-5)
    assert float(seen.heat[0, 4:].abs().max()) < 1e-20
    assert [(row >= 0).nonzero().ravel().tolist() for row in seen.classes] == [[3], [5], [0]]
    assert int(short.classes[0, 3]) == int(model(row).logits[0, 3].argmax())
    left = padded(texts(), left=True)
    begin = Starter(position=0, reader=Reader(model), inputs=left)
    assert begin(model(**left).logits).nonzero()[:, :2].tolist() == [[0, 0], [1, 3], [2, 5]]


def test_one_token_against_another() -> None:
    model, row = llama(), texts()[0][None]
    options: dict[str, Any] = {"composite": "alpha1beta0", "start": "logit"}
    both = sc.explain(model, row, target=4, against=7, **options)
    one, other = (sc.explain(model, row, target=token, **options) for token in (4, 7))
    torch.testing.assert_close(both.heat, one.heat - other.heat, rtol=1e-3, atol=1e-6)
    logits = model(row).logits[0, -1]
    assert both.conservation.start == pytest.approx(float(logits[4] - logits[7]), rel=1e-4)
    pairs = sc.explain(bert(), BATCH, target=[0, 1, 2], against=[1, 2, 0], composite="alpha1beta0", start="one")
    torch.testing.assert_close(pairs.heat.sum(1), torch.zeros(3), rtol=0, atol=1e-4)


def test_heads_are_sums_of_their_units() -> None:
    model, row = llama(), texts()[0][None]
    seen = sc.explain(model, row, composite="alpha1beta0", start="one")
    path = "model.layers.0.self_attn.v_proj"
    heads = seen.heads(path, 2)
    torch.testing.assert_close(heads, torch.stack([seen.units[path][:4].sum(), seen.units[path][4:].sum()]))
    assert len(seen.units["model.layers.0.mlp.up_proj"]) == 24
    with pytest.raises(DataError, match="not 3 heads"):
        seen.heads(path, 3)
    with pytest.raises(DataError, match=r"self_attn\.v_proj"):
        seen.heads("layers.0.v_proj", 2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"position": 9}, "position=9 lies outside"),
        ({"position": [0, 1]}, "position="),
        ({"position": 0.5}, "position=0.5"),
        ({"target": 23}, "not among the 23"),
        ({"target": 1, "against": "no"}, "against is 'no'"),
        ({"target": lambda output: output, "against": 1}, "against=1 needs a class"),
    ],
)
def test_questions_that_make_no_sense_are_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError) as error:
        sc.explain(llama(), BATCH, **given)
    assert said in str(error.value)
    with pytest.raises(DataError, match="no row of positions"):
        sc.explain(bert(), BATCH, position=1)


# -- repair ------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def smaller() -> tuple[nn.Module, nn.Module]:
    model = llama()
    graph = sc.analyze(model, BATCH)
    plan = sc.plan(graph, sc.score(model, None, "weight", graph=graph), remove=0.3)
    return sc.apply(model, plan), model


def test_copies_of_texts_exchange_words_that_not_all_have() -> None:
    ids = torch.tensor([[1, 5, 6, 7, 2, 0], [1, 8, 9, 2, 0, 0], [1, 6, 10, 11, 12, 2]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0], [1] * 6])
    made = exchange_words({"input_ids": ids, "attention_mask": mask}, torch.Generator().manual_seed(0), share=1.0)
    new, free = made["input_ids"], (mask > 0) & (ids != 1) & (ids != 2)
    assert torch.equal(made["attention_mask"], mask)
    assert torch.equal(new[~free], ids[~free])
    assert set(new[free].tolist()) <= set(ids[free].tolist())
    assert not torch.equal(new, ids)
    few, many = ({"input_ids": torch.arange(8 * n).view(8, n) % 23} for n in (256, 257))
    short = {**many, "attention_mask": (torch.arange(257) < 200).long().expand(8, -1)}  # padding is no token
    for batch, copies in ((few, 8), (many, 0), (short, 8)):
        samples = Samples.collect(batch, 99, 8, None, 0.25, 0, None)
        assert samples.copies == copies
        assert sum(len(x["input_ids"]) for _, x in samples.chunks(5)) == 8 * (1 + copies)
    assert Samples.collect({"input_ids": torch.zeros(1, 6, dtype=torch.long)}, 9, 8, None, 0, 0, None).copies == 0


def test_the_answers_of_a_language_model_are_compared_as_classes(smaller: tuple[nn.Module, nn.Module]) -> None:
    """Jensen-Shannon at each token that is no padding, of the samples that are all held."""
    batch = padded(texts())
    found = Repair("mean", held_out=0.0, copies=0).examine(*smaller, batch, progress=False).divergence["none"]
    with torch.no_grad():
        q, p = (net(**batch).logits[batch["attention_mask"] > 0].double().softmax(-1) for net in smaller)
    m = (p + q) / 2
    wanted = ((p * (p / m).log()).sum(-1) + (q * (q / m).log()).sum(-1)).mean() / 2
    assert found == pytest.approx(float(wanted), rel=1e-4)


@pytest.mark.parametrize("rows", [20_000, 9])
@pytest.mark.parametrize("method", ["mean", "ridge"])
def test_padding_is_no_row_of_a_repair(smaller: tuple[nn.Module, nn.Module], method: str, rows: int) -> None:
    """What stands in the padding changes nothing, nor does how texts are divided into batches."""
    settings, rest = Repair(method, rows=rows), texts()
    found = []
    for fill in (0, 17):
        outcome = settings.examine(*smaller, padded(rest, fill=fill), progress=False)
        found.append((outcome.divergence, list(outcome.model.parameters())))
    batches = [padded(rest[:1]), padded(rest[1:])]
    outcome = settings.examine(*smaller, batches, progress=False)
    found.append((outcome.divergence, list(outcome.model.parameters())))
    for divergence, parameters in found[1:]:
        assert divergence == pytest.approx(found[0][0], rel=1e-4)
        for mine, other in zip(parameters, found[0][1], strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)
    assert settings.method in found[0][0]


def test_texts_of_several_lengths_need_a_mask(smaller: tuple[nn.Module, nn.Module]) -> None:
    with pytest.raises(DataError, match="attention_mask"):
        sc.repair(*smaller, [(row[None], None) for row in texts()], progress=False)


# -- words -------------------------------------------------------------------------------------------------------------
class Pieces:
    """A tokenizer that knows some tokens by their marks."""

    all_special_ids = (0,)

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.pieces[i] for i in ids]


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        (("<s>", "Ġpru", "ning", "Ġcan", "'", "t", "Ġhurt", ".", "Ġ2", "0"), "<s>|pruning|can't|hurt|.|20"),
        (("[CLS]", "un", "##pru", "##ned", "net", "!"), "[CLS]|unpruned|net|!"),
        (("<s>", "▁Ein", "▁Schnitt", "er", "▁日", "本", "語"), "<s>|Ein|Schnitter|日|本|語"),
        (("<s>", "a", "b", "c"), "<s>|a|b|c"),
    ],
)
def test_tokens_become_words(pieces: tuple[str, ...], words: str) -> None:
    ids = torch.arange(len(pieces))[None]
    net = Net(nn.Embedding(12, 4), nn.Linear(4, 2), then=lambda x: x.mean(1))
    seen = sc.explain(net, ids, target=0, composite=Epsilon())
    for tokenizer in (Pieces(*pieces), list(pieces), dict(enumerate(pieces))):
        (found,) = seen.tokens(tokenizer)
        plain = not isinstance(tokenizer, Pieces)
        assert "|".join(word.text for word in found) == words or plain  # only a tokenizer knows special tokens
        torch.testing.assert_close(sum(word.relevance for word in found), float(seen.heat.double().sum()))
        assert sorted(place for word in found for place in word.tokens) == list(range(len(pieces)))
    assert [word.text for word in seen.tokens()[0]] == [str(i) for i in range(len(pieces))]
    with pytest.raises(DataError, match="tokenizer is a int"):
        seen.tokens(3)
    with pytest.raises(DataError, match="no text for the token"):
        seen.tokens({0: "a"})


def test_a_tokenizer_that_works_on_bytes() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>"]
    )
    made.train_from_iterator(["the pruned tree grows", "the tree", "pruned trees grow"] * 3, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")
    text = "<s>the tree grüßt 🌳 trees\nnow"
    data = tokenizer(text, return_tensors="pt")
    net = Net(nn.Embedding(300, 4), nn.Linear(4, 2), then=lambda x: x.mean(1))
    (words,) = sc.explain(net, data["input_ids"], target=0, composite=Epsilon()).tokens(tokenizer)
    assert [word.text for word in words] == ["<s>", "the", "tree", "grüßt", "🌳", "trees", "↵", "now"]
    assert max(len(word.tokens) for word in words) > 1


STORY = (
    "<s>|Ġpru|ning|Ġa|Ġtree|Ġmeans|Ġ<b>|cut|ting|</b>|Ġ&|Ġkeep|ing|Ġwhat|Ġbears|Ġfruit|,|Ġbecause|Ġ\"|dead|Ġwood|\"|Ġ"
    "bears|Ġnone|.|Ġsupercalifragilistic|expialidocious|superlongwordwithoutanyspaceinitthatgoesonandonandonforever"
)  # fmt: skip


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> tuple[sc.relevance.Explanation, Pieces, Path]:
    pieces = STORY.split("|")
    torch.manual_seed(3)
    net = Net(nn.Embedding(40, 16), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2), then=lambda x: x.mean(1))
    rows = [torch.arange(len(pieces)), torch.arange(5, 24)]
    data = padded(rows)["input_ids"]
    seen = sc.explain(net, data, target=[0, 1], composite=Epsilon())
    path = tmp_path_factory.mktemp("text") / "words.html"
    assert seen.html(path, tokenizer=Pieces(*pieces)) == path
    return seen, Pieces(*pieces), path


@pytest.mark.parametrize(("width", "scheme"), zip((*WIDTHS, A4), (*SCHEMES, "light"), strict=True))
def test_the_words_can_be_read(browser: Any, story: Any, width: int, scheme: str) -> None:
    with opened(browser, story[2], width, scheme) as page:
        check(page)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert page.locator("b").count() == 0  # the text is no HTML
        assert page.locator(".text").count() == 2
        assert "pruning" in page.locator(".text").first.inner_text()
        assert page.locator("th[scope=col]").count() == 6


def test_the_colours_tell_the_relevance(browser: Any, story: Any) -> None:
    seen, tokenizer, path = story
    words = seen.tokens(tokenizer)[0]
    with opened(browser, path, 1280, "light") as page:
        colours = (
            page.locator(".text")
            .first.locator("span")
            .evaluate_all("all => all.map(e => getComputedStyle(e).backgroundColor.match(/\\d+/g).map(Number))")
        )
        titles = page.locator(".text").first.locator("span").evaluate_all("all => all.map(e => e.title)")
    assert len(colours) == len(words) == len(titles)
    total = sum(abs(word.relevance) for word in words)
    for word, (red, _, blue), title in zip(words, colours, titles, strict=True):
        assert (red >= blue) if word.relevance > 0 else (blue >= red)
        assert title == f"{100 * word.relevance / total:+.1f} %".replace("-", "−")
    strongest = max(range(len(words)), key=lambda i: abs(words[i].relevance))
    assert min(colours[strongest]) == min(min(colour) for colour in colours)


def test_words_are_drawn(story: Any, tmp_path: Path) -> None:
    from PIL import Image

    seen, tokenizer, _ = story
    picture = Image.open(seen.plot(tmp_path / "words.png", tokenizer=tokenizer)).convert("RGB")
    assert picture.getpixel((0, 0)) == (255, 255, 255)
    assert len(picture.getcolors(2**20)) > 20
    with pytest.raises(DataError, match="no token numbers"):
        sc.explain(Net(nn.Linear(4, 2)), torch.rand(2, 4)).html(tmp_path / "none.html")
