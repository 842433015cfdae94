"""The command line on models of text: language models and classifiers of Hugging Face, tiny and trained here."""

from __future__ import annotations

import http.server
import json
import math
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

import secateur as sc
from command import fail, invoke, succeed
from secateur.data.text import Tokens, read_lines, read_sentences, read_text
from secateur.errors import DataError, ModelError, SecateurError
from secateur.models import build, open_model
from secateur.models.hub import tokenizer_of
from secateur.report import Page
from secateur.running.accuracy import perplexity
from tiny_text import WORDS, classifier, language_model, running, sentences, tokenizer

THREADS = f"{torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)}"


class Desk:
    """A folder with a language model, a classifier and texts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model, self.classifier = language_model(root / "lm"), classifier(root / "bert")
        self.text, self.test, self.table = root / "text.txt", root / "test.txt", root / "table.csv"
        self.text.write_text(running(150))
        self.test.write_text(running(40, seed=1))
        rows = [f"{text},{label}" for text, label in sentences(80, seed=2)]
        self.table.write_text("\n".join(["sentence,label", *rows]))
        self.job = [f"hf:{self.model}", "--text", self.text, "--test-text", self.test, "--tokens", 16, "--no-latency"]
        self.job += ["--no-report", "--round-to", 1, "--sequences", 12]
        self.sort = [f"hf:{self.classifier}", "--text", self.table, "--labels", "--tokens", 16, "--no-latency"]
        self.sort += ["--no-report", "--round-to", 1]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return Desk(tmp_path_factory.mktemp("desk"))


def by_hand(model: Any, ids: torch.Tensor) -> tuple[float, float]:
    """Perplexity and accuracy of the next token, as transformers' own loss has it: one token at a time."""
    with torch.no_grad():
        logits = model(ids).logits.double()
    logs, hits, count = 0.0, 0, 0
    for row, scores in zip(ids.tolist(), logits, strict=True):
        for place in range(len(row) - 1):
            chances = scores[place] - scores[place].max()
            chances = chances.exp() / chances.exp().sum()
            logs += math.log(float(chances[row[place + 1]]))
            hits += int(chances.argmax()) == row[place + 1]
            count += 1
    return math.exp(-logs / count), hits / count


