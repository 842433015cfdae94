"""Pruned Hugging Face models as folders: what stock `from_pretrained` loads, and what only secateur does."""

from __future__ import annotations

import copy
import json
import os
import shutil
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import secateur as sc
import tiny_text
from benchmarks.fuzz_files import reseal_hf
from secateur.errors import FileFormatError, SecateurError, SecateurWarning
from secateur.files.formats import as_stock
from secateur.files.pretrained import save_pretrained
from secateur.files.saved import about
from secateur.models.hub import open_hub
from secateur.plans import Limits
from secateur.runtimes import Setup

IDS = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**{**sizes, **heads, "use_cache": False, **changes})
    return transformers.LlamaForCausalLM(config).eval()


def bert() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    return transformers.BertForSequenceClassification(config).eval()


def pruned(model: nn.Module, remove: float = 0.3, **limits: Any) -> sc.Result:
    data = [({"input_ids": IDS}, None)]
    return sc.prune(model, data, "random", remove=remove, limits=Limits(**limits), repair=None, progress=False)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def widths(model: nn.Module) -> list[int]:
    return [
        len(weight)
        for name, weight in model.named_parameters()
        if name.endswith(("up_proj.weight", "gate_proj.weight"))
    ]


def test_uniform_widths_are_the_same_in_every_block() -> None:
    result = pruned(llama(), uniform=True, only="*.mlp.*")
    assert len(set(widths(result.model))) == 1
    assert widths(result.model)[0] < 48


def test_uniform_keeps_the_best_units_of_each_block() -> None:
    """In each block those units stay that have its highest scores."""
    model = llama()
    graph = sc.analyze(model, {"input_ids": IDS})
    scores = sc.score(model, None, "weight", graph=graph)
    plan = sc.plan(graph, scores, remove=0.4, limits=Limits(uniform=True, only="*.mlp.*"))
    values = scores.of(graph)
    gone = set(plan.groups)
    layers = [layer for layer in graph.layers if ".mlp." in layer.name and layer.prunable]
    lost = [[int(g) for g in layer.groups if int(g) in gone] for layer in layers]
    assert len(layers) == 3
    assert len({len(groups) for groups in lost}) == 1
    assert lost[0]
    for layer, groups in zip(layers, lost, strict=True):
        kept = [int(g) for g in layer.groups if int(g) not in gone]
        assert max(values[groups]) <= min(values[kept])


def test_a_run_goes_on_only_if_it_is_as_uniform(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"remove": 0.3, "repair": None, "checkpoint": tmp_path / "run", "progress": False}
    data = [({"input_ids": IDS}, None)]
    sc.prune(llama(), data, "random", **asked, limits=Limits(uniform=True, only="*.mlp.*"))
    with pytest.raises(FileFormatError, match="uniform was True, is now False"):
        sc.prune(llama(), data, "random", **asked, limits=Limits(only="*.mlp.*"))


@pytest.mark.parametrize("multiple", [8, 16])
def test_uniform_widths_are_multiples(multiple: int) -> None:
    kept = widths(pruned(llama(), 0.5, uniform=True, round_to=multiple, only="*.mlp.*").model)
    assert len(set(kept)) == 1
    assert kept[0] % multiple == 0
    assert kept[0] < 48


def test_stock_from_pretrained_loads_uniform_widths_with_equal_logits(tmp_path: Path) -> None:
    result = pruned(llama(), uniform=True, only="*.mlp.*")
    folder = result.save_pretrained(tmp_path / "small")
    config = json.loads((folder / "config.json").read_text())
    assert config["intermediate_size"] == widths(result.model)[0]
    assert config["hidden_size"] == 32
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(stock) is transformers.LlamaForCausalLM
    assert torch.equal(logits(stock.eval()), logits(result.model))
    assert torch.equal(logits(sc.load(folder)), logits(result.model))
    stock.generate(IDS, max_new_tokens=3, do_sample=False)


def test_half_precision_stays(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "original")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "original", dtype=torch.bfloat16)
    result = pruned(model.eval(), uniform=True, only="*.mlp.*")
    stock = transformers.AutoModelForCausalLM.from_pretrained(result.save_pretrained(tmp_path / "small"))
    assert stock.dtype == torch.bfloat16
    assert torch.equal(logits(stock), logits(result.model))


