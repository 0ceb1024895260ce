"""The gather as operators of torch, for graphs that torch makes and for its transforms.

A graph must not look inside a gather: what happens there depends on the values of the indices and
on addresses. In a graph of torch.compile, torch.export or torch.jit the whole call is the operator
``multigather::gather``, or ``multigather::gather_into`` where it has ``out=``, and so it is under
the transforms of torch.func. ``multigather::add_rows`` is the gather's transpose, for gradients.
Other eager calls pass through none of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.library import Library, register_fake, register_vmap

from .autograd import Gather, ScatterAdd, has_tangent, sum_shapes, sums_of, transforming
from .batch import gather_batch, sum_batch
from .outputs import share_memory

_library: Any = Library("multigather", "DEF")  # type: ignore[no-untyped-call]
_library.define("gather(Tensor indices, Tensor[] bufs, str bounds, str? backend) -> Tensor[]")
_library.define(
    "gather_into(Tensor indices, Tensor[] bufs, str bounds, str? backend, Tensor(a!)[] out) -> ()"
)
_library.define(
    "add_rows(Tensor indices, Tensor[] gradients, SymInt[] rows, str bounds, str? backend)"
    " -> Tensor[]"
)


@contextlib.contextmanager
def _no_derivatives() -> Iterator[None]:
    # Below autograd a tensor cannot be asked for its tangent.
    with torch.no_grad(), forward_ad._set_fwd_grad_enabled(False):
        yield


def _run(
    indices: torch.Tensor, bufs: Sequence[torch.Tensor], bounds: str, backend: str | None
) -> list[torch.Tensor]:
    from .api import gather

    with _no_derivatives():
        return list(gather(indices, *bufs, bounds=bounds, backend=backend))


def _run_into(
    indices: torch.Tensor,
    bufs: Sequence[torch.Tensor],
    bounds: str,
    backend: str | None,
    out: Sequence[torch.Tensor],
) -> None:
    from .api import gather

    with _no_derivatives():
        gather(indices, *bufs, out=out, bounds=bounds, backend=backend)


def _shapes(
    indices: torch.Tensor, bufs: Sequence[torch.Tensor], bounds: str, backend: str | None
) -> list[torch.Tensor]:
    outputs = []
    for buf in bufs:
        # Buffers in pinned host memory are gathered to the device of the indices.
        device = indices.device if indices.device.type == "cuda" else buf.device
        outputs.append(buf.new_empty((*indices.shape, *buf.shape[1:]), device=device))
    return outputs


def _check_into(
    indices: torch.Tensor,
    bufs: Sequence[torch.Tensor],
    bounds: str,
    backend: str | None,
    out: Sequence[torch.Tensor],
) -> None:
    """Refuse outputs that share memory with an input or one another, as eager calls do.

    Here, because the operator may be handed copies of the outputs. All else is refused when it
    runs.
    """
    inputs = (indices, *bufs)
    for number, each in enumerate(out):
        for other in (*inputs, *out[:number]):
            # Fake tensors have no addresses, but views of one tensor have one storage.
            same = each.untyped_storage()._cdata == other.untyped_storage()._cdata
            if same and share_memory(each, other, _offset):
                raise ValueError(
                    f"out[{number}] shares memory with an input or with another output; pass a "
                    "tensor with memory of its own"
                )


def _offset(tensor: torch.Tensor) -> Any:  # an integer, symbolic or not
    return tensor.storage_offset() * tensor.element_size()


def _sum(
    indices: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    rows: Sequence[int],
    bounds: str,
    backend: str | None,
) -> list[torch.Tensor]:
    with _no_derivatives():
        return sums_of(indices, bounds, backend, rows, gradients)


def _sum_shapes(
    indices: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    rows: Sequence[int],
    bounds: str,
    backend: str | None,
) -> list[torch.Tensor]:
    shapes = sum_shapes(indices, rows, gradients)
    return [gradient.new_empty(shape) for gradient, shape in zip(gradients, shapes, strict=True)]


# An operator's node is made here, at the level of the transform that is at work: torch.library's
# own registration of derivatives knows no forward mode.


def _gather_node(
    indices: torch.Tensor, bufs: Sequence[torch.Tensor], bounds: str, backend: str | None
) -> Sequence[torch.Tensor]:
    def run(index: torch.Tensor, sources: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        with below():
            return gather_operator(index, sources, bounds, backend)  # type: ignore[no-any-return]

    below, dual = _below_autograd(), _is_dual(bufs)
    if not dual and not _requires_grad(bufs):
        return run(indices, bufs)
    return list(Gather.call(run, dual, indices, bounds, backend, *bufs))


def _sum_node(
    indices: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    rows: Sequence[int],
    bounds: str,
    backend: str | None,
) -> Sequence[torch.Tensor]:
    def run(index: torch.Tensor, added: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        with below():
            return add_rows(index, added, rows, bounds, backend)  # type: ignore[no-any-return]

    below, dual = _below_autograd(), _is_dual(gradients)
    if not dual and not _requires_grad(gradients):
        return run(indices, gradients)
    return list(ScatterAdd.call(run, dual, indices, bounds, backend, rows, *gradients))


def _below_autograd() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Where a node's forward calls its operator again, for what is around this level of autograd.

    A node's forward runs with derivatives turned off, of the transforms around it too.
    """
    backward, forward = torch.is_grad_enabled(), forward_ad._is_fwd_grad_enabled()

    @contextlib.contextmanager
    def below() -> Iterator[None]:
        with (
            torch.set_grad_enabled(backward),
            forward_ad._set_fwd_grad_enabled(forward),
            torch._C._AutoDispatchBelowAutograd(),
        ):
            yield

    return below


