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
from collections.abc import Hashable, Iterable, Sequence

import torch

from .. import dispatch
from ..backends.base import Config, KernelRunner
from ..request import Request
from .console import Reporter
from .measure import Candidate, candidates_for, site_of

# Device memory of one worker's CUDA context and its modules.
WORKER_BYTES = 1 << 30
MOST_WORKERS = 32


def variants(
    requests: Iterable[Request], names: tuple[str, ...]
) -> list[tuple[Request, Candidate]]:
    """One gather and candidate for each kernel of a GPU that measuring these gathers needs."""
    found: dict[Hashable, tuple[Request, Candidate]] = {}
    for request in requests:
        if request.device.type != "cuda":
            continue
        for candidate in candidates_for(request, names)[0]:
            variant = candidate.backend.variant(request, candidate.config)
            if variant is not None:
                found.setdefault((candidate.backend.name, variant), (request, candidate))
    return list(found.values())


def compile_ahead(requests: Sequence[Request], names: tuple[str, ...], reporter: Reporter) -> None:
    """Compile what measuring these gathers needs; what cannot be compiled, measuring reports.

    Args:
        requests: the gathers, all on one device.
        names: backends asked for; none means every backend that can run.
        reporter: told of progress.
    """
    jobs = variants(requests, names)
    if not jobs:
        return
    phase = reporter.phase("compiling kernels", len(jobs))
    free, _ = torch.cuda.mem_get_info(jobs[0][0].device)
    most = min(os.cpu_count() or 1, MOST_WORKERS, free // 2 // WORKER_BYTES, len(jobs) // 4)
    # Not forked: a CUDA context does not survive that.
    executor = concurrent.futures.ProcessPoolExecutor(
        max(1, most), multiprocessing.get_context("spawn"), initializer=_one_thread
    )
    try:
        tasks = [(request, candidate.backend.name, candidate.config) for request, candidate in jobs]
        # In small portions, the kernels of one gather together.
        for done, _ in enumerate(executor.map(_compile, tasks, chunksize=4), 1):
            phase.done(done)
    except concurrent.futures.process.BrokenProcessPool:
        pass  # the process that measures compiles what is missing, one by one
    finally:
        executor.shutdown(cancel_futures=True)


def _one_thread() -> None:
    torch.set_num_threads(1)


def _compile(task: tuple[Request, str, Config]) -> None:
    request, name, config = task
    try:
        runner = dispatch.backend_named(name).prepare(request, config, site_of(request))
        if isinstance(runner, KernelRunner):
            runner.compile(request.count)
    except Exception:  # whatever it is, measuring meets it again and says so
        pass