def test_a_model_that_was_halved_later_is_written_as_transformers_makes_it(tmp_path: Path) -> None:
    """`half` rounds the frequencies of the positions too, and transformers does not. Sharp attention shows that."""
    model = llama(num_hidden_layers=16, head_dim=64, rope_theta=20.0)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            parameter.data *= 100 if "q_proj" in name or "k_proj" in name else 6
    result = pruned(model, uniform=True, only="*.mlp.*")
    result.model.half()
    assert result.model.model.rotary_emb.inv_freq.dtype == torch.float16
    stock = transformers.AutoModelForCausalLM.from_pretrained(result.save_pretrained(tmp_path / "small"))
    assert stock.dtype == torch.float16
    assert stock.model.rotary_emb.inv_freq.dtype == torch.float32
    assert result.model.model.rotary_emb.inv_freq.dtype == torch.float16  # saving changes nothing
    rounded = {name: tensor.float() for name, tensor in result.model.named_parameters()}
    assert all(torch.equal(tensor.float(), rounded[name]) for name, tensor in stock.named_parameters())


def test_a_width_that_the_code_uses_as_a_number_goes_to_our_own_loader(tmp_path: Path) -> None:
    """T5 divides by the root of the width in its config."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval()
    data = [({"input_ids": IDS, "decoder_input_ids": IDS}, None)]
    result = sc.prune(
        model, data, "random", remove=0.3, limits=Limits(uniform=True, ignore=("*.wi", "*.q")), repair=None,
        progress=False,
    )  # fmt: skip
    with pytest.warns(SecateurWarning, match=r"computes something else.*Only secateur\.load"):
        folder = result.save_pretrained(tmp_path / "small")
    assert json.loads((folder / "config.json").read_text())["secateur"]["widths"] == "per layer"
    with torch.no_grad():
        wanted, found = (net(input_ids=IDS, decoder_input_ids=IDS).logits for net in (result.model, sc.load(folder)))
    assert torch.equal(wanted, found)


def test_a_model_of_two_inputs_is_compared_on_both(tmp_path: Path) -> None:
    """The inputs that transformers gives for CLIP have no pixels."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config={**sizes, **ends, "vocab_size": 64}, vision_config={**sizes, "image_size": 16, "patch_size": 4}
        )
    ).eval()
    inputs = {"input_ids": IDS, "pixel_values": torch.rand(2, 3, 16, 16)}
    graph = sc.analyze(model, inputs)
    scores = sc.score(model, None, "weight", graph=graph)
    plan = sc.plan(graph, scores, remove=0.3, limits=Limits(uniform=True, only="*.mlp.*"))
    small = sc.apply(model, plan)
    stock = transformers.CLIPModel.from_pretrained(save_pretrained(small, tmp_path / "small"))
    with torch.no_grad():
        assert torch.equal(stock.eval()(**inputs).logits_per_text, small(**inputs).logits_per_text)


def test_widths_per_layer_are_loaded_by_us_and_refused_by_stock(tmp_path: Path) -> None:
    result = pruned(llama(), only="*.mlp.*", scope="global")
    assert len(set(widths(result.model))) > 1
    folder = result.save_pretrained(tmp_path / "small")
    assert json.loads((folder / "config.json").read_text())["secateur"]["widths"] == "per layer"
    again = sc.load(folder)
    assert type(again) is transformers.LlamaForCausalLM
    assert torch.equal(logits(again), logits(result.model))
    with pytest.raises(RuntimeError, match="mismatch"):
        transformers.AutoModelForCausalLM.from_pretrained(folder)


def test_heads_that_no_config_describes_go_to_our_own_loader(tmp_path: Path) -> None:
    """BERT's config derives the width of a head from the number of heads."""
    with pytest.warns(SecateurWarning, match="describes the widths of this plan"):
        result = pruned(bert(), remove=0.25, uniform=True)
    folder = result.save_pretrained(tmp_path / "small")
    assert torch.equal(logits(sc.load(folder)), logits(result.model))


def test_widths_that_no_config_describes_are_seen_before_the_work(tmp_path: Path) -> None:
    """The width must be a multiple of the number of heads."""
    model = llama(hidden_size=36, num_attention_heads=9, num_key_value_heads=3)
    asked: dict[str, Any] = {"uniform": True, "ignore": ("*.q_proj", "*.up_proj")}
    with pytest.warns(SecateurWarning, match=r"embed_tokens \(\d+ → \d+ units\)\. Only secateur.load") as seen:
        result = pruned(model, 0.2, **asked)
    assert result.model.config.hidden_size == 36
    assert len([w for w in seen if "config" in str(w.message)]) == 1
    folder = result.save_pretrained(tmp_path / "small")
    assert json.loads((folder / "config.json").read_text())["secateur"]["widths"] == "per layer"
    with warnings.catch_warnings():
        warnings.simplefilter("error", SecateurWarning)
        fitting = pruned(model, 0.3, **asked, round_to=9)
    folder = fitting.save_pretrained(tmp_path / "fitting")
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 18


