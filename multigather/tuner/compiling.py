"""Compile the candidates' kernels ahead, on all cores.

A default tune needs about a thousand kernels, a second of one core each for Triton's. Worker
processes compile them into the caches on disk that Triton and CuPy keep anyway; the process that
measures then only loads them. Timing in a process whose other threads compile would be wrong, so
compiling ends before measuring begins.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable, Hashable, Iterable

import torch

from .. import dispatch
from ..backends.base import KernelRunner
from ..request import Request
from .measure import Candidate, candidates_for, site_of

# Device memory of one worker's CUDA context and its modules.
WORKER_BYTES = 1 << 30
MOST_WORKERS = 32


def variants(
    requests: Iterable[Request], names: tuple[str, ...]
) -> list[tuple[Request, Candidate]]:
    """One gather and candidate for each kernel that measuring these gathers needs."""
    found: dict[Hashable, tuple[Request, Candidate]] = {}
    for request in requests:
        for candidate in candidates_for(request, names)[0]:
            variant = candidate.backend.variant(request, candidate.config)
            if variant is not None:
                found.setdefault((candidate.backend.name, variant), (request, candidate))
    return list(found.values())


def compile_ahead(
    jobs: list[tuple[Request, Candidate]], progress: Callable[[int], None], workers: int = 0
) -> int:
    """Compile; return how many kernels could not be, which measuring then reports.

    Args:
        jobs: from `variants`.
        progress: called with the number of kernels done.
        workers: number of processes; 0 for one per core that memory allows.
    """
    if not jobs:
        return 0
    free, _ = torch.cuda.mem_get_info(jobs[0][0].device)
    most = min(os.cpu_count() or 1, MOST_WORKERS, free // 2 // WORKER_BYTES, len(jobs) // 4)
    workers = workers or max(1, most)
    failed = 0
    # Not forked: a CUDA context does not survive that.
    executor = concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_one_thread
    )
    try:
        tasks = [(request, candidate.backend.name, candidate.config) for request, candidate in jobs]
        # In small portions, the kernels of one gather together.
        for done, ok in enumerate(executor.map(_compile, tasks, chunksize=4), 1):
            failed += not ok
            progress(done)
    except concurrent.futures.process.BrokenProcessPool:
        # The process that measures compiles what is missing, one by one.
        failed = len(jobs)
    finally:
        executor.shutdown(cancel_futures=True)
    return failed


def _one_thread() -> None:
    torch.set_num_threads(1)


def _compile(task: tuple[Request, str, object]) -> bool:
    request, name, config = task
    backend = next(each for each in dispatch.BACKENDS if each.name == name)
    try:
        runner = backend.prepare(request, config, site_of(request))  # type: ignore[arg-type]
        if isinstance(runner, KernelRunner):
            runner.compile(request.count)
    except Exception:  # whatever it is, measuring meets it again and says so
        return False
    return True
