"""Which backend runs a gather, with which config, and why not the others."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .backends._cupy import CudaBackend
from .backends._native import NativeBackend
from .backends._torch import TorchBackend
from .backends._triton import TritonBackend
from .backends.base import Backend, Config, Refusal
from .cache import rules, store
from .cache.key import Key, key_of
from .errors import NotTunedError, UnsupportedError
from .request import Request, Site, dtype_name

if TYPE_CHECKING:
    from .cache.model import Measured

log = logging.getLogger("multigather")

BACKENDS: tuple[Backend, ...] = (
    CudaBackend(),
    TritonBackend(),
    NativeBackend(),
    TorchBackend(),
)


def backend_named(name: str) -> Backend:
    """The backend of a name.

    Raises:
        KeyError: there is none.
    """
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    raise KeyError(name)


def cuda_backend(name: str | None, device: torch.device) -> CudaBackend | None:
    """The backend that runs CUDA C on a device, what is no gather too; None if there is none.

    Args:
        name: the backend that the caller insists on, or None.
        device: where it is to run.
    """
    if name in (None, "cupy"):
        for backend in BACKENDS:
            if isinstance(backend, CudaBackend) and backend.compiles_for(device):
                return backend
    return None


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


@dataclass(frozen=True)
class Selection:
    """What was chosen for a request.

    Attributes:
        picks: together they have every field once.
        refused: for each backend that did not take everything, the reasons.
        tuned: whether a measurement decided, rather than the heuristic.
        settled: whether the choice may be kept. It may not where the files could not be read
            because a CUDA graph is being captured.
    """

    picks: list[Pick]
    refused: dict[str, list[str]]
    tuned: bool
    settled: bool


def backends() -> tuple[BackendStatus, ...]:
    """Every backend, in the order of preference on a GPU, with the reasons if it is unavailable."""
    result = []
    for backend in BACKENDS:
        reasons = tuple(backend.unavailable())
        result.append(BackendStatus(backend.name, not reasons, reasons, backend.version()))
    return tuple(result)


def select(
    request: Request,
    name: str | None,
    site: Site,
    *,
    reading: bool = True,
    strictly: bool = True,
) -> Selection:
    """Choose for each field.

    A named backend takes all fields or none. Otherwise the first choice whose backend accepts the
    request takes it; buffers that this backend must leave go to the next one. What was measured
    comes before the heuristic's rules.

    Args:
        request: the gather.
        name: the backend that the caller insists on.
        site: names of the buffers.
        reading: whether tuning files may be read; otherwise only what was read before is used.
        strictly: whether mode "strict" applies.

    Raises:
        UnsupportedError: the named backend, or every backend, refuses.
        NotTunedError: in mode "strict", nothing was measured that serves this gather.
    """
    left = tuple(range(len(request.fields)))
    picks: list[Pick] = []
    refused: dict[str, list[str]] = {}
    found, settled = measured_for(request, reading)
    tunable = request.fields and not request.host_memory and name != "torch"
    if found is None and settled and tunable and strictly and store.mode() == "strict":
        _require_tuning(request, site)
    choices: dict[str, tuple[Config, str]] = {}
    if found is not None:
        for backend_name, knobs in found.choices:
            backend = backend_named(backend_name)
            config = backend.config_from(knobs)
            if backend.illegal(request, config) is None:
                choices[backend_name] = config, found.origin
    for backend_name, choice in heuristic(request).items():
        choices.setdefault(backend_name, choice)
    for backend_name in [name] if name else choices:
        backend = backend_named(backend_name)
        refusals = backend.why_not(request)
        blocked = {refusal.field for refusal in refusals}
        if refusals:
            refused[backend.name] = _texts(refusals, site)
        taken = tuple(field for field in left if field not in blocked)
        if None in blocked or not taken or (name and blocked):
            continue
        if backend.name in choices:
            config, origin = choices[backend.name]
        else:
            config, origin = backend.space()[0], "no rule; the backend's first config"
        picks.append(Pick(backend, config, origin, taken))
        left = tuple(field for field in left if field in blocked)
        if not left:
            break
    if left or not picks:
        raise UnsupportedError(_refusal_text(request, name, site, refused))
    return Selection(picks, refused, found is not None, settled)


def heuristic(request: Request) -> dict[str, tuple[Config, str]]:
    """What the rules choose: config and origin by backend, the preferred backend first."""
    choices: dict[str, tuple[Config, str]] = {}
    for rule in rules.default_rules():
        if rule.matches(request) and rule.backend not in choices:
            config = backend_named(rule.backend).config_from(rule.knobs)
            choices[rule.backend] = config, rule.origin
    return choices


def measured_for(request: Request, reading: bool = True) -> tuple[store.Found | None, bool]:
    """What was measured for a request, and whether that answer may be kept."""
    if request.host_memory or not request.fields or store.mode() == "off":
        return None, True
    if not reading and not store.loaded(request.device):
        return None, False
    key = key_of(request)
    found = store.winners(request.device).find(key, _unusable())
    if found is None and request.device.type == "cuda":
        log.info("nothing was measured for %s; run: %s", key.label, tune_command(key))
    return found, True


def refusal_of(backend_name: str, measured: Measured) -> str | None:
    """Why a backend cannot use what a file says of it; None if it can."""
    try:
        backend = backend_named(backend_name)
    except KeyError:
        return "there is no such backend"
    if measured.revision != backend.revision:
        return f"measured for kernel revision {measured.revision}, this is {backend.revision}"
    try:
        backend.config_from(measured.config)
    except ValueError as error:
        return str(error)
    return None


def _unusable() -> store.Refuse:
    """A function that says why this machine cannot use what a file says of a backend.

    It asks each backend once only whether it is available, because that looks for packages.
    """

    @functools.cache
    def unavailable(name: str) -> str | None:
        return "; ".join(backend_named(name).unavailable()) or None

    def refuse(name: str, measured: Measured) -> str | None:
        return refusal_of(name, measured) or unavailable(name)

    return refuse


def tune_command(key: Key) -> str:
    """The command that measures what a key stands for."""
    row, buffers = 1 << key.row, 1 << key.buffers
    return f"multigather tune --rows {1 << key.count} --row-bytes {row} --buffers {buffers}"


def _require_tuning(request: Request, site: Site) -> None:
    key = key_of(request)
    trace = store.winners(request.device).trace(key, _unusable())
    raise NotTunedError(
        "\n".join(
            (
                f"MULTIGATHER_TUNING=strict, and nothing was measured for {key.label}:",
                describe(request, site),
                "  searched",
                *(f"    {line}" for line in trace),
                f"  run: {tune_command(key)}",
            )
        )
    )


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
    index = dtype_name(request.index_dtype)
    memory = "pinned host memory" if request.host_memory else str(request.device)
    lines = [f"    indices  {index} [{request.count}]  {request.device}  bounds={request.bounds!r}"]
    for number, field in enumerate(request.fields):
        shape = [field.rows, *field.row_shape]
        layout = "" if field.contiguous_rows else "  rows not contiguous"
        stride = field.row_stride_bytes
        if field.contiguous_rows and field.rows > 1 and stride != field.row_bytes:
            layout = f"  a row every {stride} bytes"
        lines.append(
            f"    {site.label(number)}  {dtype_name(field.dtype)} {shape}  {memory}"
            f"  {field.row_bytes} bytes a row{layout}"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; ``str()`` of it is meant to be read.

    Attributes:
        request: text of the request.
        picks: per pick, backend, knobs, origin, the labels of its buffers, and of those that are
            read together as the columns of a slab.
        refused: per backend that did not take everything, why.
        searched: what the search for measured winners looked at, a line each.
    """

    request: str
    picks: tuple[dict[str, Any], ...]
    refused: dict[str, tuple[str, ...]]
    searched: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = ["gather of", self.request]
        for pick in self.picks:
            lines.append(f"  runs on {pick['backend']} ({pick['config']})")
            lines.append(f"    buffers: {', '.join(pick['buffers'])}")
            for together in pick["packed"]:
                lines.append(f"    read row by row, as columns of a slab: {', '.join(together)}")
            lines.append(f"    chosen by: {pick['origin']}")
        for backend, reasons in self.refused.items():
            lines += [f"  not {backend}: {reason}" for reason in reasons]
        lines += [f"  searched {line}" for line in self.searched]
        return "\n".join(lines)


def explain(request: Request, name: str | None, site: Site) -> Explanation:
    """The choice for a request and the reasons against every other backend."""
    selection = select(request, name, site)
    picks, refused = selection.picks, selection.refused
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
                "packed": _packed(request, pick, site),
            }
            for pick in picks
        ),
        refused={name: tuple(reasons) for name, reasons in refused.items()},
        searched=_searched(request),
    )


def _packed(request: Request, pick: Pick, site: Site) -> tuple[tuple[str, ...], ...]:
    part = request.subset(pick.fields)
    if not pick.backend.packs(part, pick.config):
        return ()
    return tuple(
        tuple(site.label(pick.fields[number]) for number in group) for group in part.packed
    )


def _searched(request: Request) -> tuple[str, ...]:
    if request.host_memory:
        return ("nothing: buffers in host memory are not tuned for",)
    if store.mode() == "off":
        return ("nothing: MULTIGATHER_TUNING=off",)
    key = key_of(request)
    trace = store.winners(request.device).trace(key, _unusable())
    return (f"for {key.label}", *trace)
