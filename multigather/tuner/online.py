"""``MULTIGATHER_TUNING=online``: measure a gather that nothing was measured for, in its first call.

Bounded: only the likeliest candidates, and none begun after `SECONDS`. It allocates buffers like
the caller's and synchronises the device, so it is only for programs that ask for it, and it never
runs while a CUDA graph is being captured.
"""

from __future__ import annotations

import logging
import threading
import time

import torch

from .. import dispatch
from ..cache import store
from ..cache.device import device_of
from ..cache.key import key_of
from ..fork import in_child
from ..request import Request
from .decide import NothingMeasured, entry_of, environment_facts, publish
from .measure import Bench, OutOfMemory, candidates_for, defaults_of

log = logging.getLogger("multigather")

SECONDS = 3.0
ROUNDS = 3

# A lock, because what waits is the point; of C, so that it is taken and owned in one step.
_tuning = threading.RLock()


@in_child
def _renew() -> None:
    global _tuning
    _tuning = threading.RLock()


def tune_if_missing(request: Request, name: str | None) -> None:
    """Measure and publish, unless an entry serves the gather; failures leave the heuristic."""
    kind = device_of(request.device)
    plain = all(field.contiguous_rows for field in request.fields)
    if kind is None or request.host_memory or not request.fields or not plain:
        return
    if not request.row_bytes or any(not field.rows for field in request.fields):
        return
    key = key_of(request)
    with _tuning:  # one at a time: two that measure at once measure each other
        if dispatch.measured_for(request)[0] is not None:
            return
        facts = environment_facts()
        try:
            bench = Bench(request)
            candidates, _ = candidates_for(request, (name,) if name else ())
            defaults = defaults_of(request)
            # The heuristic's own first, whose order of backends is the likeliest, then the rest.
            candidates.sort(key=lambda each: (each.backend.name, each.config) not in defaults)
            measurement = bench.measure(
                candidates, rounds=ROUNDS, deadline=time.monotonic() + SECONDS
            )
            entry = entry_of(key, [measurement], {}, facts)
        except (OutOfMemory, torch.OutOfMemoryError, NothingMeasured) as error:
            log.info("online tuning of %s was not possible: %s", key.label, error)
            return
        finally:
            if request.device.type == "cuda":
                torch.cuda.synchronize(request.device)
        folder = store.user_folder()
        try:
            if folder is None:
                raise store.WriteError("the user has no cache folder; set MULTIGATHER_CACHE_DIR")
            publish(store.file_for(folder, kind), kind, facts, entry)
        except store.WriteError as error:
            log.info("online tuning of %s is kept for this process only: %s", key.label, error)
        store.remember(request.device, entry)
