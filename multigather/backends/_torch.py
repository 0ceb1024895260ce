"""torch backend: one torch operation per buffer, on every device and for every layout.

`index_select` rather than ``buf[indices]``: on a CPU it copies a row at a time, 3 to 20 times
faster, and it checks the indices itself, so the good path needs no check of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .. import faults
from ..bounds import as_int64, raise_if_bad, resolve
from ..launch import current_stream
from ..memory import as_bytes, is_aligned
from ..request import Request, Site
from .base import Config, Refusal, Runner, config_of, flat_row_stride

# As a function it costs a quarter less than as a method, about a microsecond per buffer.
index_select = torch.index_select

# Types that index_select copies unchanged on every device. The others (bool, whose odd bytes must
# survive, fp8, fp4 pairs, complex, unsigned) are copied as integers of the same size.
PLAIN = frozenset(
    (
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
)
SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


# See `SelectRunner.operations`.
Operation = tuple[Callable[..., torch.Tensor], "torch.dtype | None", torch.dtype]


@dataclass(frozen=True)
class TorchConfig(Config):
    """Which torch operation gathers.

    Attributes:
        elements: for buffers of one dimension, "index_select", which on a CPU copies them in one
            thread but with less work, or "gather", which shares them among the threads.
    """

    elements: str = "index_select"

    def __post_init__(self) -> None:
        if self.elements not in ("index_select", "gather"):
            raise ValueError(f"elements must be 'index_select' or 'gather', got {self.elements!r}")


class TorchBackend:
    """See the module's docstring; the methods are those of `base.Backend`."""

    name: ClassVar[str] = "torch"
    revision: ClassVar[int] = 1
    by_address: ClassVar[bool] = False

    def version(self) -> str | None:
        """Version of torch."""
        return torch.__version__

    def unavailable(self) -> list[str]:
        """See `base.Backend.unavailable`."""
        return []

    def why_not(self, request: Request) -> list[Refusal]:
        """See `base.Backend.why_not`."""
        if request.host_memory:
            return [Refusal("torch cannot read buffers in host memory with indices on a GPU")]
        return []

    def space(self) -> list[Config]:
        """See `base.Backend.space`."""
        return [TorchConfig("index_select"), TorchConfig("gather")]

    def illegal(self, request: Request, config: Config) -> str | None:
        """See `base.Backend.illegal`."""
        assert isinstance(config, TorchConfig)
        if config.elements == "gather" and all(field.row_shape for field in request.fields):
            return "no buffer has one dimension, so it is the same as index_select"
        return None

    def variant(self, request: Request, config: Config) -> Hashable | None:
        """See `base.Backend.variant`."""
        return None

    def packs(self, request: Request, config: Config) -> bool:
        """See `base.Backend.packs`."""
        return False

    def config_from(self, knobs: dict[str, Any]) -> Config:
        """See `base.Backend.config_from`."""
        return config_of(TorchConfig, self.name, knobs)

    def prepare(self, request: Request, config: Config, site: Site) -> Runner:
        """See `base.Backend.prepare`."""
        assert isinstance(config, TorchConfig)
        return SelectRunner(request, config, site)