@pytest.mark.parametrize("limits", [{"uniform": True, "only": "*.mlp.*"}, {"scope": "global"}])
def test_image_models_are_folders_too(limits: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=5)
    model = transformers.ViTForImageClassification(config).eval()
    images = torch.randn(4, 3, 16, 16)
    data = [({"pixel_values": images}, None)]
    result = sc.prune(model, data, "random", remove=0.3, limits=Limits(**limits), repair=None, progress=False)
    folder = result.save_pretrained(tmp_path / "small")
    with torch.no_grad():
        wanted = result.model(images).logits
        assert torch.equal(sc.load(folder)(images).logits, wanted)
        if "uniform" in limits:
            stock = transformers.AutoModelForImageClassification.from_pretrained(folder)
            assert torch.equal(stock(images).logits, wanted)


def test_the_trainer_of_transformers_takes_a_pruned_model(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    small = pruned(llama(), scope="global").model
    data = [{"input_ids": ids, "labels": ids} for ids in IDS]
    asked = transformers.TrainingArguments(
        tmp_path / "run", max_steps=4, learning_rate=0.01, report_to=[], disable_tqdm=True, use_cpu=True
    )
    before = small(input_ids=IDS, labels=IDS).loss
    transformers.Trainer(small, asked, train_dataset=data).train()
    assert small(input_ids=IDS, labels=IDS).loss < before - 0.1


def test_the_tokenizer_and_the_generation_config_are_copied(tmp_path: Path) -> None:
    source = tmp_path / "source"
    model = llama()
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(source)
    (source / "tokenizer.json").write_text('{"version": "1.0"}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(source)
    for number, limits in enumerate(({"uniform": True}, {"scope": "global"})):
        folder = pruned(loaded, only="*.mlp.*", **limits).save_pretrained(tmp_path / f"small{number}")
        assert (folder / "tokenizer.json").read_text() == '{"version": "1.0"}'
        assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
        assert json.loads((folder / "generation_config.json").read_text())["max_new_tokens"] == 7


def test_files_beside_a_model_of_the_hub_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without how images are prepared, the folder would be read as if nobody had said it."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    cached = tmp_path / "cache" / "models--some--name"
    source = cached / "snapshots" / ("0" * 40)
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    llama().save_pretrained(source)
    (source / "preprocessor_config.json").write_text('{"crop_pct": 0.9}')
    loaded = transformers.AutoModelForCausalLM.from_pretrained("some/name", local_files_only=True)
    folder = pruned(loaded, only="*.mlp.*", uniform=True).save_pretrained(tmp_path / "small")
    assert (folder / "preprocessor_config.json").read_text() == '{"crop_pct": 0.9}'
    assert not (folder / "tokenizer.json").exists()  # which was not downloaded
    loaded.config._name_or_path = "no name: of/the/hub"
    folder = pruned(loaded, only="*.mlp.*", uniform=True).save_pretrained(tmp_path / "other")
    assert not (folder / "preprocessor_config.json").exists()


def test_the_card_states_the_facts_of_the_run(tmp_path: Path) -> None:
    result = pruned(llama(), uniform=True, only="*.mlp.*")
    text = (result.save_pretrained(tmp_path / "small") / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: transformers\n")
    before, after = (sum(p.numel() for p in m.parameters()) for m in (llama(), result.model))
    assert f"{before:,} → {after:,}" in text
    assert "random" in text
    assert "LlamaForCausalLM.from_pretrained" in text
    assert str(tmp_path) not in text


def test_a_folder_of_the_users_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    with pytest.raises(SecateurError, match=r"chapter\.tex"):
        pruned(llama(), uniform=True, only="*.mlp.*").save_pretrained(tmp_path / "thesis")
    assert os.listdir(tmp_path / "thesis") == ["chapter.tex"]


def test_an_unpruned_model_of_transformers_is_not_replaced(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "original")
    with pytest.raises(SecateurError, match=r"not written by secateur"):
        pruned(llama(), uniform=True, only="*.mlp.*").save_pretrained(tmp_path / "original")


def test_our_own_folder_is_replaced(tmp_path: Path) -> None:
    pruned(llama(), uniform=True, only="*.mlp.*").save_pretrained(tmp_path / "small")
    result = pruned(llama(), remove=0.5, scope="global", only="*.mlp.*")
    folder = result.save_pretrained(tmp_path / "small")
    assert torch.equal(logits(sc.load(folder)), logits(result.model))
    assert not [name for name in os.listdir(folder) if name.startswith(".")]


def test_what_is_no_model_of_transformers_is_refused(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    result = sc.prune(net, (torch.rand(4, 4), torch.arange(4) % 2), remove=0.5, progress=False)
    with pytest.raises(SecateurError, match=r"Sequential is not a model of transformers\. Fix: sc\.save"):
        result.save_pretrained(tmp_path / "small")
    sc.save(result, tmp_path / "plain")
    with pytest.raises(SecateurError, match="does not say which model"):
        sc.load(tmp_path / "plain")


def test_uniform_widths_replace_widths_per_layer(tmp_path: Path) -> None:
    pruned(llama(), scope="global", only="*.mlp.*").save_pretrained(tmp_path / "small")
    assert (tmp_path / "small" / "plan.json").exists()
    result = pruned(llama(), uniform=True, only="*.mlp.*")
    folder = result.save_pretrained(tmp_path / "small")
    assert torch.equal(logits(sc.load(folder)), logits(result.model))
    assert not (folder / "plan.json").exists()


@pytest.fixture(scope="module", params=["uniform", "per layer"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    limits: dict[str, Any] = {"uniform": True} if request.param == "uniform" else {"scope": "global"}
    place = tmp_path_factory.mktemp("written")
    model = llama()
    model.save_pretrained(place / "original")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(place / "original")
    folder = pruned(loaded, only="*.mlp.*", **limits).save_pretrained(place / "small")
    assert json.loads((folder / "config.json").read_text())["secateur"]["widths"] == request.param
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "small"))


def hostile(folder: Path, **changes: Any) -> None:
    """A config with other entries whose digests fit."""
    config = json.loads((folder / "config.json").read_text())
    reseal_hf(folder, {"config.json": json.dumps({**config, **changes}).encode()})


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("config.json", b'"rms_norm_eps": 1e-06', b'"rms_norm_eps": 2e-06'),
        ("config.json", b'"digest"', b'"digesT"'),
        ("generation_config.json", b'"transformers_version"', b'"temperature": 3.0, "transformers_version"'),
    ],
)
def test_a_folder_that_was_changed_is_refused(folder: Path, file: str, old: bytes, new: bytes) -> None:
    raw = (folder / file).read_bytes()
    assert raw.count(old) == 1
    (folder / file).write_bytes(raw.replace(old, new))
    with pytest.raises(FileFormatError, match=rf"not as it was written: {file} changed"):
        sc.load(folder)


def test_a_flipped_bit_of_the_weights_is_refused(folder: Path) -> None:
    raw = bytearray((folder / "model.safetensors").read_bytes())
    raw[-3] ^= 1
    (folder / "model.safetensors").write_bytes(raw)
    with pytest.raises(FileFormatError, match=r"model\.safetensors changed|is damaged"):
        sc.load(folder)


@pytest.mark.parametrize("uniform", [False, True])
def test_an_empty_entry_about_quantisation_is_not_written(uniform: bool, tmp_path: Path) -> None:
    model = llama(quantization_config=None)
    assert model.config.to_dict().get("quantization_config", "") is None
    small = pruned(model, uniform=uniform, only="*.mlp.*")
    assert torch.equal(logits(sc.load(small.save_pretrained(tmp_path / "small")).eval()), logits(small.model))


def test_a_tied_table_may_be_nearly_all_of_a_model(tmp_path: Path) -> None:
    """It is registered as embedding and as head, and once more when the two are tied."""
    small = pruned(llama(vocab_size=60_000, tie_word_embeddings=True), uniform=True, only="*.mlp.*")
    loaded = sc.load(small.save_pretrained(tmp_path / "small")).eval()
    assert torch.equal(logits(loaded), logits(small.model))


def test_a_file_that_is_missing_is_named(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    with pytest.raises(FileFormatError, match=r"generation_config\.json changed"):
        sc.load(folder)


def test_a_config_that_is_no_json_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("{]")
    with pytest.raises(FileFormatError, match=r"config\.json is damaged"):
        sc.load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Trainer"]}, r"'Trainer', which is no model"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers = 1000000000, but there are only"),
        ({"num_hidden_layers": 100_000}, r"far larger than the weights"),
        ({"hidden_size": 10**12}, r"hidden_size = 1000000000000, but there are only"),
        ({"hidden_size": 2**20}, r"far larger than the weights"),
        ({"intermediate_size": 2**20}, r"far larger than the weights"),
        ({"vocab_size": 2**20}, r"far larger than the weights"),
        ({"num_labels": 10**9}, r"num_labels = 1000000000"),
        ({"model_type": "gpt2", "n_layer": 10**9}, r"n_layer = 1000000000"),
        ({"hidden_size": -3}, r"transformers cannot build"),
        ({"hidden_act": "no such"}, r"transformers cannot build"),
        ({"rope_parameters": {"rope_type": "no such"}}, r"transformers cannot build"),
        ({"model_type": "no such"}, r"transformers cannot build"),
        ({"attn_implementation": "someone/kernel"}, r"entry 'attn_implementation'"),
        ({"text_config": {"auto_map": {"AutoModel": "code.Model"}}}, r"entry 'auto_map'"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, r"entry 'quantization_config'"),
        ({"transformers_weights": "other.safetensors"}, r"entry 'transformers_weights'"),
        ({"intermediate_size": 40}, r"does not fit LlamaForCausalLM|transformers cannot build"),
        ({"num_hidden_layers": 4}, r"does not fit LlamaForCausalLM"),
        ({"num_hidden_layers": 2}, r"does not fit LlamaForCausalLM"),
    ],
    ids=str,
)  # fmt: skip
def test_hostile_configs_are_refused_before_they_cost_anything(folder: Path, changes: Any, message: str) -> None:
    hostile(folder, **changes)
    begin = time.process_time()
    with pytest.raises(FileFormatError, match=message):
        sc.load(folder)
    assert time.process_time() - begin < 5