def _is_dual(tensors: Sequence[torch.Tensor]) -> bool:
    # A graph enters forward mode without Python's knowing, so every tensor is asked.
    return transforming() or any(map(has_tangent, tensors))


def _requires_grad(tensors: Sequence[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _batch(
    info: Any,
    in_dims: tuple[Any, ...],
    indices: torch.Tensor,
    bufs: Sequence[torch.Tensor],
    bounds: str,
    backend: str | None,
) -> tuple[list[torch.Tensor], list[int | None]]:
    outputs, dims = gather_batch(
        info.batch_size, in_dims[0], _dims(in_dims[1], bufs), indices, bounds, backend, bufs
    )
    return list(outputs), list(dims)


def _sum_batch(
    info: Any,
    in_dims: tuple[Any, ...],
    indices: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    rows: Sequence[int],
    bounds: str,
    backend: str | None,
) -> tuple[list[torch.Tensor], list[int | None]]:
    dims = _dims(in_dims[1], gradients)
    sums, out_dims = sum_batch(
        info.batch_size, in_dims[0], dims, indices, bounds, backend, rows, gradients
    )
    return list(sums), list(out_dims)


def _dims(dims: Any, tensors: Sequence[torch.Tensor]) -> Sequence[int | None]:
    return dims if isinstance(dims, (tuple, list)) else [dims] * len(tensors)


_library.impl("gather", _run, "CompositeExplicitAutograd")
_library.impl("gather", _gather_node, "Autograd")
register_fake("multigather::gather", _shapes, lib=_library)
register_vmap("multigather::gather", _batch, lib=_library)

_library.impl("gather_into", _run_into, "CompositeExplicitAutograd")
register_fake("multigather::gather_into", _check_into, lib=_library)

_library.impl("add_rows", _sum, "CompositeExplicitAutograd")
_library.impl("add_rows", _sum_node, "Autograd")
register_fake("multigather::add_rows", _sum_shapes, lib=_library)
register_vmap("multigather::add_rows", _sum_batch, lib=_library)

gather_operator = torch.ops.multigather.gather.default
gather_into_operator = torch.ops.multigather.gather_into.default
add_rows = torch.ops.multigather.add_rows.default
