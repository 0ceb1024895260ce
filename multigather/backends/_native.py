"""native backend: kernels/gather_cpu.c, compiled into the extension when the package is installed.

One call copies the rows of all buffers, where torch needs an operation for each. It asks for rows
before it needs them, so that cache misses overlap, checks the indices once for all buffers, and
shares the work among torch's own CPU threads. It is there where the extension is.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, NoReturn

import torch

from .. import native
from ..bounds import raise_if_bad
from ..fork import cached_property
from ..request import BOUNDS, Request, Site
from .base import (
    Config,
    Destination,
    KernelRunner,
    Refusal,
    Runner,
    config_of,
    destinations_of,
    empty_outputs,
    new_destination,
    row_refusals,
)


class NativeBackend:
    """See the module's docstring; the methods are those of `base.Backend`."""

    name: ClassVar[str] = "native"
    revision: ClassVar[int] = 1
    by_address: ClassVar[bool] = False

    def version(self) -> str | None:
        """Version of torch, whose threads and memory it uses; None without the extension."""
        return torch.__version__ if native.extension is not None else None

    def unavailable(self) -> list[str]:
        """See `base.Backend.unavailable`."""
        if native.extension is not None:
            return []
        return [f"the compiled extension is {native.description}"]

    def why_not(self, request: Request) -> list[Refusal]:
        """See `base.Backend.why_not`.

        A call that refuses an index has written nothing, which a backend that has only some of the
        buffers could not promise. So it takes all of them or none.
        """
        if request.device.type != "cpu":
            return [Refusal(f"it runs on the CPU only, not on {request.device}")]
        refusals = [Refusal(text) for text in self.unavailable()]
        strided = row_refusals(request)
        if strided:
            refusals += [*strided, Refusal("it takes all buffers of a gather or none")]
        return refusals

    def space(self) -> list[Config]:
        """See `base.Backend.space`."""
        return [Config()]  # nothing can be chosen

    def illegal(self, request: Request, config: Config) -> str | None:
        """See `base.Backend.illegal`."""
        return None

    def variant(self, request: Request, config: Config) -> Hashable | None:
        """See `base.Backend.variant`."""
        return None

    def packs(self, request: Request, config: Config) -> bool:
        """See `base.Backend.packs`."""
        return bool(request.packed)

    def config_from(self, knobs: dict[str, Any]) -> Config:
        """See `base.Backend.config_from`."""
        return config_of(Config, self.name, knobs)

    def prepare(self, request: Request, config: Config, site: Site) -> Runner:
        """See `base.Backend.prepare`."""
        return CopyRunner(request, site)


class CopyRunner:
    """See `base.Runner`.

    Attributes:
        layout: struct GatherField of each buffer, for new outputs.
        bounds: number of the mode.
        index_type: of the indices, as gather_cpu.h has it.
    """

    def __init__(self, request: Request, site: Site) -> None:
        assert native.extension is not None
        self._gather_rows: Callable[..., bool] = native.extension.gather_rows
        self._request, self._site = request, site
        dtype = request.index_dtype
        self.index_type = (dtype.itemsize.bit_length() - 1) + 4 * (not dtype.is_signed)
        self.bounds = BOUNDS.index(request.bounds)
        self.layout = self._layout([new_destination(field) for field in request.fields])

    def _layout(self, destinations: Sequence[Destination]) -> bytes:
        parts = [
            struct.pack(
                "=4q",
                field.rows,
                field.row_bytes,
                field.row_stride_bytes,
                destination.row_stride_bytes,
            )
            for field, destination in zip(self._request.fields, destinations, strict=True)
        ]
        return b"".join(parts)

    def __call__(
        self,
        indices: torch.Tensor,
        shape: torch.Size,
        sources: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor] | None,
    ) -> list[torch.Tensor]:
        """See `base.Runner`."""
        layout = self.layout
        if outs is None:
            outs = empty_outputs(self._request, shape)
        else:
            layout = self._layout(destinations_of(outs, len(shape)))
        addresses = [tensor.data_ptr() for tensor in (*sources, *outs)]
        start, stride, count = indices.data_ptr(), indices.stride(0), indices.shape[0]
        if not self.gather_rows(layout, start, stride, count, addresses):
            self.refuse(indices, shape)
        return list(outs)

    def gather_rows(
        self, layout: bytes, indices: int, stride: int, count: int, addresses: list[int]
    ) -> bool:
        """Gather from and to these addresses; False if an index is out of range in mode raise."""
        return self._gather_rows(
            layout, self.bounds, self.index_type, indices, stride, count, addresses
        )

    def launch_into(self, count: int, outs: Sequence[torch.Tensor]) -> CopyLaunch:
        """The launch of a call with so many contiguous 1-d indices into these outputs."""
        layout = self._layout(destinations_of(outs, 1))
        return CopyLaunch(self, self._request, layout, count)

    def refuse(self, indices: torch.Tensor, shape: torch.Size) -> NoReturn:
        """Raise `IndexError` for indices that were found to be bad."""
        raise_if_bad(indices, shape, self._request, self._site)
        raise RuntimeError("an index was changed by another thread while it was used")


class CopyLaunch:
    """As `launch.Launch`: a gather of which only the addresses are still open.

    Args:
        runner: whose call it is.
        request: the gather.
        layout: struct GatherField of each buffer.
        count: number of indices.
    """

    def __init__(self, runner: CopyRunner, request: Request, layout: bytes, count: int) -> None:
        self._runner, self._request, self._layout, self._count = runner, request, layout, count
        self._places = KernelRunner.places(request)

    def __call__(self, addresses: Sequence[int]) -> None:
        """Gather; ``addresses`` as `launch.Launch` takes them."""
        indices, *pairs = addresses
        sources = [pairs[2 * place] for place in self._places]
        outs = [pairs[2 * place + 1] for place in self._places]
        if not self._runner.gather_rows(self._layout, indices, 1, self._count, [*sources, *outs]):
            dtype = self._request.index_dtype
            memory = (ctypes.c_char * (self._count * dtype.itemsize)).from_address(indices)
            self._runner.refuse(torch.frombuffer(memory, dtype=dtype), torch.Size([self._count]))

    @cached_property
    def native(self) -> Any:
        """The same for `_native`: struct GatherBlock of gather_cpu.h, its addresses still 0."""
        assert native.extension is not None
        fields = len(self._places)
        header = struct.pack(
            "=6q", 0, self._count, 1, self._runner.index_type, self._runner.bounds, fields
        )
        sources = len(header) + len(self._layout)
        places = [0]
        for number in KernelRunner.order(self._request):
            places += (sources + 8 * number, sources + 8 * (fields + number))
        return native.extension.Launch(
            native.extension.cpu_driver,
            0,
            1,
            1,
            0,
            0,
            int,  # the stream, which is none
            header + self._layout + bytes(16 * fields),
            places,
            (0,),
            self,
        )
