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

from secateur import atomic
from secateur.errors import CheckpointError, FileFormatError, SecateurError
from secateur.running.processes import is_first, same_everywhere, wait
from secateur.running.tensor_files import decode, encode, parse_json, read_sealed, sealed

FORMAT = "secateur-recover-1"
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
            kept = {name: tensor.detach().contiguous().cpu().clone() for name, tensor in tensors.items()}
            try:
                atomic.write(self.path, sealed(kept, json.dumps(header)))
            except OSError as error:
                raise CheckpointError(
                    f"the checkpoint {self.path} could not be written ({error}); the one before it, if any, is intact.",
                    where=self.path,
                    fix="make room and start the same run again: it goes on from there",
                ) from error
        wait()

    def restore(self) -> Any:
        """The state in the file; None if there is none. The file of another run is refused."""
        if not same_everywhere(self.path.exists()):
            return None
        try:
            tensors, text, _ = read_sealed(self.path)
            header = parse_json(text.encode() or b"null")
            if not isinstance(header, dict) or header.get("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT!r}")
            found, wanted = header["settings"], json.loads(json.dumps(self.identity))
            state = decode(header["state"], tensors)
        except (SecateurError, MemoryError):
            raise
        except Exception as error:
            what = f"{self.path} is not a checkpoint of a training run, or is damaged: {error}"
            raise FileFormatError(what, where=self.path) from error
        other = [key for key in wanted if found.get(key) != wanted[key]]
        if other and self.stale:
            return None
        if other:
            texts = [
                f"other {key}" if key in _DIGESTS else f"{key} was {found.get(key)!r}, is now {wanted[key]!r}"
                for key in other[:3]
            ]
            fix = "another checkpoint path, or remove the file"
            raise FileFormatError(
                f"{self.path} belongs to another run: {'; '.join(texts)}.", where=self.path, fix=fix
            )  # fmt: skip
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