def test_an_adapter_beside_the_model_is_not_loaded(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "elsewhere"}')
    with pytest.raises(FileFormatError, match="also holds an adapter"):
        sc.load(folder)


def test_what_is_checked_before_a_folder_is_built_leaves_no_trace(folder: Path) -> None:
    """The hooks that limit building are gone, and the random numbers are the user's."""
    state = torch.get_rng_state()
    sc.load(folder)
    assert torch.equal(torch.get_rng_state(), state)
    assert not nn.modules.module._global_parameter_registration_hooks
    assert not nn.modules.module._global_module_registration_hooks
    assert not nn.modules.module._global_buffer_registration_hooks


def test_the_generation_config_is_loaded_too(tmp_path: Path) -> None:
    model = llama()
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path / "original")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "original")
    result = pruned(loaded, only="*.mlp.*", scope="global")
    assert sc.load(result.save_pretrained(tmp_path / "small")).generation_config.max_new_tokens == 7


@pytest.mark.parametrize(("make", "batch"), [(llama, 2), (bert, 1)])
def test_onnx_takes_any_batch_and_any_length(make: Any, batch: int, tmp_path: Path) -> None:
    import onnxruntime

    model = make()
    model.config.use_cache = True
    inputs = {"input_ids": IDS[:batch], "attention_mask": torch.ones_like(IDS[:batch])}
    if make is bert and torch.__version__.startswith("2.6."):  # which cannot follow the sizes of its mask
        with pytest.warns(SecateurWarning, match="takes batches of 1 only"):
            sc.export(model, tmp_path / "model.onnx", inputs)
        return
    file = sc.export(model, tmp_path / "model.onnx", inputs)
    session = onnxruntime.InferenceSession(str(file))
    assert len(session.get_outputs()) == 1  # no caches
    assert model.config.use_cache is True
    mask = torch.ones(3, 17, dtype=torch.int64)
    mask[2, 11:] = 0
    ids = torch.randint(0, 64, (3, 17), generator=torch.Generator().manual_seed(2))
    found = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0]
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-5)


