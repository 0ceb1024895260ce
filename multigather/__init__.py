"""Gather rows of many buffers with one index, in one kernel launch.

``multigather.gather(indices, *bufs)`` is ``tuple(buf[indices] for buf in bufs)``, bit for bit.
"""

from .api import explain, gather, load_tuning
from .dispatch import BackendStatus, Explanation, backends
from .errors import NotTunedError, UnsupportedError
from .faults import check
from .packed import alloc, pack
from .plan import Plan, plan

__version__ = "0.1.0"

__all__ = [
    "BackendStatus",
    "Explanation",
    "NotTunedError",
    "Plan",
    "UnsupportedError",
    "__version__",
    "alloc",
    "backends",
    "check",
    "explain",
    "gather",
    "load_tuning",
    "pack",
    "plan",
]
