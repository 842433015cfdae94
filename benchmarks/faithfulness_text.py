"""How faithful is the relevance of words? A sentence encoder with a classifier of sentiment, and a language model.

    python -m benchmarks.faithfulness_text --weights DIR --sentiment SST2 --text wikitext-2 --out text.jsonl
    python -m benchmarks.faithfulness_text --out text.jsonl --table

`--device cuda` where there is one. DIR holds the folders minilm and smollm2; SST2 has train.tsv and test.tsv;
wikitext-2 has test.txt. The measures are those of `benchmarks.faithfulness`, with tokens instead of regions: covered
tokens become the unknown (or last) token of the tokenizer, or a token of another text. Explained is the predicted
class, or the predicted next token.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secateur as sc
from benchmarks.explainers import shuffled
from benchmarks.faithfulness import gini, keep, lines_of, table
from benchmarks.relevance import patch_with_lxt
from secateur.analysis.reasons import correlation

LEVELS = 7
SHARES = (0.0, 0.5, 1.0)
#: Relevance of the tokens of one text for a class.
Explainer = Callable[["Task", nn.Module, Tensor, int], Tensor]


class Sentiment(nn.Module):
    """A sentence encoder, the mean of its tokens, and a linear classifier."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(encoder.config.hidden_size, 2)

    def pooled(self, **inputs: Any) -> Any:
        return self.encoder(**inputs).last_hidden_state.mean(1)

    def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None) -> Tensor:
        return self.head(self.pooled(input_ids=input_ids, inputs_embeds=inputs_embeds))

    def get_input_embeddings(self) -> Any:
        return self.encoder.get_input_embeddings()


class Task:
    """A model, its texts as token numbers, and the token that covers others."""

    def __init__(self, model: nn.Module, texts: list[Tensor], blank: int) -> None:
        self.model, self.blank = model.eval().requires_grad_(False), blank
        place = next(model.parameters()).device
        self.texts = [ids.to(place) for ids in texts]

    def logits(self, model: Any, **inputs: Tensor) -> Tensor:
        """Of a whole text, or of its next token."""
        found = model(**inputs)
        return found if isinstance(found, Tensor) else found.logits[:, -1]

    @torch.no_grad()
    def sure(self, ids: Tensor, number: int) -> Tensor:
        return self.logits(self.model, input_ids=ids).double().softmax(1)[:, number].cpu()


def minilm(args: argparse.Namespace) -> Task:
    from transformers import AutoModel, AutoTokenizer

    folder = args.weights / "minilm"
    encoder = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)  # the classifier's first weights
    net = Sentiment(encoder).eval().to(args.device)
    rows = {}
    for part in ("train", "test"):
        lines = (args.sentiment / f"{part}.tsv").read_text(encoding="utf-8").splitlines()
        rows[part] = [line.split("\t") for line in lines]
    read = lambda row: torch.tensor([tokenizer(row[0])["input_ids"]], device=args.device)  # noqa: E731
    few = rows["train"][: args.reference]
    with torch.no_grad():
        x = torch.cat([net.pooled(input_ids=read(row)) for row in few])
    y = torch.tensor([int(row[1]) for row in few], device=args.device)
    optimizer = torch.optim.LBFGS(net.head.parameters(), max_iter=100)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net.head(x), y) + 1e-3 * net.head.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    test = [row for row in rows["test"] if 8 <= len(row[0].split()) <= 24][: args.samples]
    texts = [read(row) for row in test]
    with torch.no_grad():
        right = sum(int(net(ids).argmax()) == int(row[1]) for ids, row in zip(texts, test, strict=True))
    print(f"minilm: {100 * right / len(texts):.0f} % of {len(texts)} sentences")
    return Task(net, texts, tokenizer.unk_token_id)


def smollm2(args: argparse.Namespace, patched: bool = False) -> Task:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = args.weights / "smollm2"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if patched:
        from transformers.models.llama import modeling_llama

        patch_with_lxt(modeling_llama)
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    lines = [line for line in (args.text / "test.txt").read_text(encoding="utf-8").splitlines() if len(line) > 300]
    texts = [torch.tensor([tokenizer(line)["input_ids"][: args.tokens]]) for line in lines[: args.samples]]
    return Task(net.to(args.device), texts, tokenizer.unk_token_id or tokenizer.eos_token_id)


# -- explainers --------------------------------------------------------------------------------------------------------
def ours(name: str) -> Explainer:
    def run(task: Task, model: nn.Module, ids: Tensor, number: int) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return sc.explain(model, {"input_ids": ids}, number, composite=name).heat[0].detach()

    return run


def _gradient(task: Task, model: Any, x: Tensor, number: int) -> Tensor:
    x = x.detach().requires_grad_(True)
    with torch.enable_grad():
        return torch.autograd.grad(task.logits(model, inputs_embeds=x)[0, number], x)[0]


