"""The file of a training run: written after epochs, read when the same call is made again. Nothing is unpickled."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from secateur.errors import FileFormatError
from secateur.running.processes import is_first, same_everywhere, wait
from secateur.running.tensor_files import decode, encode, other_run, read_checkpoint, write_checkpoint

FORMAT = "secateur-recover-2"
_DIGESTS = ("weights", "teacher", "data", "test")  # too long to be shown


@dataclass(frozen=True)
class Checkpoint:
    """A file, and the identity of the run that it belongs to. `stale` files of another run are no error."""

    path: Path
    identity: Mapping[str, Any]
    stale: bool = False

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the file; a kill leaves the old or the new. Of several processes the first one writes."""
        if is_first():
            tensors: dict[str, torch.Tensor] = {}
            header = {"format": FORMAT, "settings": self.identity, "state": encode(state, tensors, "state")}
            write_checkpoint(self.path, tensors, header)
        wait()

    def restore(self) -> Any:
        """The state in the file; None if there is none. The file of another run is refused."""
        if not same_everywhere(self.path.exists()):
            return None
        if self.path.is_dir():
            raise FileFormatError(f"{self.path} is a folder.", where=self.path, fix="a file in it")
        header, tensors = read_checkpoint(self.path, FORMAT)
        try:
            found, wanted = dict(header["settings"]), json.loads(json.dumps(self.identity))
            state = decode(header["state"], tensors)
        except (KeyError, TypeError, ValueError) as error:
            raise FileFormatError(f"{self.path} is damaged: {error}", where=self.path) from error
        other = {key: (found.get(key), wanted[key]) for key in wanted if found.get(key) != wanted[key]}
        if other and self.stale:
            return None
        if other:
            raise other_run(self.path, other, _DIGESTS)
        wait()  # until all have read it
        return state

    def remove(self) -> None:
        """Delete the file: what comes after it is saved."""
        if is_first():
            self.path.unlink(missing_ok=True)
        wait()


def random_state(generators: Sequence[torch.Generator], device: torch.device | None) -> dict[str, Any]:
    """All generators that a training step may draw from, as numbers."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    found = {
        "torch": torch.get_rng_state(), "python": [version, torch.tensor(words), gauss],
        "numpy": [name, torch.tensor(np.asarray(keys, np.int64)), *rest],
        "loader": [generator.get_state() for generator in generators],
    }  # fmt: skip
    if device is not None and device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def set_random_state(
    state: Mapping[str, Any], generators: Sequence[torch.Generator], device: torch.device | None
) -> None:
    """Go on drawing where `random_state` was asked."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    for generator, saved in zip(generators, state["loader"], strict=True):
        generator.set_state(saved)
    if "cuda" in state and device is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