# -- life afterwards ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def both() -> tuple[Any, Any]:
    """A model that lost neurons and whole groups of heads, differently in each block, and the original with zeros."""
    model = llama()
    result = pruned(model, 0.4, scope="global", only=["*.mlp.*", "*.self_attn.*"])
    assert result.plan is not None
    assert result.plan.heads
    masked = sc.apply(model, result.plan, how="mask")
    return result.model.eval(), masked.eval()


def generated(model: Any, **asked: Any) -> Tensor:
    return model.generate(IDS, max_new_tokens=6, do_sample=False, pad_token_id=0, **asked)


@pytest.mark.parametrize(
    "asked",
    [
        {"use_cache": True},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"num_beams": 3, "use_cache": True},
    ],
)
def test_text_is_generated_as_by_the_masked_original(both: tuple[Any, Any], asked: dict[str, Any]) -> None:
    small, masked = both
    assert torch.equal(
        generated(small, **asked), generated(masked, use_cache=False, num_beams=asked.get("num_beams", 1))
    )


def test_a_pruned_model_learns_with_and_without_checkpoints_of_gradients(both: tuple[Any, Any]) -> None:
    gradients = []
    for checkpointing in (False, True):
        small = copy.deepcopy(both[0]).train()
        if checkpointing:
            small.gradient_checkpointing_enable()
        small(input_ids=IDS, labels=IDS).loss.backward()
        gradients.append([p.grad for p in small.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)
    assert all(bool(g.abs().sum() > 0) for g in gradients[0] if g is not None)


def test_adapters_are_added_to_a_pruned_model(both: tuple[Any, Any]) -> None:
    small = copy.deepcopy(both[0])
    before = logits(small)
    adapted = peft.get_peft_model(small, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    assert torch.equal(logits(adapted), before)  # LoRA begins with zeros
    adapted(input_ids=IDS, labels=IDS).loss.backward()
    trained = [name for name, p in adapted.named_parameters() if p.grad is not None]
    assert len(trained) == 2 * 2 * 3


def test_a_pruned_model_in_half_precision(both: tuple[Any, Any]) -> None:
    small, masked = (copy.deepcopy(model).bfloat16() for model in both)
    torch.testing.assert_close(logits(small), logits(masked), rtol=0.05, atol=0.02)


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="torch 2.6 cannot compile the original either")
def test_torch_compile(both: tuple[Any, Any]) -> None:
    compiled = torch.compile(both[0], backend="eager")
    torch.testing.assert_close(logits(compiled), logits(both[0]))


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="torch 2.6 cannot compile the original either")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's own compiler needs one for C++")
def test_torch_compile_with_its_own_compiler(both: tuple[Any, Any], tmp_path: Path, monkeypatch: Any) -> None:
    """Widths differ from layer to layer, so each layer is compiled for its own. Compared with the masked original."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    from torch._inductor.compile_fx import compile_fx

    torch._dynamo.reset()
    small, masked = both
    seen: list[str] = []

    def counted(graph: Any, inputs: Any) -> Any:
        seen.append(type(graph).__name__)
        return compile_fx(graph, inputs)

    compiled = torch.compile(small, backend=counted)
    torch.testing.assert_close(logits(compiled), logits(masked))
    assert seen
    longer = torch.cat([IDS, IDS], 1)
    with torch.no_grad():
        torch.testing.assert_close(compiled(input_ids=longer).logits, masked(input_ids=longer).logits)


def test_files_of_another_folder_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that was not loaded has no tokenizer. Another model's may lie where Python was started."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    folder = pruned(llama(), only="*.mlp.*", uniform=True).save_pretrained(tmp_path / "small")
    assert not (folder / "tokenizer.json").exists()


@pytest.mark.parametrize("limits", [{"uniform": True}, {"scope": "global"}])
def test_the_generation_config_and_the_latency_are_saved_as_they_are_now(tmp_path: Path, limits: dict) -> None:
    """Not as in the folder that the model was loaded from; also if a tokenizer is given."""
    llama().save_pretrained(tmp_path / "source")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    model.generation_config.max_new_tokens = 9
    result = pruned(model, only="*.mlp.*", **limits)
    where = Setup("torch", batch=2, threads=1, device="cpu").to_dict()
    before, after = (replace(cost, latency=s) for cost, s in ((result.cost_before, 0.5), (result.cost_after, 0.25)))
    timed = replace(result, settings={**result.settings, "latency": where}, cost_before=before, cost_after=after)
    for number, tokenizer in enumerate((None, tiny_text.tokenizer())):
        folder = timed.save_pretrained(tmp_path / f"small{number}", tokenizer=tokenizer)
        assert sc.load(folder).generation_config.max_new_tokens == 9
        assert about(folder) == {"latency": {**where, "before": 0.5, "after": 0.25}}
    assert about(result.save_pretrained(tmp_path / "other")) == {}


def test_saving_draws_no_random_numbers(tmp_path: Path) -> None:
    small = pruned(llama(), only="*.mlp.*", uniform=True).model
    torch.manual_seed(3)
    save_pretrained(small, tmp_path / "small")
    found = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(found, torch.rand(1))


# -- buffers that no file holds ----------------------------------------------------------------------------------------
HALF = pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])


def sharp(place: Path) -> Path:
    """A folder of a model whose attention shows it when the frequencies of its positions are rounded."""
    model = llama(num_hidden_layers=4, head_dim=32, max_position_embeddings=256)
    for name, parameter in model.named_parameters():
        parameter.data *= 60 if "q_proj" in name or "k_proj" in name else 1
    model.save_pretrained(place)
    return place


def far(model: nn.Module) -> Tensor:
    """Logits at positions that are far apart."""
    ids = torch.randint(0, 64, (2, 200), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return model(input_ids=ids).logits


@HALF
@pytest.mark.parametrize("named", [True, False])
def test_a_number_format_by_option_is_that_of_transformers(named: bool, kind: torch.dtype, tmp_path: Path) -> None:
    folder = sharp(tmp_path / "model")
    if not named:  # old folders leave it to the weights
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "dtype"}))
    stock = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=kind)
    model, stored = open_hub(f"hf:{folder}?dtype={str(kind).removeprefix('torch.')}")
    assert stored == torch.float32
    assert torch.equal(far(model), far(stock))
    assert not torch.equal(far(stock), far(copy.deepcopy(stock).to(kind)))  # the model shows it


@HALF
def test_a_pruned_folder_by_option_is_as_transformers_would_have_it(kind: torch.dtype, tmp_path: Path) -> None:
    """Uniform widths: transformers opens the folder itself. Others: its frequencies are in a model of that format."""
    original, option = sharp(tmp_path / "model"), f"?dtype={str(kind).removeprefix('torch.')}"
    model = transformers.LlamaForCausalLM.from_pretrained(original).eval()
    folder = pruned(model, uniform=True, only="*.mlp.*").save_pretrained(tmp_path / "uniform")
    stock = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=kind)
    assert torch.equal(far(open_hub(f"hf:{folder}{option}")[0]), far(stock))

    small = pruned(model, only="*.mlp.*")
    folder = small.save_pretrained(tmp_path / "layers")
    wanted = copy.deepcopy(small.model).to(kind)
    wanted.model.rotary_emb.inv_freq = stock.model.rotary_emb.inv_freq
    assert torch.equal(far(open_hub(f"hf:{folder}{option}")[0]), far(wanted))


def casts(folder: Path, kind: torch.dtype) -> dict[str, Any]:
    """Pruned models in half precision, by how they came to it. Only the layers of one block differ from the others'."""

    def smaller(dtype: torch.dtype) -> Any:
        return pruned(transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval(), only="*.mlp.*").model

    return {
        "loaded": smaller(kind),
        "cast": smaller(torch.float32).to(kind),
        "widened": smaller(torch.float32).to(kind).float(),
        "half of a half": smaller(kind).to(kind),
    }


