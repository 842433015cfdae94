"""Jobs on several processes, each with a fixed number of threads."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any

import torch

# A function and its arguments. Both are sent to another process.
Job = tuple[Callable[..., Any], tuple[Any, ...]]


class Pool:
    """With one worker, jobs run in this process. An error or an interruption ends the others.

    The toy experiment uses one thread per process, so that its results do not depend on the number of cores.
    """

    def __init__(self, workers: int, threads: int = 1) -> None:
        self._executor: ProcessPoolExecutor | None = None
        if workers > 1:
            # A forked child would inherit the state of torch's threads and of CUDA, and hang.
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(workers, context, _begin, (threads,))
        self._waiting: dict[Future[Any], Any] = {}
        self._queue: list[tuple[Any, Job]] = []
        self._threads, self._before = threads, torch.get_num_threads()

    def __enter__(self) -> Pool:
        if self._executor is None:
            torch.set_num_threads(self._threads)
        return self

    def submit(self, tag: Any, job: Job) -> None:
        """Queue a job; `tag` comes back with its result."""
        if self._executor is None:
            self._queue.append((tag, job))
        else:
            self._waiting[self._executor.submit(job[0], *job[1])] = tag

    def finished(self) -> Iterator[tuple[Any, Any]]:
        """Jobs as they finish; more may be submitted meanwhile."""
        while self._queue:
            tag, (work, arguments) = self._queue.pop(0)
            yield tag, work(*arguments)
        while self._waiting:
            ready, _ = wait(self._waiting, return_when=FIRST_COMPLETED)
            for future in ready:
                yield self._waiting.pop(future), future.result()

    def results(self, jobs: Sequence[Job], arrived: Callable[[Any], None]) -> list[Any]:
        """The results of some jobs, in their order. `arrived` is called with each result as it comes."""
        for place, job in enumerate(jobs):
            self.submit(place, job)
        found = {}
        for place, result in self.finished():
            found[place] = result
            arrived(result)
        return [found[place] for place in range(len(jobs))]

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self._executor is None:
            torch.set_num_threads(self._before)
            return
        if kind is not None:
            for process in list((self._executor._processes or {}).values()):
                process.terminate()
        self._executor.shutdown(wait=True, cancel_futures=True)


def _begin(threads: int) -> None:
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children, so they print no traceback
    # Where processes share a GPU, one that is killed while it computes takes the others with it.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
