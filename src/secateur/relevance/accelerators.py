"""Speed-ups of a relevance pass, each of which can be switched off.

None of them is part of the definition of relevance. Each has a file of its own, whose name begins with an underscore.
Some of them expect a batch to make the same calls as the batch before. Where it does not, the batch is run again.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerators:
    """Which speed-ups a relevance pass may use. Without them the numbers are the same up to rounding.

    `fusion` computes a convolution, its batch norm and its ReLU as one layer. (That a batch norm is folded into the
    layer before it is part of the definition of the rules, so this is always done on the way back.)
    `script` remembers the calls of the forward pass. `cuda_graphs` replays batches of the same shape on a GPU.
    `kernels` compiles formulas that work entry by entry into one GPU kernel each.
    """

    fusion: bool = True
    script: bool = True
    cuda_graphs: bool = True
    kernels: bool = True


class Attends(Exception):
    """The model has attention, so that another composite is the better choice."""


class Deviation(Exception):
    """The forward pass does not make the calls that it made before."""


class Attempt:
    """One try at a batch. `expected`: it should make the same calls as the batch before.

    `undecided`: attention decides which composite is used, unless the model is `convolutional`.
    """

    def __init__(self, expected: bool, undecided: bool = False, convolutional: bool = False) -> None:
        self.expected, self.undecided, self.convolutional = expected, undecided, convolutional
        self.failed = self.attends = False

    def deviates(self) -> None:
        """It makes other calls: give up this try. The flag is for models that catch every exception."""
        if self.expected:
            self.failed = True
            raise Deviation

    def meets_attention(self, anyway: bool = False) -> None:
        """The model attends: give up this try if that decides. `anyway`: whatever else there is in the model."""
        if self.undecided and (anyway or not self.convolutional):
            self.attends = True
            raise Attends