@HALF
@pytest.mark.parametrize("way", ["loaded", "cast", "widened", "half of a half"])
def test_a_saved_model_keeps_its_buffers(way: str, kind: torch.dtype, tmp_path: Path) -> None:
    """Loaded so, transformers' frequencies are in float32. Cast so, they are rounded, whatever the format is later."""
    original = sharp(tmp_path / "model")
    small = casts(original, kind)[way]
    save_pretrained(small, tmp_path / "small")
    sc.save(small, tmp_path / "plain")
    fresh = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(original)).eval()
    for again in (sc.load(tmp_path / "small"), sc.load(tmp_path / "plain", fresh)):
        assert torch.equal(far(again), far(small))
        made, kept = again.model.rotary_emb.inv_freq, small.model.rotary_emb.inv_freq
        assert made.dtype == kept.dtype
        assert torch.equal(made, kept)


@HALF
@pytest.mark.parametrize("way", ["loaded", "cast"])
@pytest.mark.parametrize("known", [True, False])
def test_a_folder_of_an_older_version_finds_its_buffers(
    known: bool, way: str, kind: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its output decides. Where it was not kept, as of large models, the buffers are those of transformers."""
    original = sharp(tmp_path / "model")
    models = casts(original, kind)
    monkeypatch.setattr("secateur.files.saved.formats_of", lambda model: {})
    if not known:
        monkeypatch.setattr("secateur.files.saved.answer", lambda *of: None)
    save_pretrained(models[way], tmp_path / "small")
    assert "buffers" not in json.loads((tmp_path / "small" / "plan.json").read_text())
    again = sc.load(tmp_path / "small")
    assert torch.equal(far(again), far(models[way if known else "loaded"]))


def test_formats_that_no_buffer_has_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = pruned(llama()).model
    for wrong in ({"x": ["int8"]}, {"x": "float32"}, ["float32"], {"x": [1]}, {"x": [["float32"]]}):
        monkeypatch.setattr("secateur.files.saved.formats_of", lambda model, wrong=wrong: wrong)
        save_pretrained(small, tmp_path / "small")
        with pytest.raises(FileFormatError, match=r"plan\.json is damaged: the formats of its buffers"):
            sc.load(tmp_path / "small")


def mixed(place: Path, kind: torch.dtype = torch.float16) -> Any:
    """A T5 as transformers loads it. Of its weights in float16, it keeps some in float32."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    whole = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    whole.save_pretrained(place)
    return transformers.T5ForConditionalGeneration.from_pretrained(place, dtype=kind).eval()


def smaller(model: nn.Module, uniform: bool) -> sc.Result:
    """Without a share of the neurons of each MLP, the same of all if the widths are to be uniform."""
    data = [({"input_ids": IDS, "decoder_input_ids": IDS}, None)]
    limits = Limits(scope="layer" if uniform else "global", only="*.wi", uniform=uniform)
    return sc.prune(model, data, "random", remove=0.1, limits=limits, repair=None, progress=False)


def assert_same(found: nn.Module, wanted: nn.Module) -> None:
    """Every number, and its format."""
    a, b = found.state_dict(), wanted.state_dict()
    assert {name: tensor.dtype for name, tensor in a.items()} == {name: tensor.dtype for name, tensor in b.items()}
    assert all(torch.equal(a[name], b[name]) for name in b)


@pytest.mark.parametrize("uniform", [True, False])
def test_weights_of_several_formats_come_back_in_them(uniform: bool, tmp_path: Path) -> None:
    """Transformers keeps some weights of T5 in float32 if the others are float16."""
    model = mixed(tmp_path / "model")
    assert {p.dtype for p in model.parameters()} == {torch.float16, torch.float32}
    result = smaller(model, uniform)
    folder = result.save_pretrained(tmp_path / "small")
    assert (folder / "plan.json").exists() != uniform
    again = sc.load(folder)
    assert_same(again, result.model)
    if uniform:  # transformers' own file, and its own reading
        result.model.save_pretrained(tmp_path / "own")
        own, ours = (load_file(path / "model.safetensors") for path in (tmp_path / "own", folder))
        assert own.keys() == ours.keys()
        assert all(torch.equal(own[name], ours[name]) and own[name].dtype == ours[name].dtype for name in own)
        assert_same(transformers.T5ForConditionalGeneration.from_pretrained(folder), result.model)
    with torch.no_grad():
        wanted, found = (net(input_ids=IDS, decoder_input_ids=IDS).logits for net in (result.model, again))
    assert torch.equal(wanted, found)


@HALF
def test_a_number_format_leaves_what_transformers_keeps_in_float32(kind: torch.dtype, tmp_path: Path) -> None:
    """Folders that are opened in float32 are written in the format that they had, as transformers would read them."""
    stock = mixed(tmp_path / "model", kind)
    whole = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert_same(as_stock(whole, kind), stock)


def test_a_format_that_transformers_would_not_read_is_kept_by_a_plan(tmp_path: Path) -> None:
    """In bfloat16 it keeps nothing of T5 in float32."""
    model = mixed(tmp_path / "model", torch.float32).bfloat16()
    whole = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for name, tensor in model.named_parameters():
        tensor.data = whole.get_parameter(name).data if name.endswith("wo.weight") else tensor.data
    result = smaller(model, uniform=True)
    with pytest.warns(SecateurWarning, match=r"has `\S*wo.weight` in bfloat16 instead of float32"):
        folder = result.save_pretrained(tmp_path / "small")
    assert_same(sc.load(folder), result.model)
