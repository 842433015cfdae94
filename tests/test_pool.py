"""Jobs in processes: what one leaves behind when it is told to end."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from reproduction.pool import Pool


def _wait(folder: Path) -> None:
    """Say that it has begun; if it is ended, say so on the way out, as a program on a GPU must."""
    (folder / str(os.getpid())).touch()
    try:
        time.sleep(60)
    finally:
        (folder / "left").touch()


def _fail(folder: Path) -> None:
    while not any(path.name.isdigit() for path in folder.iterdir()):
        time.sleep(0.05)
    raise ValueError("no memory")


def test_when_one_job_fails_the_others_leave_in_good_order(tmp_path: Path) -> None:
    begin = time.time()
    with pytest.raises(ValueError, match="no memory"), Pool(2) as pool:
        pool.results([(_wait, (tmp_path,)), (_fail, (tmp_path,))], lambda result: None)
    assert (tmp_path / "left").exists()
    assert time.time() - begin < 40


def test_a_process_that_is_told_to_end_ends_its_job_only(tmp_path: Path) -> None:
    with Pool(2) as pool:
        pool.submit("long", (_wait, (tmp_path,)))
        while not (found := [path for path in tmp_path.iterdir() if path.name.isdigit()]):
            time.sleep(0.05)
        os.kill(int(found[0].name), signal.SIGTERM)
        with pytest.raises(SystemExit):
            list(pool.finished())
    assert (tmp_path / "left").exists()
