"""A tiny language and tiny models of it, made offline: a tokenizer of words, a text, a language model, a classifier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F

NOUNS, VERBS = ("cat", "dog", "bird", "fish"), ("sees", "hears", "meets", "leaves")
GOOD, BAD = ("fine", "nice", "great"), ("poor", "sad", "bad")
WORDS = ["[UNK]", "[PAD]", "the", "a", "is", ".", *NOUNS, *VERBS, *GOOD, *BAD]


def tokenizer() -> Any:
    """A token for each word."""
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]")


def sentences(count: int, seed: int = 0) -> list[tuple[str, int]]:
    """Sentences, and whether they are friendly."""
    draw = torch.Generator().manual_seed(seed)

    def one(of: tuple[str, ...]) -> str:
        return of[int(torch.randint(len(of), (), generator=draw))]

    made = []
    for i in range(count):
        if i % 2:
            friendly = int(torch.randint(2, (), generator=draw))
            made.append((f"the {one(NOUNS)} is {one(GOOD if friendly else BAD)} .", friendly))
        else:
            words = one(NOUNS), one(VERBS), one(NOUNS), one(GOOD if i % 4 else BAD)
            made.append(("the {} {} a {} . {} .".format(*words), int(i % 4 > 0)))
    return made


def running(count: int = 120, seed: int = 0) -> str:
    return "\n".join(text for text, _ in sentences(count, seed))


def language_model(folder: Path, **changes: Any) -> Path:
    """A trained Llama and its tokenizer in a folder."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        **{"vocab_size": len(WORDS), "num_key_value_heads": 2, "max_position_embeddings": 128, **sizes, **changes},
        bos_token_id=None, eos_token_id=WORDS.index("."), pad_token_id=1,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(config)
    ids = torch.tensor(tokenizer()(running(400))["input_ids"])
    ids = ids[: len(ids) // 16 * 16].view(-1, 16)
    _train(model, lambda: model(ids, labels=ids).loss, 40)
    return _saved(model, folder)


def classifier(folder: Path, named: bool = True) -> Path:
    """A trained BERT that tells friendly sentences from others."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, num_labels=2, pad_token_id=1,
    )  # fmt: skip
    if named:
        config.id2label, config.label2id = {0: "rude", 1: "friendly"}, {"rude": 0, "friendly": 1}
    model: Any = transformers.BertForSequenceClassification(config)
    texts, labels = zip(*sentences(200), strict=True)
    inputs, wanted = tokenizer()(list(texts), padding=True, return_tensors="pt"), torch.tensor(labels)
    _train(model, lambda: F.cross_entropy(model(**inputs).logits, wanted), 30)
    return _saved(model, folder)


def _train(model: Any, loss: Any, steps: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def _saved(model: Any, folder: Path) -> Path:
    model.eval().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