def gradient_times_input(task: Task, model: Any, ids: Tensor, number: int) -> Tensor:
    x = model.get_input_embeddings()(ids)
    return (x * _gradient(task, model, x, number)).sum(-1)[0]


def integrated_gradients(task: Task, model: Any, ids: Tensor, number: int, steps: int = 16) -> Tensor:
    x = model.get_input_embeddings()(ids)
    whole = sum(_gradient(task, model, x * (step + 0.5) / steps, number) for step in range(steps))
    return (x * whole / steps).sum(-1)[0]


def rollout(task: Task, model: Any, ids: Tensor, number: int) -> Tensor:
    inner = getattr(model, "encoder", model)
    with torch.no_grad():
        grids = inner(input_ids=ids, output_attentions=True).attentions
    whole = torch.eye(ids.shape[1])
    for grid in grids:
        mixed = grid[0].mean(0).cpu() + torch.eye(ids.shape[1])
        whole = mixed / mixed.sum(-1, keepdim=True) @ whole
    return whole.mean(0) if inner is not model else whole[-1]


def random_map(task: Task, model: Any, ids: Tensor, number: int) -> Tensor:
    return torch.rand(ids.shape[1], generator=torch.Generator().manual_seed(int(ids.sum())))


METHODS: dict[str, Explainer] = {
    **{name: ours(name) for name in ("attnlrp", "attnlrp_gamma", "alpha1beta0", "epsilon_plus")},
    "gradient × input": gradient_times_input, "integrated gradients": integrated_gradients,
    "attention rollout": rollout, "lxt": gradient_times_input, "random": random_map,
}  # fmt: skip


# -- measures ----------------------------------------------------------------------------------------------------------
def srg(task: Task, ids: Tensor, heat: Tensor, number: int, cover: Tensor) -> float:
    count, order, rows = ids.shape[1], heat.argsort().to(ids.device), []
    for ranked in (order, order.flip(0)):
        for level in range(1, LEVELS + 1):
            rows.append(ids[0].clone())
            chosen = ranked[: round(count * level / (LEVELS + 1))]
            rows[-1][chosen] = cover[chosen]
    sure = task.sure(torch.stack(rows), number)
    return float((sure[:LEVELS] - sure[LEVELS:]).sum()) / (LEVELS + 1)


def judge(task: Task, explain: Explainer, plain: Task) -> dict[str, float]:
    """All measures. `plain` is the task with the model as it is, for a method that changes modules."""
    found: dict[str, list[float]] = {}
    networks = [shuffled(task.model, share) for share in SHARES]
    for place, ids in enumerate(plain.texts):
        with torch.no_grad():
            logits = plain.logits(plain.model, input_ids=ids)[0]
        number, other = int(logits.argmax()), int(logits.argsort()[-2])
        begin = time.perf_counter()
        heat = explain(task, task.model, ids, number).double().cpu()
        found.setdefault("seconds", []).append(time.perf_counter() - begin)
        further = plain.texts[(place + 1) % len(plain.texts)][0]
        covers = {"srg": torch.full_like(ids[0], plain.blank), "srg random": further.repeat(9)[: ids.shape[1]]}
        for key, cover in covers.items():
            found.setdefault(key, []).append(srg(plain, ids, heat, number, cover))
        found.setdefault("sparseness", []).append(float(gini(heat[None])))
        against = explain(task, task.model, ids, other).double().cpu()
        found.setdefault("class random", []).append(float(correlation(heat[None], against[None])))
        for network in networks:
            wrong = explain(task, network, ids, number).double().cpu()
            found.setdefault("weights random", []).append(float(correlation(heat[None], wrong[None])))
    return {key: sum(values) / len(values) for key, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--sentiment", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="+", default=("minilm", "smollm2"))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=20, help="of a text for the language model")
    parser.add_argument("--reference", type=int, default=400, help="sentences to fit the classifier on")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.table:
        return table(args.out)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    done = {(row["model"], row["method"]) for row in lines_of(args.out) if "error" not in row}
    for name in args.models:
        left = [method for method in args.methods if (name, method) not in done]
        left = [method for method in left if (method == "lxt") <= (name == "smollm2")]
        plain = (minilm if name == "minilm" else smollm2)(args) if left else None
        for method in sorted(left, key=lambda method: method == "lxt"):  # its patch stays

            def measure(method: str = method, plain: Any = plain) -> dict[str, float]:
                task = smollm2(args, patched=True) if method == "lxt" else plain
                return judge(task, METHODS[method], plain)

            keep(args.out, {"model": name, "method": method}, measure)
    table(args.out)


if __name__ == "__main__":
    main()
