"""Which backend runs a gather, with which config, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from . import cache
from .backends._cupy import CudaBackend
from .backends._torch import TorchBackend
from .backends._triton import TritonBackend
from .backends.base import Backend, Config, Refusal
from .errors import UnsupportedError
from .request import Request, Site

BACKENDS: tuple[Backend, ...] = (CudaBackend(), TritonBackend(), TorchBackend())


@dataclass(frozen=True)
class BackendStatus:
    """One backend on this machine.

    Attributes:
        name: the name that ``backend=`` takes.
        available: whether it can be used at all.
        reasons: why not; empty if it is available.
        version: version of the library behind it, None if that is not installed.
    """

    name: str
    available: bool
    reasons: tuple[str, ...]
    version: str | None

    def __str__(self) -> str:
        state = "available" if self.available else "; ".join(self.reasons)
        return f"{self.name} ({self.version or 'not installed'}): {state}"


@dataclass(frozen=True)
class Pick:
    """A backend and a config for some fields of a request.

    Attributes:
        backend: the backend.
        config: its config.
        origin: where the choice comes from.
        fields: the numbers of the fields it gathers.
    """

    backend: Backend
    config: Config
    origin: str
    fields: tuple[int, ...]


def backends() -> tuple[BackendStatus, ...]:
    """Every backend, in the order of preference on a GPU, with the reasons if it is unavailable."""
    result = []
    for backend in BACKENDS:
        reasons = tuple(backend.unavailable())
        result.append(BackendStatus(backend.name, not reasons, reasons, backend.version()))
    return tuple(result)


def select(
    request: Request, name: str | None, site: Site
) -> tuple[list[Pick], dict[str, list[str]]]:
    """Choose for each field.

    A named backend takes all fields or none. Otherwise the first rule that matches and whose
    backend accepts the request takes it; buffers that this backend must leave go to the next one.

    Returns:
        The picks, and for each backend that did not take everything the reasons.

    Raises:
        UnsupportedError: the named backend, or every backend, refuses.
    """
    left = tuple(range(len(request.fields)))
    picks: list[Pick] = []
    refused: dict[str, list[str]] = {}
    rules: dict[str, cache.Rule] = {}
    for rule in cache.default_rules():
        if name in (None, rule.backend) and rule.matches(request):
            rules.setdefault(rule.backend, rule)
    by_name = {backend.name: backend for backend in BACKENDS}
    for backend_name in [name] if name else rules:
        backend = by_name[backend_name]
        refusals = backend.why_not(request)
        blocked = {refusal.field for refusal in refusals}
        if refusals:
            refused[backend.name] = _texts(refusals, site)
        taken = tuple(field for field in left if field not in blocked)
        if None in blocked or not taken or (name and blocked):
            continue
        chosen = rules.get(backend.name)
        if chosen is not None:
            config, origin = backend.config_from(chosen.knobs), chosen.origin
        else:
            config, origin = backend.configs(request)[0], "no rule; the backend's first config"
        picks.append(Pick(backend, config, origin, taken))
        left = tuple(field for field in left if field in blocked)
        if not left:
            break
    if left or not picks:
        raise UnsupportedError(_refusal_text(request, name, site, refused))
    return picks, refused


def _texts(refusals: list[Refusal], site: Site) -> list[str]:
    return [
        refusal.text if refusal.field is None else f"{site.label(refusal.field)}: {refusal.text}"
        for refusal in refusals
    ]


def _refusal_text(
    request: Request, name: str | None, site: Site, refused: dict[str, list[str]]
) -> str:
    able = [
        backend.name
        for backend in BACKENDS
        if backend.name not in refused and not backend.why_not(request)
    ]
    subject = f"backend {name!r} cannot" if name else "no backend can"
    lines = [f"{subject} run this gather:", describe(request, site), "  because"]
    for backend, reasons in refused.items():
        lines += [f"    - {backend}: {reason}" for reason in reasons]
    lines.append(f"  backends that can: {', '.join(able) or 'none'}")
    return "\n".join(lines)


def describe(request: Request, site: Site) -> str:
    """The request, a line per tensor."""
    index = _name(request.index_dtype)
    memory = "pinned host memory" if request.host_memory else str(request.device)
    lines = [f"    indices  {index} [{request.count}]  {request.device}  bounds={request.bounds!r}"]
    for number, field in enumerate(request.fields):
        shape = [field.rows, *field.row_shape]
        layout = "" if field.contiguous_rows else "  rows not contiguous"
        stride = field.row_stride_bytes
        if field.contiguous_rows and field.rows > 1 and stride != field.row_bytes:
            layout = f"  a row every {stride} bytes"
        lines.append(
            f"    {site.label(number)}  {_name(field.dtype)} {shape}  {memory}"
            f"  {field.row_bytes} bytes a row{layout}"
        )
    return "\n".join(lines)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; ``str()`` of it is meant to be read.

    Attributes:
        request: text of the request.
        picks: per pick, backend, knobs, origin and the labels of its buffers.
        refused: per backend that did not take everything, why.
    """

    request: str
    picks: tuple[dict[str, Any], ...]
    refused: dict[str, tuple[str, ...]]

    def __str__(self) -> str:
        lines = ["gather of", self.request]
        for pick in self.picks:
            lines.append(f"  runs on {pick['backend']} ({pick['config']})")
            lines.append(f"    buffers: {', '.join(pick['buffers'])}")
            lines.append(f"    chosen by: {pick['origin']}")
        for backend, reasons in self.refused.items():
            lines += [f"  not {backend}: {reason}" for reason in reasons]
        return "\n".join(lines)


def explain(request: Request, name: str | None, site: Site) -> Explanation:
    """The choice for a request and the reasons against every other backend."""
    picks, refused = select(request, name, site)
    used = {pick.backend.name for pick in picks}
    for backend in BACKENDS:
        if backend.name in used or backend.name in refused:
            continue
        reasons = _texts(backend.why_not(request), site)
        if not reasons and name:
            reasons = [f"backend={name!r} was asked for"]
        refused[backend.name] = reasons or [
            f"it could run this, but {picks[0].origin} prefers {picks[0].backend.name} here"
        ]
    return Explanation(
        request=describe(request, site),
        picks=tuple(
            {
                "backend": pick.backend.name,
                "config": pick.config.describe(),
                "origin": pick.origin,
                "buffers": tuple(site.label(field) for field in pick.fields),
            }
            for pick in picks
        ),
        refused={name: tuple(reasons) for name, reasons in refused.items()},
    )
