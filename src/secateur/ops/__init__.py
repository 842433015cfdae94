"""The table of operations, one file per family. `register` adds an entry for a function of your own."""

from secateur.ops import activation, attention, conv, elementwise, linear, norm, pool, recurrent, reduce, shape
from secateur.ops.table import Call, Decomposed, Operation, Query, Site, lookup, register

__all__ = [
    "Call",
    "Decomposed",
    "Operation",
    "Query",
    "Site",
    "activation",
    "attention",
    "conv",
    "elementwise",
    "linear",
    "lookup",
    "norm",
    "pool",
    "recurrent",
    "reduce",
    "register",
    "shape",
]