# -- prune -------------------------------------------------------------------------------------------------------------
def test_a_language_model_becomes_smaller_and_transformers_loads_it(desk: Desk, tmp_path: Path) -> None:
    out = tmp_path / "small"
    args = [word for word in desk.job if word not in ("--no-latency", "--no-report")]
    result = invoke("prune", *args, "--keep-params", 0.7, "--uniform", "--out", out)
    assert result.exit_code == 0, result.stderr
    assert sorted(p.name for p in out.iterdir()) == ["history.csv", "model", "report.html", "run.json"]
    found = json.loads((out / "run.json").read_text())
    small = transformers.AutoModelForCausalLM.from_pretrained(out / "model").eval()
    whole = transformers.AutoModelForCausalLM.from_pretrained(desk.model).eval()
    for side, model in (("before", whole), ("after", small)):
        assert found[side]["params"] == sum(p.numel() for p in model.parameters())
    assert found["after"]["params"] <= 0.7 * found["before"]["params"]
    # The test text is cut into as many sequences of the model's longest context as there are.
    ids = torch.tensor(tokenizer()(desk.test.read_text())["input_ids"])
    ids = ids[: len(ids) // 128 * 128].view(-1, 128)
    assert found["texts"] == {"reference": 12, "test": len(ids), "tokens": 16}
    for side, model in (("before", whole), ("after", small)):
        surprise, right = by_hand(model, ids)
        assert found["accuracy"][side]["perplexity"] == pytest.approx(surprise, rel=1e-4)
        assert found["accuracy"][side]["overall"] == pytest.approx(right)
    assert found["reasons"]["samples"] == 2  # the passages of the report
    assert f"drift of the heat maps of 2 samples: {found['reasons']['drift']:.2f}" in result.stdout
    # What people see.
    facts = (out / "model" / "README.md").read_text()
    right = [found["accuracy"][side]["overall"] for side in ("before", "after")]
    assert "| next-token accuracy | {:.4g} → {:.4g} |".format(*right) in facts
    lines = {line.split("│")[1].strip(): line for line in result.stdout.splitlines() if line.startswith("│")}
    assert "MACs per 16 tokens" in lines
    page = (out / "report.html").read_text()
    for batch in (1, 8):
        for side in ("before", "after"):
            rate = found[side][f"tokens_per_second_{batch}"]
            assert rate == pytest.approx(16 * batch / found[side][f"latency_{batch}"])
            assert f"{rate:,.0f}" in lines[f"tokens/s, batch {batch} x 16, PyTorch, {THREADS}"]
            assert f"{rate:,.0f} tokens/s" in page
    for side in ("before", "after"):
        assert f"{found['accuracy'][side]['perplexity']:.2f}" in lines["perplexity"]
        assert f"{found['accuracy'][side]['perplexity']:.2f}" in page
    assert "Perplexity" in page
    assert "by class" not in page.lower()
    words = re.findall(r'<span style="background: rgb\([^"]*" title="[^"]*">([^<]*)</span>', page)
    assert {"the", "cat"} <= set(words)  # passages in colours, before and after
    assert page.count('<p class="words">') == 4
    assert f"transformers opens it by itself: LlamaForCausalLM.from_pretrained('{out / 'model'}')" in result.stdout
    assert f"--text {desk.text} --test-text {desk.test} --tokens 16 --out {out}-recovered" in result.stdout
    assert f"scored on: 12 sequences of 16 tokens of {desk.text}" in result.stderr
    assert "%|" not in result.stderr  # bars of transformers
    again = tokenizer_of(f"hf:{out}")
    assert again("the cat")["input_ids"] == [WORDS.index("the"), WORDS.index("cat")]


def test_blocks_of_different_widths_open_too(desk: Desk, tmp_path: Path) -> None:
    out = tmp_path / "small"
    result = invoke("prune", *desk.job, "--keep-params", 0.7, "--scope", "global", "--out", out)
    assert result.exit_code == 0, result.stderr
    assert "'), since its blocks have different widths. For transformers alone: --uniform" in result.stdout
    ids = torch.tensor([[2, 6, 4]])
    outputs = [build(spec)(ids).logits for spec in (f"hf:{out}", str(out), f"hf:{out / 'model'}")]
    expected = sc.load(out / "model")(ids).logits
    assert all(torch.equal(output, expected) for output in outputs)
    found = succeed("inspect", out)
    assert found["params"] == json.loads((out / "run.json").read_text())["after"]["params"]
    # It can be pruned again.
    job = [f"hf:{out}", *desk.job[1:]]
    twice = succeed("prune", *job, "--keep-params", 0.8, "--criterion", "weight", "--out", tmp_path / "twice")
    assert twice["before"]["params"] == found["params"]
    assert twice["after"]["params"] <= 0.8 * found["params"]


def test_a_classifier_is_tested_by_class(desk: Desk, tmp_path: Path) -> None:
    args = [word for word in desk.sort if word != "--no-report"]
    args = [word for word in args if word != "--no-latency"]
    wanted, texts = ("--keep-params", 0.8, "--out", tmp_path / "s"), ("--sequences", 20)
    found = succeed("prune", *args, *wanted, *texts, "--runtime", "onnxruntime", "--batch", 3)
    assert found["texts"]["reference"] == 20
    small = sc.load(tmp_path / "s" / "model")
    # The last fifth of each class is held out.
    rows = sentences(80, seed=2)
    held = []
    for label in (0, 1):
        mine = [text for text, own in rows if own == label]
        held += [(text, label) for text in mine[len(mine) - len(mine) // 5 :]]
    assert found["texts"]["test"] == len(held)
    right = [int(small(**tokenizer()(text, return_tensors="pt")).logits.argmax()) == label for text, label in held]
    shares = [[hit for hit, (_, own) in zip(right, held, strict=True) if own == label] for label in (0, 1)]
    after = found["accuracy"]["after"]
    assert after["overall"] == pytest.approx(np.mean(right))
    assert [after["rude"], after["friendly"]] == pytest.approx([np.mean(share) for share in shares])
    assert "perplexity" not in after
    session = onnxruntime.InferenceSession(tmp_path / "s" / "model.onnx", providers=["CPUExecutionProvider"])
    tokens = tokenizer()([text for text, _ in held], padding=True, return_tensors="pt")
    feeds = {item.name: tokens[item.name].numpy() for item in session.get_inputs()}
    with torch.no_grad():
        expected = small(**tokens).logits.numpy()
    assert np.abs(session.run(None, feeds)[0] - expected).max() <= 1e-4 * np.abs(expected).max()
    page = (tmp_path / "s" / "report.html").read_text()
    assert "friendly" in page
    assert f"ONNX Runtime, {THREADS}, batch of 3" in page  # timed where it will run
    for side in ("before", "after"):
        width = found[side]["onnx_tokens_per_second_3"] * found[side]["onnx_latency_3"] / 3
        assert width == pytest.approx(found[side]["tokens_per_second_1"] * found[side]["latency_1"])


def test_half_precision_files_stay_half_precision(desk: Desk, tmp_path: Path) -> None:
    whole = transformers.AutoModelForCausalLM.from_pretrained(desk.model).half()
    whole.save_pretrained(tmp_path / "half")
    tokenizer().save_pretrained(tmp_path / "half")
    assert build(f"hf:{tmp_path / 'half'}").dtype == torch.float32
    assert build(f"hf:{tmp_path / 'half'}?dtype=bfloat16").dtype == torch.bfloat16
    job = [f"hf:{tmp_path / 'half'}", *desk.job[1:]]
    succeed("prune", *job, "--keep-params", 0.8, "--uniform", "--criterion", "weight", "--out", tmp_path / "s")
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "s" / "model").dtype == torch.float16


@pytest.mark.parametrize("command", ["prune", "recover"])
def test_half_precision_files_of_different_widths_keep_the_frequencies(
    command: str, desk: Desk, tmp_path: Path
) -> None:
    """The file has rounded weights. What it does not hold is as transformers has it when it loads rounded weights."""
    whole = transformers.AutoModelForCausalLM.from_pretrained(desk.model).half()
    whole.save_pretrained(tmp_path / "half")
    tokenizer().save_pretrained(tmp_path / "half")
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    job = [f"hf:{tmp_path / 'half'}", *desk.job[1:]]
    out = tmp_path / "s"
    succeed("prune", *job, "--remove", 0.3, "--criterion", "weight", "--out", out)
    if command == "recover":
        texts = ("--text", desk.text, "--test-text", desk.test, "--tokens", 16)
        succeed("recover", out, *texts, "--epochs", 1, "--out", tmp_path / "r")
        out = tmp_path / "r"
    small = sc.load(out / "model")
    assert json.loads((out / "model" / "config.json").read_text())["secateur"]["widths"] == "per layer"
    assert next(small.parameters()).dtype == torch.float16
    frequencies = small.model.rotary_emb.inv_freq
    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, stock.model.rotary_emb.inv_freq)


def test_an_interrupted_run_goes_on(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = [*desk.job, "--remove", 0.3, "--step", 0.1, "--criterion", "weight"]
    straight = succeed("prune", *args, "--out", tmp_path / "a")
    import secateur.cli.text_task as module

    calls = []

    def interrupted(model: Any, data: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return perplexity(model, data)

    monkeypatch.setattr(module, "perplexity", interrupted)
    assert invoke("prune", *args, "--out", tmp_path / "b").exit_code == 130
    monkeypatch.undo()
    said = fail("prune", *args, "--out", tmp_path / "b", "--sequences", 9)
    assert "reference was 12 sequences of 16 tokens" in said
    assert "is now 9 sequences" in said
    other = shutil.copy(desk.text, tmp_path / "copy.txt")  # the same text under another name
    moved = [other if word == desk.text else word for word in args]
    resumed = succeed("prune", *moved, "--out", tmp_path / "b")
    assert resumed["accuracy"] == straight["accuracy"]


def test_max_drop_stops_in_time(desk: Desk, tmp_path: Path) -> None:
    found = succeed(
        "prune", *desk.sort, "--max-drop", 0.3, "--step", 0.2, "--criterion", "weight", "--out", tmp_path / "s"
    )
    assert found["accuracy"]["after"]["overall"] >= found["accuracy"]["before"]["overall"] - 0.3
    assert "would have lost more accuracy" in found["stopped"] or "left" in found["stopped"]


def test_a_report_in_python_takes_batches_of_tokens(desk: Desk, tmp_path: Path) -> None:
    model, ids = (
        build(f"hf:{desk.model}"),
        torch.randint(2, len(WORDS), (6, 8), generator=torch.Generator().manual_seed(0)),
    )
    result = sc.prune(model, {"input_ids": ids}, "weight", keep={"params": 0.8}, repair=None, progress=False)
    held_out = [({"input_ids": part}, None) for part in ids.split(4)]
    page = result.report(
        tmp_path / "r.html", data=held_out, test=held_out, page=Page(latency=False, tokenizer=tokenizer())
    ).read_text()
    for net in (model, result.model):
        assert f"{by_hand(net, ids)[0]:.2f}" in page
    assert "Next-token accuracy on 42 held-out tokens" in page
    assert page.count('<p class="words">') == 8  # four passages, before and after
    assert page.count(f">{WORDS[int(ids[0, 0])]}</span>") >= 2


# -- inspect, explain, export ------------------------------------------------------------------------------------------
def test_inspect_needs_no_text(desk: Desk) -> None:
    found = succeed("inspect", f"hf:{desk.model}")
    whole = transformers.AutoModelForCausalLM.from_pretrained(desk.model)
    assert found["params"] == sum(p.numel() for p in whole.parameters())
    assert any("mlp" in row["layer"] and row["removable_groups"] for row in found["layers"])
    said = invoke("inspect", f"hf:{desk.model}", "--latency").stdout
    assert "MACs per text of 64 tokens" in said
    assert "ms for one text" in said
    assert "per text of 32 tokens" in invoke("inspect", f"hf:{desk.classifier}").stdout  # as many as it takes


def test_explain_writes_a_page_of_words(desk: Desk, tmp_path: Path) -> None:
    page = tmp_path / "why.html"
    args = ["--text", "the cat is", "--target", "great", "--against", "sad"]
    found = succeed("explain", f"hf:{desk.model}", *args, "--out", page)
    (text,) = found["texts"]
    assert text["words"] == ["the", "cat", "is"]
    assert "“great” rather than “sad”" in text["explained"]
    model = build(f"hf:{desk.model}")
    ids = {"input_ids": torch.tensor([[WORDS.index(word) for word in ("the", "cat", "is")]])}
    expected = sc.explain(model, ids, WORDS.index("great"), against=WORDS.index("sad")).text
    assert expected is not None
    assert text["relevance"] == pytest.approx(expected.relevance[0].tolist(), rel=1e-4, abs=1e-6)
    with torch.no_grad():
        logits = model(**ids).logits[0, -1]
    lead = float(logits[WORDS.index("great")] - logits[WORDS.index("sad")])
    assert found["held"] == pytest.approx(sum(text["relevance"]) / lead, rel=1e-3)
    told = invoke("explain", f"hf:{desk.model}", *args, "--out", page).stdout
    assert f"the words hold {100 * found['held']:.0f} % of what is explained, biases and the softmax" in told
    assert all(f">{word}</span>" in page.read_text() for word in text["words"])
    first = succeed("explain", f"hf:{desk.model}", "--text", "the cat is", "--position", 0, "--out", page)["texts"][0]
    assert "the answer at position 0" in first["explained"]
    assert first["relevance"][1:] == pytest.approx([0, 0], abs=1e-6)  # what comes later does not matter


def test_explain_takes_the_lines_of_a_file(desk: Desk, tmp_path: Path) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("the cat is great .\n\nthe dog is sad .\nthe fish is poor .\n")
    said = invoke("explain", f"hf:{desk.classifier}", "--text", lines, "--limit", 2, "--out", tmp_path / "out")
    assert said.exit_code == 0, said.stderr
    assert "the first 2 of 3 lines" in said.stderr
    assert "Explained: friendly." in said.stdout
    assert "Explained: rude." in said.stdout
    assert (tmp_path / "out" / "words.html").is_file()


def test_texts_that_are_cut_are_told(desk: Desk, tmp_path: Path) -> None:
    long = "the cat is great . " * 40  # 200 tokens, the model takes 128
    found = invoke("explain", f"hf:{desk.model}", "--text", long, "--out", tmp_path / "why.html")
    assert found.exit_code == 0, found.output
    assert "has 200 tokens; the first 128 of them are explained" in found.stderr
    rows = [f"{text},{i % 2}" for i, text in enumerate(["the cat is great", long] * 20)]
    (tmp_path / "t.csv").write_text("\n".join(["text,label", *rows]))
    job = [f"hf:{desk.classifier}", "--text", tmp_path / "t.csv", "--labels", "--tokens", 16, "--keep-params", 0.8]
    found = invoke("prune", *job, "--no-latency", "--no-report", "--round-to", 1, "--out", tmp_path / "s")
    assert "t.csv, 16 of them cut after 16 tokens" in found.stderr
    assert "t.csv, 4 of them cut after 16 tokens" in found.stderr


def test_the_tokenizer_of_another_model_is_refused(desk: Desk, tmp_path: Path) -> None:
    """Its numbers are beyond the table of words."""
    numbers = {word: 500 + number for number, word in enumerate(WORDS)}
    inner = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    other = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]")
    for name, source in (("model", desk.model), ("classifier", desk.classifier)):
        shutil.copytree(source, tmp_path / name)
        other.save_pretrained(tmp_path / name)
    out = ["--keep-params", 0.8, "--tokens", 16, "--out", tmp_path / "out"]
    said = (
        fail("prune", f"hf:{tmp_path / 'model'}", "--text", desk.text, *out),
        fail("prune", f"hf:{tmp_path / 'classifier'}", "--text", desk.table, "--labels", *out),
        fail("explain", f"hf:{tmp_path / 'model'}", "--text", "the cat", "--out", tmp_path / "out"),
    )
    for text in said:
        assert re.search(r"is not of this model: it gives token number 5\d\d, and the model knows \d+ tokens", text)


def test_export_takes_token_numbers(desk: Desk, tmp_path: Path) -> None:
    found = succeed("export", f"hf:{desk.model}", "--out", tmp_path / "m.pt2")
    assert found["input"] == [None, None]
    ids = torch.randint(len(WORDS), (2, 64))
    with torch.no_grad():
        expected = build(f"hf:{desk.model}")(ids).logits
        got = torch.export.load(tmp_path / "m.pt2").module()(input_ids=ids)
    assert torch.allclose(got.logits if hasattr(got, "logits") else got["logits"], expected, atol=1e-4)


# -- images of Hugging Face --------------------------------------------------------------------------------------------
def test_image_classifiers_take_images(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8,
        id2label={0: "red", 1: "blue"}, label2id={"red": 0, "blue": 1},
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config).train()
    pixels = torch.randn(8, 3, 16, 16) * 0.1
    labels = torch.arange(8) % 2
    for i, label in enumerate(labels.tolist()):
        pixels[i, 2 * label] += 1
        pixels[i, 2 - 2 * label] -= 1
        folder = tmp_path / "photos" / ("blue" if label else "red")
        folder.mkdir(parents=True, exist_ok=True)
        bytes_ = ((pixels[i].clamp(-1, 1) + 1) * 127.5).permute(1, 2, 0).numpy().astype(np.uint8)
        Image.fromarray(bytes_).resize((20, 20)).save(folder / f"{i}.png")
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(20):
        optimizer.zero_grad()
        model(pixels, labels=labels).loss.backward()
        optimizer.step()
    model.eval().save_pretrained(tmp_path / "vit")
    notes = {"size": {"height": 16, "width": 16}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_normalize": True}
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(notes))
    opened = open_model(f"hf:{tmp_path / 'vit'}")
    assert (opened.origin.view.size, opened.origin.view.fit, opened.origin.view.mean) == (16, "squash", (0.5,) * 3)
    args = ["--images", tmp_path / "photos", "--per-class", 2, "--no-latency", "--no-report", "--no-specialize"]
    out = tmp_path / "s"
    found = succeed("prune", f"hf:{tmp_path / 'vit'}", *args, "--round-to", 1, "--keep-params", 0.8, "--out", out)
    assert found["accuracy"]["before"]["overall"] == 1
    assert "reads no text" in fail("explain", f"hf:{tmp_path / 'vit'}", "--text", "a", "--out", tmp_path / "x")
    shutil.rmtree(tmp_path / "vit")  # what was written needs nothing else
    assert open_model(f"hf:{out}").origin.view == opened.origin.view
    assert succeed("inspect", out)["params"] == found["after"]["params"]
    explained = succeed("explain", out, tmp_path / "photos", "--limit", 2, "--out", tmp_path / "maps")
    assert {entry["predicted"] for entry in explained["images"]} <= {"red", "blue"}


# -- what is refused ---------------------------------------------------------------------------------------------------
class _Hub(http.server.BaseHTTPRequestHandler):
    """A hub that has no model."""

    def do_HEAD(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_mistyped_folder_does_not_wait_for_the_hub(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    for name in ("model", "mine/model"):
        shutil.copytree(desk.model, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))

    def hub_at(port: int) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        form = f"http://127.0.0.1:{port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", form)

    hub_at(9)  # nobody answers there

    def refused(spec: str, *words: str) -> None:
        begin = time.perf_counter()
        with pytest.raises(ModelError) as error:
            build(spec)
        assert time.perf_counter() - begin < 15  # the hub's own library tries for 23 s
        assert all(word in str(error.value) for word in words), error.value

    for spec in ("modle", "mine/modle"):
        refused(f"hf:{spec}", f"there is no folder '{spec}'", "cannot be reached", f"Fix: hf:{spec[:-2]}el.")
    refused("hf:some/name", "cannot be reached", "Fix: hf:FOLDER, or a name of the hub and a network.")
    refused("hf:./modle", "there is no folder './modle'", "Fix: hf:model.")
    refused("hf:model/config.json", "model/config.json is a file. Fix: the folder that it lies in, hf:model.")
    # What was downloaded once is there without a network.
    cached = tmp_path / "cache" / "models--some--name"
    shutil.copytree(desk.model, cached / "snapshots" / ("0" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    begin = time.perf_counter()
    same, own = build("hf:some/name").state_dict(), build(f"hf:{desk.model}").state_dict()
    assert time.perf_counter() - begin < 10
    assert all(torch.equal(same[name], own[name]) for name in own)
    # A hub that answers is left to say what it has.
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hub_at(server.server_port)
        refused("hf:some/other", "the hub does not give it", "not a valid model identifier")
        server.shutdown()


def test_folders_that_are_no_models(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(spec: object, match: str) -> None:
        with pytest.raises(ModelError, match=match):
            build(f"hf:{spec}")

    refused(tmp_path / "nowhere", "there is no folder")
    refused(tmp_path, "config.json is missing")
    refused(f"{desk.model}?width=3", "no option")
    with pytest.raises(ModelError, match="holds its own weights"):
        build(f"hf:{desk.model}", "weights.pt")
    with pytest.raises(ModelError, match=f"hf:{desk.model}"):
        build(str(desk.model))  # the prefix is missing
    copy = Path(shutil.copytree(desk.model, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    for changes, match in (
        ({"architectures": ["MyOwnModel"]}, "MyOwnModel.*no model of transformers"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "no weights for score.weight"),
        ({"model_type": "unheard"}, "cannot be read"),
    ):
        (copy / "config.json").write_text(json.dumps({**config, **changes}))
        refused(copy, match)
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "model.safetensors").unlink()
    refused(copy, "cannot be read")
    bare = tmp_path / "bare"
    transformers.AutoModelForCausalLM.from_pretrained(desk.model).save_pretrained(bare)
    said = fail("prune", f"hf:{bare}", *desk.job[1:], "--keep-params", 0.8, "--out", tmp_path / "o")
    assert "has no tokenizer that can be read" in said
    assert not (tmp_path / "o").exists()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SecateurError, match=r"pip install 'secateur\[hf\]'"):
        build(f"hf:{desk.model}")


def test_a_name_needs_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*args: Any, **named: Any) -> Any:
        raise OSError("We couldn't connect.")

    monkeypatch.setattr("secateur.models.hub._answers", lambda source: True)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", absent)
    with pytest.raises(
        ModelError, match=r"hf:nobody/nothing is no folder, and the hub does not give it: We couldn.t connect"
    ):
        build("hf:nobody/nothing")


def test_a_folder_never_asks_the_network(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert open_model(f"hf:{desk.model}").stored == torch.float32
    tokenizer_of(f"hf:{desk.model}")


def test_options_that_do_not_fit(desk: Desk, tmp_path: Path) -> None:
    out = ["--keep-params", 0.8, "--out", tmp_path / "o"]
    model, kind = f"hf:{desk.model}", f"hf:{desk.classifier}"
    assert "LlamaForCausalLM reads text. Fix: --text FILE" in fail("prune", model, *out)
    assert "are the same file" in fail("prune", model, "--text", desk.text, "--test-text", desk.text, *out)
    assert "--images is for images" in fail("prune", model, "--text", desk.text, "--images", tmp_path, *out)
    assert "Fix: --test-text" in fail("prune", model, "--text", desk.text, "--test", tmp_path, *out)
    assert "--labels says more about --text" in fail("prune", model, "--labels", *out)
    assert "Fix: --labels" in fail("prune", kind, "--text", desk.text, "--tokens", 16, *out)
    no_classifier = fail("prune", model, "--text", desk.table, "--labels", "--tokens", 16, *out)
    assert "foretells tokens and is no classifier. Fix: plain text without --labels" in no_classifier
    assert "takes at most 128 tokens. Fix: --tokens 128" in fail("prune", model, "--text", desk.text, *out)
    short = tmp_path / "short.txt"
    short.write_text("the cat is great .")
    said = fail("prune", model, "--text", short, "--tokens", 16, "--test-text", desk.test, *out)
    assert "short.txt has 5 tokens, too few for a sequence of 16. Fix: a longer text, or a smaller --tokens" in said
    assert "there is nothing to score units on" in fail("prune", "torchvision:resnet18", *out)
    assert "no model of text" in fail("prune", "torchvision:resnet18", "--text", desk.text, *out)
    assert "there is nothing to explain" in fail("explain", model, "--out", tmp_path / "o")
    assert "one of the two" in fail("explain", model, tmp_path, "--text", "a", "--out", tmp_path / "o")
    assert "there is no text file" in fail("explain", model, "--text", "absent.txt", "--out", tmp_path / "o")
    words = ["--text", "the cat is", "--out", tmp_path / "o"]
    assert "no single token" in fail("explain", model, *words, "--target", "great sad")
    assert "must be one of the model's outputs" in fail("explain", kind, *words, "--target", "7")
    assert not (tmp_path / "o").exists()


# -- texts -------------------------------------------------------------------------------------------------------------
def test_sequences_are_drawn_evenly() -> None:
    tokens = Tokens(torch.arange(103))
    assert tokens.sequences(10, 5, "t")[:, 0].tolist() == [0, 20, 40, 60, 80]
    assert tokens.sequences(10, 99, "t").tolist() == torch.arange(100).view(10, 10).tolist()
    first, last = tokens.split(0.2)
    assert (len(first), len(last)) == (82, 21)
    assert torch.equal(torch.cat([first.ids, last.ids]), tokens.ids)
    marked = Tokens(torch.arange(1, 10), (0,)).sequences(4, 9, "t")  # each begins with the mark of the start
    assert marked.tolist() == [[0, 1, 2, 3], [0, 4, 5, 6], [0, 7, 8, 9]]
    with pytest.raises(DataError, match="short has 9 tokens, too few for a sequence of 10"):
        Tokens(torch.arange(9)).sequences(10, 1, "short")


def test_a_mark_of_the_start_is_put_before_each_sequence() -> None:
    marked = tokenizer()
    assert Tokens.of("the cat", marked).begin == ()
    from tokenizers.processors import TemplateProcessing

    marked.backend_tokenizer.post_processor = TemplateProcessing(single="[UNK] $A", special_tokens=[("[UNK]", 0)])
    marked.bos_token = "[UNK]"
    found = Tokens.of("the cat", marked)
    assert (found.begin, found.ids.tolist()) == ((0,), [2, 6])


def test_files_that_are_no_text(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    with pytest.raises(DataError, match="there is no text file"):
        read_text(file)
    file.write_bytes("café".encode("latin1"))
    with pytest.raises(DataError, match=r"no text in UTF-8: byte 3 is 0xe9.*iconv"):
        read_text(file)
    file.write_text(" \n")
    with pytest.raises(DataError, match="is empty"):
        read_text(file)
    file.write_bytes(b"\xef\xbb\xbfhello")
    assert read_text(file) == "hello"
    file.write_text("hello", encoding="utf-16")
    with pytest.raises(DataError, match=r"no text in UTF-8.*iconv -f utf-16 "):
        read_text(file)
    file.write_text("hello", encoding="utf-16-le")
    with pytest.raises(DataError, match=r"byte 1 is zero.*iconv -f utf-16le "):
        read_text(file)


def test_lines_end_alike_wherever_a_text_was_written(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"a\r\nb\nc\rd\x0ce")
    assert read_lines(file) == "a\nb\nc\nd\x0ce"


def test_labels_are_spelt_as_the_model_spells_them(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("text,label\na,No\nb,NO\nc,Yes\n")
    assert read_sentences(tmp_path / "t.csv", 3, ("No", "NO", "yes")).labels == (0, 1, 2)
    (tmp_path / "t.csv").write_text("text,label\na,no\n")
    with pytest.raises(DataError, match="'no' is no label of this model"):
        read_sentences(tmp_path / "t.csv", 3, ("No", "NO", "yes"))


def test_a_table_may_hold_long_texts(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(f"text,label\n{'a' * 200_000},1\n")
    assert len(read_sentences(tmp_path / "t.csv", 2).texts[0]) == 200_000


def test_tables_of_all_kinds(tmp_path: Path) -> None:
    rows = [("a, b", "good"), ("c", "bad"), ("d\te", "1")]
    csv, tsv, lines = (tmp_path / f"t.{end}" for end in ("csv", "tsv", "jsonl"))
    csv.write_text('Label,Sentence\ngood,"a, b"\nbad,c\n1,d\te\n')
    tsv.write_text('text\tlabel\na, b\tgood\nc\tbad\n"d\te"\t1\n')
    lines.write_text("\n".join(json.dumps({"mine": text, "kind": label}) for text, label in rows))
    for file, columns in ((csv, None), (tsv, None), (lines, ("mine", "kind"))):
        found = read_sentences(file, 2, ("bad", "good"), columns)
        assert found.texts == ("a, b", "c", "d\te")
        assert found.labels == (1, 0, 1)
        assert found.counts == {"bad": 1, "good": 2}
    numbers = tmp_path / "n.jsonl"
    numbers.write_text('{"text": "a", "label": 1}\n{"text": "b", "label": 0}\n')
    assert read_sentences(numbers, 2).labels == (1, 0)
    assert read_sentences(numbers, 2).classes == ("class 0", "class 1")
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "a\u2028b", "label": 1}\r\n', encoding="utf-8")
    assert read_sentences(lines, 2).texts == ("a\u2028b",)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("t.txt", "a", "no ending that says what it is"),
        ("t.csv", "text,label\n", "no rows"),
        ("t.csv", "words,label\na,1\n", "which column holds the text.*words, label.*columns='TEXT,LABEL'"),
        ("t.csv", "text,label\na,2\n", "line 2: '2' is no label of this model.*0 to 1"),
        ("t.csv", "text,label\na,-1\n", "'-1' is no label"),
        ("t.csv", "text,label\na,ugly\n", "'ugly' is no label"),
        ("t.csv", "text,label\na,--1\n", "'--1' is no label"),
        ("t.csv", "label,text\n1,a\n1,hello, world\n", "line 3 has more cells than the header.*quotes"),
        ("t.jsonl", '{"text": ["a", "b"], "label": 0}\n', "line 1 has a list in 'text'"),
        ("t.csv", "text,label\na,0\nb\n", "line 3 has nothing in 'label'"),
        ("t.jsonl", '{"text": "a", "label": 0}\n{"text"', "line 2 is no JSON"),
        ("t.jsonl", "[1]\n", "line 1 is no object"),
        ("t.csv", 'label,text\n1,a\n1,"to be or\n0,next\n1,last\n', "after line 2: unexpected end.*two for each"),
        ("t.tsv", 'text\tlabel\n"yes" he said\t1\n', "after line 1: .*Fix: quotes around a text"),
        ("t.csv", "text,text,label\na,b,1\n", "several columns called 'text'"),
        ("t.csv", "text;label\na;1\n", "There are text;label. Fix: commas between the cells"),
        ("t.csv", "text,label\na\0b,1\n", "byte 12 is zero"),
        ("t.csv", f"text,label\na,{'1' * 5000}\n", "is no label of this model"),
        ("t.jsonl", f'{{"text": "a", "label": {"1" * 5000}}}\n', "line 1 is no JSON"),
        ("t.jsonl", '{"text": "\\ud800 a", "label": 1}\n', "line 1 has half a character in 'text'"),
    ],
)  # fmt: skip
def test_tables_that_are_refused(tmp_path: Path, name: str, content: str, match: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=match):
        read_sentences(tmp_path / name, 2)


def test_classes_are_drawn_alike(tmp_path: Path) -> None:
    rows = "\n".join(f"t{i},{int(i >= 20)}" for i in range(24))  # twenty of one class, four of the other
    (tmp_path / "t.csv").write_text(f"text,label\n{rows}\n")
    texts = read_sentences(tmp_path / "t.csv", 2)
    assert texts.draw(6).texts == ("t0", "t6", "t13", "t20", "t21", "t22")
    assert list(texts.draw(20).counts.values()) == [16, 4]
    first, last = texts.split(0.2)
    assert list(last.counts.values()) == [4, 0]
    assert last.texts == ("t16", "t17", "t18", "t19")
    assert len(first) == 20


def test_perplexity_counts_no_padding(desk: Desk) -> None:
    model = build(f"hf:{desk.model}")
    ids = torch.tensor([[2, 6, 4, 15], [2, 7, 4, 1]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    found = perplexity(model, [{"input_ids": ids, "attention_mask": mask}])
    assert found.tokens == 5
    parts = [math.log(by_hand(model, row[None, :size])[0]) * (size - 1) for row, size in zip(ids, (4, 3), strict=True)]
    assert found.perplexity == pytest.approx(math.exp(sum(parts) / 5), rel=1e-5)
    with pytest.raises(DataError, match="does not foretell the next token"):
        perplexity(build(f"hf:{desk.classifier}"), [{"input_ids": ids}])


# -- recover -----------------------------------------------------------------------------------------------------------
def test_recover_trains_what_transformers_loads(desk: Desk, tmp_path: Path) -> None:
    """A folder of uniform widths holds no plan. What is written from it can be trained once more."""
    small, better, best = (tmp_path / name for name in ("small", "better", "best"))
    quick = ("--no-report", "--no-latency", "--criterion", "weight")
    said = invoke("prune", *desk.job, "--keep-params", 0.8, "--uniform", *quick, "--out", small)
    given = ["--teacher", f"hf:{desk.model}", "--text", desk.text, "--tokens", 16, "--epochs", 1]
    assert f"recover {small} --teacher hf:{desk.model}" in said.stdout  # as the command itself says
    succeed("recover", small, *given, "--out", better)
    told = invoke("recover", f"hf:{better}", *given, "--out", best).stdout
    assert f"LlamaForCausalLM.from_pretrained('{best / 'model'}')" in told.replace("\n", "")
    ids, found = torch.arange(8)[None], []
    for folder in (small, better, best):
        stock = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
        with torch.no_grad():
            found.append(stock(ids).logits)
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])
    assert (
        f"| parameters | {sum(part.numel() for part in stock.parameters()):,} |"
        in (best / "model" / "README.md").read_text()
    )
    whole = fail("recover", f"hf:{desk.model}", *given, "--out", tmp_path / "whole")
    assert "was not pruned by secateur" in whole


def test_recover_trains_a_language_model_on_text_or_on_what_its_teacher_writes(desk: Desk, tmp_path: Path) -> None:
    small, better, own = (tmp_path / name for name in ("small", "better", "own"))
    succeed("prune", *desk.job, "--remove", 0.5, "--repair", "none", "--out", small)
    given, taught = [small, "--tokens", 16, "--test-text", desk.test], ["--teacher", f"hf:{desk.model}"]
    found = succeed("recover", *given, *taught, "--text", desk.text, "--epochs", 4, "--batch-size", 4, "--out", better)
    assert [row["epoch"] for row in found["epochs"]] == [1, 2, 3, 4]
    # (This model knows its text by heart, so that perplexity on other text says little: the loss has to fall.)
    assert found["epochs"][-1]["loss"] < found["epochs"][0]["loss"]
    assert found["accuracy"]["after"]["perplexity"] != found["accuracy"]["before"]["perplexity"]
    ids = torch.arange(8)[None]
    with torch.no_grad():  # what is written is what was measured, and not what came in
        assert not torch.equal(sc.load(better / "model")(ids).logits, sc.load(small / "model")(ids).logits)
    written = [*given, *taught, "--sequences", 24, "--learning-rate", 0.001]
    said = invoke("recover", *written, "--epochs", 2, "--out", own)
    assert said.exit_code == 0, said.stderr
    assert "trained on: 24 sequences of 16 tokens that the teacher wrote" in said.stderr
    note = json.loads((own / "run.json").read_text())
    assert note["epochs"][-1]["loss"] < note["epochs"][0]["loss"]
    assert set(note["accuracy"]["after"]) == {"overall", "perplexity"}
    timed = succeed("recover", *given[:3], *taught, "--minutes", 0.01, "--out", tmp_path / "timed")
    assert timed["stopped"] == "the minutes are over"
    assert timed["accuracy"] == {"before": None, "after": None}
    alone = fail("recover", *given[:3], "--epochs", 1, "--out", tmp_path / "alone")
    assert "reads text, and there is none to train on. Fix: --text FILE; or --teacher MODEL" in alone
    pictures = fail(
        "recover", *given[:3], *taught, "--images", desk.root, "--epochs", 1, "--out", tmp_path / "pictures"
    )
    assert "reads text, but --images is given. Fix: --text FILE instead" in pictures
    labels = fail("recover", *given[:3], *taught, "--labels", "--epochs", 1, "--out", tmp_path / "labels")
    assert "--labels and --columns say more about --text, which is missing" in labels
