"""The table of operations, one file per family. `register` adds an entry for a function of your own."""

from secateur.ops import (
    activation,
    attention,
    conv,
    elementwise,
    joined,
    linear,
    norm,
    places,
    pool,
    recurrent,
    reduce,
    shape,
    spectral,
    vision,
)
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
    "joined",
    "linear",
    "lookup",
    "norm",
    "places",
    "pool",
    "recurrent",
    "reduce",
    "register",
    "shape",
    "spectral",
    "vision",
]
