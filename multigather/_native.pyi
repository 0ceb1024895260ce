"""Types of the compiled extension; what its objects do is said in shortcut.py and launch.py."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensors = Sequence[torch.Tensor]

cpu_driver: int  # address of gather_cpu_launch

def read_tensors(
    type: type[torch.Tensor] | None,
    offset: int,
    data_ptr: int,
    numel: int,
    storage_size: int,
    storage_offset: int,
    /,
) -> None: ...
def facts_of(tensor: torch.Tensor, /) -> tuple[int, int, int, int]: ...
def gather_rows(
    layout: bytes,
    bounds: int,
    index_type: int,
    indices: int,
    index_stride: int,
    count: int,
    addresses: Sequence[int],
    /,
) -> bool: ...
def use_threads(parallel: int, number: int, wanted: int, /) -> None: ...

class Launch:
    def __new__(
        cls,
        driver: int,
        function: int,
        grid: int,
        threads: int,
        shared_bytes: int,
        device: int,
        current_stream: Callable[[int], int],
        template: bytes,
        places: Sequence[int],
        offsets: Sequence[int],
        otherwise: Callable[..., None],
        scale: tuple[int, int, int, int, Sequence[int]] | None = None,
    ) -> Launch: ...

class LaunchNew:
    def __new__(
        cls,
        check: Callable[..., bool],
        launches: dict[int, tuple[Launch, tuple[tuple[Any, ...], ...]]],
        empty: Callable[..., torch.Tensor],
        current_device: Callable[[], int],
        device: int,
        board: int,
        raise_pending: Callable[[], None],
        index_bytes: int,
        masks: Sequence[int],
        values: Sequence[int],
        places: Sequence[int],
        items: Sequence[int],
        spans: Sequence[int],
    ) -> LaunchNew: ...
    def __call__(
        self, indices: Any, buffers: Sequence[Any], /
    ) -> tuple[torch.Tensor, ...] | None: ...

class LaunchInto:
    def __new__(
        cls,
        check: Callable[..., bool],
        launch: Launch,
        current_device: Callable[[], int],
        device: int,
        board: int,
        raise_pending: Callable[[], None],
        elsewhere: Callable[..., tuple[torch.Tensor, ...] | None],
        numel: int,
        index_bytes: int,
        addresses: Sequence[int],
        items: Sequence[int],
        spans: Sequence[int],
        extents: Sequence[int],
        places: Sequence[int],
        written: Callable[[tuple[torch.Tensor, ...]], None],
    ) -> LaunchInto: ...
    def __call__(
        self, indices: Any, buffers: Sequence[Any], outs: Sequence[Any], /
    ) -> tuple[torch.Tensor, ...] | None: ...

class Copy:
    def __new__(
        cls,
        check: Callable[..., bool],
        buckets: set[int],
        empty: Callable[..., torch.Tensor],
        outputs: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...],
        layout: bytes,
        bounds: int,
        index_type: int,
        failed: Callable[..., tuple[torch.Tensor, ...] | None],
        items: Sequence[int],
        spans: Sequence[int],
        addresses: Sequence[int] | None,
    ) -> Copy: ...
    def __call__(
        self, indices: Any, buffers: Sequence[Any], /
    ) -> tuple[torch.Tensor, ...] | None: ...
