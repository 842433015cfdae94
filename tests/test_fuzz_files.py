"""Damaged and hostile files: an error of ours, or the same result. `benchmarks/fuzz_files.py` has the long version."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch

import secateur as sc
from benchmarks import fuzz_files as fuzz
from secateur.errors import FileFormatError
from secateur.models.weights import read_weights
from secateur.running.tensor_files import read_sealed, sealed


@pytest.mark.parametrize("kind", fuzz.KINDS, ids=lambda kind: kind.folder)
def test_damaged_files(kind: fuzz.Kind, tmp_path: Path) -> None:
    """Every case is one of the benchmark's, without its limits on time and memory."""
    warnings.simplefilter("ignore")
    kind.make(tmp_path)
    files = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    wanted = kind.read(tmp_path)
    for number in range(25):
        for file, raw in files.items():
            file.write_bytes(raw)
        draw = random.Random(number)
        if kind.harm is not None:
            kind.harm(tmp_path, draw)
        else:
            target = tmp_path / draw.choice(kind.files)
            target.write_bytes(fuzz.damaged(files[target], draw))
        try:
            found = kind.read(tmp_path)
        except sc.SecateurError:
            continue
        assert fuzz._same(found, wanted) or not kind.guarded, number


def file_of(header: object, data: bytes = bytes(8), size: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if size is None else size).to_bytes(8, "little") + raw + data


def tensor(begin: int, end: int, shape: tuple[int, ...] = (1,), dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


_TWICE = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'
ATTACKS = {
    "header beyond the file": file_of({"a": tensor(0, 8, (2,))}, size=10_000),
    "header of 2^63 bytes": file_of({"a": tensor(0, 8, (2,))}, size=2**63),
    "header of 2^64 - 1 bytes": file_of({"a": tensor(0, 8, (2,))}, size=2**64 - 1),
    "header too short": file_of({"a": tensor(0, 8, (2,))}, size=5),
    "no header": b"\x08\x00",
    "empty": b"",
    "overlapping tensors": file_of({"a": tensor(0, 8, (2,)), "b": tensor(4, 8)}),
    "a hole between tensors": file_of({"a": tensor(4, 8)}),
    "offsets beyond the data": file_of({"a": tensor(0, 4000, (1000,))}),
    "offsets in the wrong order": file_of({"a": tensor(8, 0, (2,))}),
    "negative offsets": file_of({"a": tensor(-8, 0, (2,))}),
    "shape and offsets differ": file_of({"a": tensor(0, 8, (1000,))}),
    "a shape that overflows": file_of({"a": tensor(0, 8, (2**62, 8))}),
    "a negative shape": file_of({"a": tensor(0, 8, (-2,))}),
    "an unknown type": file_of({"a": tensor(0, 8, (2,), "PICKLE")}),
    "a name twice": file_of(_TWICE),
    "data at the end": file_of({"a": tensor(0, 8, (2,))}, bytes(9)),
    "metadata that are no texts": file_of({"__metadata__": {"a": [1]}, "a": tensor(0, 8, (2,))}),
    "not JSON": file_of(b"{]"),
    "not UTF-8": file_of(b"\xff\xfe{}"),
    "JSON of another kind": file_of([1, 2]),
    "nested deeply": file_of(b'{"a":' * 100_000),
    "very many tensors": file_of({str(i): tensor(0, 0, (0,)) for i in range(100_001)}),
    "a pickle": b"\x80\x04\x95" + bytes(40),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_hostile_safetensors(attack: str, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(ATTACKS[attack])
    with pytest.raises(FileFormatError, match="is damaged or not a safetensors file") as found:
        read_weights(path)
    assert found.value.where == str(path)


def test_a_header_that_would_fill_the_memory_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    with path.open("wb") as file:
        file.write((2**27).to_bytes(8, "little"))
        file.truncate(2**27 + 8)  # a sparse file
    with pytest.raises(FileFormatError, match="header of 134217728 bytes is too large"):
        read_weights(path)


def test_the_seal_covers_names_types_shapes_bytes_and_text(tmp_path: Path) -> None:
    path, tensors = tmp_path / "s.safetensors", {"b": torch.arange(6.0), "a": torch.zeros(2, 3, dtype=torch.int32)}
    raw = sealed(tensors, "{}")
    assert raw == sealed(dict(reversed(tensors.items())), "{}")
    path.write_bytes(raw)
    found, text, metadata = read_sealed(path)
    assert text == "{}"
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    for other in (
        {"b": tensors["b"], "c": tensors["a"]}, {"b": tensors["b"], "a": tensors["a"].float()},
        {"b": tensors["b"].reshape(2, 3), "a": tensors["a"]}, {"b": tensors["b"] + 1, "a": tensors["a"]},
        {"b": tensors["b"]}, {**tensors, "c": torch.zeros(0)},
    ):  # fmt: skip
        safetensors.torch.save_file(other, path, metadata)
        with pytest.raises(FileFormatError, match="not what was written"):
            read_sealed(path)
    safetensors.torch.save_file(tensors, path, {"secateur": metadata["secateur"] + " "})
    with pytest.raises(FileFormatError, match="not what was written"):
        read_sealed(path)


@pytest.mark.parametrize("step", [-(2**31), -1, 10**30, True, 0.5, "1", None])
def test_a_step_that_no_run_reaches_is_refused(step: object, tmp_path: Path) -> None:
    fuzz._make_checkpoint(tmp_path)
    path = tmp_path / "run.safetensors"
    tensors, text, _ = read_sealed(path)
    path.write_bytes(sealed(tensors, json.dumps({**json.loads(text), "step": step})))
    with pytest.raises(FileFormatError, match="is no number of steps"):
        fuzz.prune(path)


@pytest.mark.parametrize("number", [6695, 6995, 7523, 7961, 8255, 14393, 14495, 15671, 16691, 19019, 2_001_439])
def test_hostile_checkpoints_that_once_raised_errors_of_others(number: int, tmp_path: Path) -> None:
    fuzz._make_checkpoint(tmp_path)
    fuzz._reseal_checkpoint(tmp_path, random.Random(number))
    with pytest.raises(FileFormatError):
        fuzz._read_checkpoint(tmp_path)