class SelectRunner:
    """See `base.Runner`."""

    def __init__(self, request: Request, config: TorchConfig, site: Site) -> None:
        self._request = request
        elements = torch.gather if config.elements == "gather" else index_select
        self._operations: list[Callable[..., torch.Tensor]] = [
            index_select if field.row_shape else elements for field in request.fields
        ]
        self._wide_indices = torch.gather in self._operations
        self._site = site
        self._views = [
            None if field.dtype in PLAIN else SAME_SIZE[field.dtype.itemsize]
            for field in request.fields
        ]
        self._dtypes = [field.dtype for field in request.fields]
        # On a GPU to load an element from an address that its type may not have ends the context.
        self._misaligned = [
            field.alignment < min(field.dtype.itemsize, 16) for field in request.fields
        ]
        # index_select checks no index where there is nothing to copy.
        self._empty_rows = any(not field.row_bytes for field in request.fields)
        self._on_cpu = request.device.type in ("cpu", "meta")
        self._check_first = any(self._misaligned)
        self._fewest_rows = min(field.rows for field in request.fields)

    def __call__(
        self,
        indices: torch.Tensor,
        shape: torch.Size,
        sources: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor] | None,
    ) -> list[torch.Tensor]:
        """See `base.Runner`."""
        plain = indices
        if indices.dtype != torch.int64 and (self._wide_indices or indices.dtype != torch.int32):
            plain = as_int64(indices)
        if outs is not None or self._empty_rows or self._check_first or not self._on_cpu:
            if self._as_they_are(plain):
                return [
                    self._select(number, source, plain, shape, outs[number] if outs else None)
                    for number, source in enumerate(sources)
                ]
            return self._checked(indices, plain, shape, sources, outs)
        try:
            if len(shape) == 1:
                # `_select` written out: in a small gather a Python call per buffer shows.
                return [
                    operation(source, 0, plain)
                    if view is None
                    else operation(source.view(view), 0, plain).view(dtype)
                    for operation, source, view, dtype in zip(  # noqa: B905
                        self._operations, sources, self._views, self._dtypes
                    )
                ]
            return [
                self._select(number, source, plain, shape, None)
                for number, source in enumerate(sources)
            ]
        except (IndexError, RuntimeError):
            # Negative or bad indices; an error of another kind comes again, from the checked path.
            results = self._checked(indices, plain, shape, sources, None)
        # A caller who uses negative indices once will again: the failed attempt costs more than a
        # look at the indices.
        self._check_first = True
        return results

    def operations(self) -> tuple[Operation, ...]:
        """What a plain call does per buffer, if it needs nothing else; else nothing.

        Each is the operation, which takes (source, 0, indices); the integer type that source and
        result are viewed as, or None; and the buffer's type. An operation raises `IndexError` or
        `RuntimeError` for a bad or a negative index.
        """
        if not self._on_cpu or self._empty_rows or self._check_first:
            return ()
        # Other types of indices are converted first.
        taken = (torch.int64,) if self._wide_indices else (torch.int64, torch.int32)
        if self._request.index_dtype not in taken:
            return ()
        return tuple(zip(self._operations, self._views, self._dtypes, strict=True))

    def _as_they_are(self, indices: torch.Tensor) -> bool:
        """Whether each index is a row number of every buffer, as far as a CPU can tell at once.

        It is told by the least and the greatest, in 6 microseconds for the indices of a decode
        step. Resolving them takes 40, and most calls need it not.
        """
        if self._request.device.type != "cpu":
            return False
        if self._request.bounds == "unchecked" or not indices.numel():
            return True
        low, high = torch.aminmax(indices)
        return int(low) >= 0 and int(high) < self._fewest_rows

    def _checked(
        self,
        original: torch.Tensor,
        indices: torch.Tensor,
        shape: torch.Size,
        sources: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor] | None,
    ) -> list[torch.Tensor]:
        """Resolve the indices first, so that nothing is written if a CPU call must raise."""
        request = self._request
        wide = indices.to(torch.int64)
        resolved: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        # Only CUDA devices have a fault board; elsewhere the call itself raises.
        at_once = request.bounds == "raise" and request.device.type not in ("cuda", "meta")
        if at_once:
            raise_if_bad(original, shape, request, self._site)
        for field in request.fields:
            if field.rows in resolved:
                continue
            resolved[field.rows] = resolve(wide, field.rows, request.bounds)
        results = []
        for number, (field, source) in enumerate(zip(request.fields, sources, strict=True)):
            rows, bad = resolved[field.rows]
            out = None if outs is None else outs[number]
            if field.rows == 0:
                # Only fill reaches this with any index: a row of zeros for each.
                result = out if out is not None else self._empty(number, shape)
                bytewise = not is_aligned(result)
                self._flat(number, result, len(wide), bytewise).zero_()
                results.append(result)
                continue
            result = self._select(number, source, rows, shape, out)
            if bad is not None and len(wide) and not at_once:
                if request.bounds == "raise" and request.device.type == "cuda":
                    # The indices' words: a clamped uint64 would be reported with a wrong value.
                    words = original.view(torch.int64) if original.dtype == torch.uint64 else wide
                    self._report(number, words, bad)
                self._zero(number, result, bad)
            results.append(result)
        return results

    def _empty(self, number: int, shape: torch.Size) -> torch.Tensor:
        field = self._request.fields[number]
        return torch.empty(
            (*shape, *field.row_shape), dtype=field.dtype, device=self._request.device
        )

    def _select(
        self,
        number: int,
        source: torch.Tensor,
        rows: torch.Tensor,
        shape: torch.Size,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        if self._misaligned[number] or (out is not None and not is_aligned(out)):
            if out is None:
                out = self._empty(number, shape)
            index_select(
                as_bytes(source), 0, rows, out=self._flat(number, out, len(rows), bytewise=True)
            )
            return out
        view = self._views[number]
        if view is not None:
            source = source.view(view)
        operation = self._operations[number]
        if out is None:
            result = operation(source, 0, rows)
            if view is not None:
                result = result.view(self._request.fields[number].dtype)
            if len(shape) != 1:
                result = result.view((*shape, *source.shape[1:]))
            return result
        operation(source, 0, rows, out=self._flat(number, out, rows.shape[0]))
        return out

    def _flat(
        self, number: int, out: torch.Tensor, count: int, bytewise: bool = False
    ) -> torch.Tensor:
        """The output as one dimension of rows, in the type it is copied as.

        With ``bytewise`` each element is its bytes, in one more dimension.
        """
        field = self._request.fields[number]
        if out.requires_grad:
            out = out.detach()
        view = self._views[number]
        if view is not None and not bytewise:
            out = out.view(view)
        leading = out.dim() - len(field.row_shape)
        if leading != 1:
            stride = flat_row_stride(out, leading)
            steps = (stride or 1, *out.stride()[leading:])
            out = out.as_strided((count, *field.row_shape), steps)
        return as_bytes(out) if bytewise else out

    def _zero(self, number: int, result: torch.Tensor, bad: torch.Tensor) -> None:
        """Zero the marked rows, as bytes."""
        flat = self._flat(number, result, len(bad), bytewise=not is_aligned(result))
        flat.masked_fill_(bad.view(-1, *[1] * (flat.dim() - 1)), 0)

    def _report(self, number: int, indices: torch.Tensor, bad: torch.Tensor) -> None:
        """Append one record for this buffer to a lane of the fault board, without a sync.

        ``indices`` are int64, the words of uint64 indices taken as such. The record layout and the
        protocol are those of `faults`; further bad indices of the same buffer are counted in the
        record's last word.
        """
        field = self._request.fields[number]
        board = faults.board_of(self._request.device)
        lane = board.lane(self._lane())
        bell, words = board.device_words, lane.device_words
        count = bad.sum()
        position = bad.to(torch.uint8).argmax()
        value = indices.gather(0, position.view(1)).view(())
        ticket, taken = words[0].clone(), words[1]
        unsigned = self._request.index_dtype == torch.uint64
        constants = (self._site.plan, self._site.numbers[number], field.rows, int(unsigned))
        plan, buffer, rows, is_unsigned = (torch.full_like(ticket, each) for each in constants)
        sign_and_order = 2 * bell[0] + is_unsigned
        record = torch.stack(
            [ticket + 1, plan, position, value, buffer, rows, sign_and_order, count - 1]
        )
        ring = words.view(-1, faults.WORDS)
        slot = (1 + ticket % lane.ring).view(1)
        free = (count > 0) & (ticket - taken < lane.ring)
        ring.index_copy_(0, slot, torch.where(free, record, ring.index_select(0, slot)))
        first, one = torch.zeros_like(slot), (count > 0).to(torch.int64).view(1)
        bell.index_add_(0, first, one)
        words.index_add_(0, first, one)

    def _lane(self) -> Hashable:
        """Whose reports come one after another: those of a stream, or of a plan in graphs."""
        device = self._request.device
        if device.type != "cuda":
            return 0
        if torch.cuda.is_current_stream_capturing():
            return "graph", self._site.plan
        return current_stream(device.index)
