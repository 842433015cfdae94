"""How many of torch's own functions the table of operations knows.

    python -m benchmarks.operations            # the counts
    python -m benchmarks.operations --names    # with the names that have no entry

The list is torch's: `torch.overrides.get_testing_overrides`, what its own tests hold to be overridable. Left out are
names that begin with an underscore, and functions that no forward of a network calls: sparse and quantised formats,
packing, communication, symbolic numbers, lists of tensors for optimizers. Functions of one name (`torch.add`,
`Tensor.add`, `Tensor.add_`) count once.

Units are followed through a function, or those that reach it stay, with the reason. Nothing is refused, unless you ask
for `strict=True`. For relevance there is a rule (or a reason why it ends there), or it is refused if it comes back.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import get_testing_overrides

from secateur.ops.places import Selected
from secateur.ops.shape import Fixed
from secateur.ops.table import Decomposed, Opaque, Operation, Query, Ruled, function_name, lookup, refused

_ELSEWHERE = re.compile(
    r"(^|\.)_|foreach|sym_|distributed|sparse|quantiz|fake_quant|fbgemm|miopen|cudnn|_copy$|c?col_indices|c?row_indices|"
    r"q_(scale|zero|per)|qscheme|int_repr|coalesce|smm$|hspmm|sspaddmm|to_mkldnn|batch_norm_(back|elem|gath|stats|upd)|"
    r"all_(gather|reduce|to_all)|reduce_scatter|(^|\.)(i?send|i?recv|broadcast|reduce|indices|values)$|native_|nn\.init|"
    r"__(array|cuda|deepcopy|dlpack|reduce|setstate)|_hook|module_load|record_stream|storage|share_memory|choose_qparams|"
    r"hash_tensor|grad_dtype|(^|\.)(ipu|mtia|volatile|is_ipu|is_maia|is_mtia|set_|resize\w*|map2?_|apply_|dense_dim)"
)  # fmt: skip


def functions() -> dict[str, list[Callable[..., Any]]]:
    """The functions of torch that networks may call, by name."""
    found: dict[str, list[Callable[..., Any]]] = defaultdict(list)
    for function in get_testing_overrides():
        name = function_name(function).removesuffix(".__get__")
        if not _ELSEWHERE.search(name) or re.fullmatch(r"torch\.Tensor\.__[a-z]+__", name):
            last = name.rpartition(".")[2]
            found[last if last.endswith("__") else last.rstrip("_")].append(function)
    return {name: many for name, many in found.items() if not _ELSEWHERE.search(name) or name.endswith("__")}


def structure(operation: Operation | None) -> str:
    """What becomes of units that reach a function."""
    return "stay" if operation is None or type(operation) in (Fixed, Selected, Opaque) else "followed"


def relevance(operation: Operation | None) -> str:
    """What becomes of relevance that comes back to it."""
    if operation is None:
        return "refused"
    if isinstance(operation, Query | Decomposed):
        return "rule"
    silent = type(operation).relevance is Operation.relevance
    return "refused" if silent or (isinstance(operation, Ruled) and operation.rule is refused) else "rule"


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", action="store_true", help="print the names, too")
    names = parser.parse_args().names
    known = {name: [lookup(function) for function in many] for name, many in functions().items()}
    best = {name: next((entry for entry in entries if entry is not None), None) for name, entries in known.items()}
    count = sum(entry is not None for entry in best.values())
    print(f"torch {torch.__version__}: {count} of {len(best)} functions have an entry")
    print("| | followed | stay, with the reason | refused |\n|---|---:|---:|---:|")
    ways = [structure(entry) for entry in best.values()]
    print(f"| units | {ways.count('followed')} | {ways.count('stay')} | 0 |")
    ways = [relevance(entry) for entry in best.values()]
    print(f"| relevance (a rule, or refused) | {ways.count('rule')} | | {ways.count('refused')} |")
    if names:
        print("\nwithout an entry:", " ".join(sorted(name for name, entry in best.items() if entry is None)))
        print("\nunits stay:", " ".join(sorted(n for n, e in best.items() if e is not None and structure(e) == "stay")))
        print("\nno rule:", " ".join(sorted(n for n, e in best.items() if e is not None and relevance(e) == "refused")))


if __name__ == "__main__":
    main()
