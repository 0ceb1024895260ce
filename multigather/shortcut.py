"""The short way through `gather` for a call like an earlier one.

Checking the arguments of a gather in Python takes longer than gathering a decode step's rows. A
call that succeeded leaves a *guard* behind: one compiled check, made by torch's own graph compiler
(`torch._C._dynamo.guards.TensorGuards`), that the next call's tensors have the same types, devices,
shapes, strides, lazy bits and gradient requirements; 0.9 microseconds for five tensors, against 8
for the same facts collected in Python. A guard knows layouts, not tensors, so it keeps nothing
alive and is right whatever became of the tensors it was made from.

The class is private to torch. Where it is missing or behaves unexpectedly, every call takes the
long way, which is right too.

What follows the guard exists twice, with the same checks in the same order: in the compiled
extension `_native`, and as Python generated here for machines where that was not built. On a CPU
the extension gathers too (gather_cpu.c), and the generated code calls torch's operations.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from . import faults, native
from .autograd import Gather, detached
from .backends._native import CopyLaunch, CopyRunner
from .backends._torch import Operation, SelectRunner
from .backends.base import KernelRunner
from .containers import Buffers
from .executable import Executable
from .fork import in_child
from .launch import (
    Launch,
    current_device,
    current_stream,
    driver_address,
    fast_allocation,
    launch_function,
)
from .memory import extent, has_memory, is_aligned, span_of
from .outputs import mark_written
from .pinned import announce_reads
from .request import Request, bucket_of, contiguous_strides

try:
    from torch._C._dynamo import guards

    TensorGuards: Any = getattr(guards, "TensorGuards", None)
except ImportError:  # a torch that moved it
    TensorGuards = None

# How every generated `Shortcut.run` begins.
GUARDED = (
    "def run(indices, buffers):",
    "    try:",
    "        if not check(indices, *buffers):",
    "            return None",
    "    except TypeError:",
    "        return None",
)

Check = Callable[..., bool]
Run = Callable[[Any, Sequence[Any]], "tuple[torch.Tensor, ...] | None"]
RunInto = Callable[[Any, Sequence[Any], Sequence[Any]], "tuple[torch.Tensor, ...] | None"]
# What a launch with some number of indices needs: `Launch.facts`, or for `_native` the launch and
# the arguments of each output's allocation.
Prepared = tuple[Any, ...]


class Shortcut:
    """What a call leaves behind for the next one like it.

    Args:
        check: guard for the layout of ``(indices, *buffers)``.
        executable: what gathers from buffers of this layout.
        buffers: some of this layout.
        fixed: whether it is for buffers at the addresses of these only.

    Attributes:
        run: takes (indices, buffers), anything at all, and returns new outputs; or None, having
            done nothing, if this call must go the long way.
    """

    def __init__(
        self,
        check: Check,
        executable: Executable,
        buffers: Sequence[torch.Tensor],
        fixed: bool = False,
    ) -> None:
        self.check = check
        self.executable = executable
        addresses = tuple(buffer.data_ptr() for buffer in buffers) if fixed else None
        self._addresses = addresses
        self._needs = needs = Needs.of(buffers)
        self._launches: dict[int, Prepared] = {}
        self._native = native_launches()
        run: Run | None = None
        if executable.on_cuda:
            repeated = native_launch if self._native else repeated_launch
            run = repeated(check, executable.request, self._launches, needs, addresses)
        # Layout of a compiled gather, or operations of torch: what the calls so far did.
        self._way: bytes | tuple[Operation, ...] = ()
        self._buckets: set[int] = set()
        self.run = run or self._run
        if executable.request.host_memory:
            self.run = functools.partial(self._run_pinned, self.run)
        # What calls so far had that `run` does not know, so that others are looked at once more:
        # indices of another number of dimensions than one; buffers that require a gradient, of
        # which this is the guard.
        self._flattened = False
        self._attached: Check | None = None
        if run is not None:
            _launching.add(self)

    def learn(self, indices: torch.Tensor, buffers: Sequence[torch.Tensor]) -> None:
        """Take over what a call has made, such as the launch for so many indices."""
        count = indices.numel()
        self._flattened |= indices.dim() != 1
        if any(buffer.requires_grad for buffer in buffers):
            self._attached = guard(indices, buffers)
        runner = self.executable.runners.get(bucket_of(count))
        if isinstance(runner, (CopyRunner, SelectRunner)):
            self._learn_on_cpu(runner, bucket_of(count))
            return
        launch = runner.launch(count) if isinstance(runner, KernelRunner) else None
        if launch is not None:
            if len(self._launches) >= KernelRunner.KEPT:
                self._launches.clear()
            if self._native:
                # Under ~bucket the extension finds a launch for a range of numbers, two of which
                # may share a bucket.
                key = ~bucket_of(count)
                if launch.scale is None or key in self._launches:
                    key = count
                self._launches[key] = (launch.native, outputs_of(self.executable.request))
            else:
                self._launches[count] = launch.facts

    def knows(self, indices: torch.Tensor, buffers: Sequence[torch.Tensor]) -> bool:
        """Whether the guard lets these tensors pass, but for the indices' shape and gradients."""
        flat = indices.view(-1) if indices.is_contiguous() else indices
        return self.check(flat, *detached(buffers))

    def run_otherwise(
        self, indices: Any, buffers: Sequence[Any]
    ) -> tuple[torch.Tensor, ...] | None:
        """`run` for what it does not know itself but earlier calls had."""
        results = self._run_flattened(indices, buffers) if self._flattened else None
        if results is None and self._attached is not None:
            results = self._run_attached(indices, buffers)
        return results

    def _run_attached(
        self, indices: Any, buffers: Sequence[Any]
    ) -> tuple[torch.Tensor, ...] | None:
        """`run` for buffers of which the same require a gradient; one node of autograd's graph."""
        assert self._attached is not None
        try:
            flat = indices if indices.dim() == 1 else indices.view(-1)
            if not self._attached(flat, *buffers) or not is_aligned(indices):
                return None
        except (AttributeError, RuntimeError, TypeError):  # no tensors, or no such view
            return None
        if self._has_moved(buffers):
            return None
        if not torch.is_grad_enabled():
            return tuple(self._run_detached(indices, buffers))
        executable = self.executable
        return Gather.call(
            self._run_detached,
            False,
            indices,
            executable.request.bounds,
            executable.name,
            *buffers,
        )

    def _has_moved(self, buffers: Sequence[torch.Tensor]) -> bool:
        """Whether a buffer is at another address than it must be."""
        return self._addresses is not None and any(
            buffer.data_ptr() != address
            for buffer, address in zip(buffers, self._addresses, strict=True)
        )

    def _run_detached(
        self, indices: torch.Tensor, buffers: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Gather without a graph, the long way too."""
        buffers = detached(buffers)
        results = self.run(indices, buffers)
        if results is None and self._flattened:
            results = self._run_flattened(indices, buffers)
        if results is None:
            from .api import gather_checked

            name, bounds = self.executable.name, self.executable.request.bounds
            results, executable = gather_checked(
                indices, Buffers(tuple(buffers)), None, bounds, name
            )
            if executable is self.executable:
                self.learn(indices, buffers)
        return results

    def _run_pinned(
        self, run: Run, indices: Any, buffers: Sequence[Any]
    ) -> tuple[torch.Tensor, ...] | None:
        """`run` for buffers in pinned memory, which no guard tells from other memory."""
        if self._addresses is None:
            try:
                if not all(buffer.is_pinned() for buffer in buffers):
                    return None
            except AttributeError:  # not tensors
                return None
        results = run(indices, buffers)
        if results is not None:
            announce_reads(buffers, self.executable.request.device)
        return results

    def _run_flattened(
        self, indices: Any, buffers: Sequence[Any]
    ) -> tuple[torch.Tensor, ...] | None:
        """`run` for contiguous indices of any number of dimensions."""
        if not isinstance(indices, torch.Tensor) or not indices.is_contiguous():
            return None
        shape = indices.shape
        try:
            results = self.run(indices.view(-1), buffers)
        except IndexError:
            if self.executable.on_cuda:
                raise  # an earlier call's, told once
            return None  # the long way names the position in this shape
        if results is None:
            return None
        return in_shape(results, shape, self.executable.request)

    def _learn_on_cpu(self, runner: CopyRunner | SelectRunner, bucket: int) -> None:
        """Take over what a call on a CPU did, if all sizes do the same."""
        way = runner.layout if isinstance(runner, CopyRunner) else runner.operations()
        if way and not self._way:
            self._way = way
            self.run = (
                native_copy(
                    self.check,
                    self.executable.request,
                    runner,
                    self._buckets,
                    self._run,
                    self._needs,
                    self._addresses,
                )
                if isinstance(runner, CopyRunner)
                else repeated_select(
                    self.check,
                    runner.operations(),
                    self.executable.request.index_dtype.itemsize,
                    self._buckets,
                    self._failed,
                    self._needs,
                    self._addresses,
                )
            ) or self._run
        if way != self._way:
            self.run = self._run
        self._buckets.add(bucket)

    def _failed(self, indices: Any, buffers: Sequence[Any]) -> tuple[torch.Tensor, ...] | None:
        """A negative or a bad index: the runner tells which, and such callers come again."""
        self.run = self._run
        return self._run(indices, buffers)

    def _run(self, indices: Any, buffers: Sequence[Any]) -> tuple[torch.Tensor, ...] | None:
        try:
            if not self.check(indices, *buffers):
                return None
        except TypeError:  # not tensors
            return None
        if self._has_moved(buffers) or not (
            self._needs.met(buffers) and is_readable(indices, indices.numel())
        ):
            return None
        shape = indices.shape
        runner = self.executable.runners.get(bucket_of(shape[0]))
        if runner is None:
            return None
        if self.executable.by_address:  # which the guard does not know
            return None
        if self.executable.on_cuda:
            faults.raise_pending(self.executable.request.device)
        return tuple(runner(indices, shape, buffers, None))


class Needs(NamedTuple):
    """What memory tensors of one layout must have; a guard does not look at that.

    Attributes:
        items: bytes of an element of each.
        spans: bytes of all elements of each, see `span_of`.
    """

    items: tuple[int, ...]
    spans: tuple[int, ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Needs:
        """The needs of these."""
        return cls(tuple(tensor.element_size() for tensor in tensors), tuple(map(span_of, tensors)))

    def met(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these have memory, at addresses that suit their types."""
        return all(map(has_memory, tensors, self.spans)) and all(map(is_aligned, tensors))


def is_readable(indices: torch.Tensor, count: int) -> bool:
    """Whether so many contiguous indices have memory that a load can read."""
    return has_memory(indices, count * indices.itemsize) and is_aligned(indices)


def in_shape(
    results: Sequence[torch.Tensor], shape: torch.Size, request: Request
) -> tuple[torch.Tensor, ...]:
    """Outputs for flattened indices, viewed as those for indices of this shape."""
    # Adding sizes of torch takes as long as the view itself.
    return tuple(
        result.view((*shape, *field.row_shape))
        for result, field in zip(results, request.fields, strict=True)
    )


# Those whose way reads the fault board, memory that a forked child does not have.
_launching: weakref.WeakSet[Shortcut | OutShortcut] = weakref.WeakSet()


@in_child
def _forget_launches() -> None:
    for shortcut in list(_launching):
        shortcut.run = shortcut._run


class OutShortcut:
    """What a call with ``out=`` leaves behind for the next one with the same tensors.

    Its outputs were found to fit and to share no memory with the buffers or one another. That
    stays true while all of them keep their layouts, which a guard looks at, and their addresses.
    Only the indices may be others, so only they are compared with the outputs again.

    Args:
        indices: of the call that was checked.
        buffers: its buffers.
        outs: its outputs.
        executable: what gathers.

    Attributes:
        run: takes (indices, buffers, outs) and gathers into the outputs; or returns None, having
            done nothing, if this call must be checked anew.
    """

    def __init__(
        self,
        indices: torch.Tensor,
        buffers: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        executable: Executable,
    ) -> None:
        self._check = guard(indices, (*buffers, *outs)) if indices.dim() == 1 else None
        self._executable = executable
        self._count = indices.numel()
        self._addresses = [tensor.data_ptr() for tensor in (*buffers, *outs)]
        self._needs = Needs.of((*buffers, *outs))
        self._extents = [extent(out) for out in outs if out.numel()]
        runner = executable.runners.get(bucket_of(self._count))
        self._runner = runner
        self._launch: Launch | CopyLaunch | None = None
        if isinstance(runner, (KernelRunner, CopyRunner)):
            self._launch = runner.launch_into(self._count, outs)
            if self._launch is None:
                self._runner = None
        self._order = KernelRunner.order(executable.request)
        self.run: RunInto = self._run
        compiled = native_launches() if executable.on_cuda else native.extension is not None
        if self._check is not None and self._launch is not None and compiled:
            self.run = self._native_run(indices.itemsize)
            _launching.add(self)

    def _native_run(self, index_bytes: int) -> RunInto:
        """`_run` for the launch, compiled; where another device is current, `_run` itself."""
        assert native.extension is not None
        assert self._launch is not None
        device = self._executable.request.device
        return native.extension.LaunchInto(  # type: ignore[no-any-return]
            self._check,
            self._launch.native,
            current_device if device.type == "cuda" else int,  # 0, the only CPU
            device.index or 0,
            faults.board_of(device).address,
            functools.partial(faults.raise_pending, device),
            self._run,
            self._count,
            index_bytes,
            self._addresses,
            *self._needs,
            [address for extent in self._extents for address in extent],
            KernelRunner.places(self._executable.request),
            mark_written,
        )

    def _run(
        self, indices: Any, buffers: Sequence[Any], outs: Sequence[Any]
    ) -> tuple[torch.Tensor, ...] | None:
        if self._check is None or self._runner is None:
            return None
        try:
            if not self._check(indices, *buffers, *outs):
                return None
        except TypeError:  # not tensors, or not as many
            return None
        if indices.numel() != self._count:
            return None
        addresses = [tensor.data_ptr() for tensor in buffers]
        addresses += [tensor.data_ptr() for tensor in outs]
        if addresses != self._addresses or not (
            all(map(has_memory, (*buffers, *outs), self._needs.spans))
            and is_readable(indices, self._count)
        ):
            return None
        start = indices.data_ptr()
        end = start + self._count * indices.itemsize
        for low, high in self._extents:
            if start < high and low < end:
                return None
        if self._executable.on_cuda:
            faults.raise_pending(self._executable.request.device)
        if self._launch is not None:
            pointers = [start]
            half = len(buffers)
            for number in self._order:
                pointers += (addresses[number], addresses[half + number])
            self._launch(pointers)
        elif self._count:
            self._runner(indices, indices.shape, buffers, outs)
        mark_written(tuple(outs))
        return tuple(outs)


def guard(indices: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Check | None:
    """A check that other tensors are laid out as these, or None if there can be no such check.

    The check takes ``(indices, *tensors)``. The number of indices may differ; they must be one
    contiguous dimension; a guard for more dimensions is one for them flattened.
    """
    if TensorGuards is None or not indices.is_contiguous():
        return None
    indices = indices.view(-1)
    if indices.stride(0) != 1:
        return None
    if any(type(each) not in (torch.Tensor, torch.nn.Parameter) for each in (indices, *tensors)):
        return None
    sizes = [[None], *(list(tensor.shape) for tensor in tensors)]
    strides = [[1], *(list(tensor.stride()) for tensor in tensors)]
    try:
        check = TensorGuards(
            indices, *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
        ).check
        works = check(indices, *tensors) is True and check(indices[:, None], *tensors) is False
    except (TypeError, RuntimeError, AttributeError):
        return None
    return check if works else None


def repeated_select(
    check: Check,
    operations: Sequence[Operation],
    index_bytes: int,
    buckets: set[int],
    failed: Run,
    needs: Needs,
    addresses: tuple[int, ...] | None = None,
) -> Run:
    """`Shortcut.run` for a CPU, generated for the buffers: one torch operation each.

    What it saves is a loop and two calls, half of what a small gather costs beyond the operations.

    Args:
        check: guard for the layout of ``(indices, *buffers)``.
        operations: the operation of each buffer, see `SelectRunner.operations`.
        index_bytes: of one index.
        buckets: those numbers of indices, by `bucket_of`, that the operations are for.
        failed: gathers after an operation has refused the indices.
        needs: of the buffers.
        addresses: of the buffers, if it is for buffers at these addresses only.
    """
    scope: dict[str, Any] = {
        "check": check,
        "buckets": buckets,
        "failed": failed,
    }
    rows = []
    for k, (operation, view, dtype) in enumerate(operations):
        scope |= {f"operation{k}": operation, f"view{k}": view, f"dtype{k}": dtype}
        source = f"b{k}" if view is None else f"b{k}.view(view{k})"
        rows.append(
            f"operation{k}({source}, 0, indices)" + ("" if view is None else f".view(dtype{k})")
        )
    lines = [
        *GUARDED,
        "    count = indices.numel()",
        "    if (count * count).bit_length() >> 1 not in buckets:",  # bucket_of
        "        return None",
        f"    ({', '.join(f'b{k}' for k in range(len(operations)))},) = buffers",
        *(
            f"    if b{k}.data_ptr() != {address}: return None"
            for k, address in enumerate(addresses or ())
        ),
        *in_memory(needs, index_bytes),
        "    try:",
        f"        return ({', '.join(rows)},)",
        "    except (IndexError, RuntimeError):",
        "        return failed(indices, buffers)",
    ]
    exec("\n".join(lines), scope)
    return scope["run"]  # type: ignore[no-any-return]


def in_memory(needs: Needs, index_bytes: int) -> list[str]:
    """Lines of generated code, `Needs.met` and `is_readable` without the calls: else None."""
    checks = [
        f"b{k}.untyped_storage().nbytes() >= {span} + {item} * b{k}.storage_offset()"
        for k, (item, span) in enumerate(zip(*needs, strict=True))
        if span
    ]
    checks.append(
        f"indices.untyped_storage().nbytes() >= {index_bytes} * (count + indices.storage_offset())"
    )
    return [
        f"    if not ({' and '.join(checks)}):",
        "        return None",
        f"    if indices.data_ptr() & {index_bytes - 1}:",
        "        return None",
    ]


def native_copy(
    check: Check,
    request: Request,
    runner: CopyRunner,
    buckets: set[int],
    failed: Run,
    needs: Needs,
    addresses: tuple[int, ...] | None = None,
) -> Run | None:
    """`Shortcut.run` for the native backend, compiled from the guard to the outputs.

    Args:
        check: guard for the layout of ``(indices, *buffers)``.
        request: the gather.
        runner: what gathers.
        buckets: those numbers of indices, by `bucket_of`, that it gathers.
        failed: raises for an index that is out of range.
        needs: of the buffers.
        addresses: of the buffers, if it is for buffers at these addresses only.

    Returns:
        The function, or None where torch has no fast allocation.
    """
    empty = fast_allocation("cpu")
    if native.extension is None or empty is None:
        return None
    return native.extension.Copy(  # type: ignore[no-any-return]
        check,
        buckets,
        empty,
        outputs_of(request),
        runner.layout,
        runner.bounds,
        runner.index_type,
        failed,
        *needs,
        addresses,
    )


def native_launches() -> bool:
    """Whether `_native` can launch here."""
    return native.extension is not None and driver_address() != 0


def allocations(request: Request, count: int) -> tuple[tuple[Any, ...], ...]:
    """Arguments of `fast_allocation` for each output of so many indices."""
    sizes = [(count, *field.row_shape) for field in request.fields]
    return tuple(
        (size, contiguous_strides((0, *size[1:])), field.dtype)
        for size, field in zip(sizes, request.fields, strict=True)
    )


def outputs_of(request: Request) -> tuple[tuple[Any, ...], ...]:
    """Row shape, strides and dtype of each output, from which the extension makes one."""
    return tuple((size[1:], strides, dtype) for size, strides, dtype in allocations(request, 0))


def native_launch(
    check: Check,
    request: Request,
    launches: dict[int, Prepared],
    needs: Needs,
    addresses: tuple[int, ...] | None = None,
) -> Run | None:
    """`repeated_launch`, compiled; ``launches`` has each `Launch.native` and its `outputs_of`.

    What generated code has as constants stands in arrays here: a buffer's address, as far as a
    mask says, must be a value.
    """
    assert native.extension is not None
    empty = fast_allocation("cuda")
    if empty is None:
        return None
    device = request.device
    masks = [field.alignment - 1 for field in request.fields]
    return native.extension.LaunchNew(  # type: ignore[no-any-return]
        check,
        launches,
        empty,
        current_device,
        device.index,
        faults.board_of(device).address,
        functools.partial(faults.raise_pending, device),
        request.index_dtype.itemsize,
        masks if addresses is None else [2**64 - 1] * len(masks),
        addresses or [0] * len(masks),
        KernelRunner.places(request),
        *needs,
    )


def repeated_launch(
    check: Check,
    request: Request,
    launches: dict[int, Prepared],
    needs: Needs,
    addresses: tuple[int, ...] | None = None,
) -> Run | None:
    """`Shortcut.run` for a GPU, generated for the request's buffers.

    Straight code for a known number of buffers saves what loops over them cost: in a decode step's
    call that is more than the launch itself.

    Args:
        check: guard for the layout of ``(indices, *buffers)``.
        request: the gather.
        launches: `Launch.facts` of launches into new outputs from contiguous indices, by the number
            of indices.
        needs: of the buffers.
        addresses: of the buffers, if it is for buffers at these addresses only.

    Returns:
        The function, or None where torch has no fast allocation.
    """
    empty = fast_allocation("cuda")
    if empty is None:
        return None
    numbers = range(len(request.fields))
    board = faults.board_of(request.device)
    scope: dict[str, Any] = {
        "check": check,
        "launches": launches,
        "device": request.device.index,
        "empty": empty,
        "current_device": current_device,
        "current_stream": current_stream,
        "launch_kernel": launch_function(),
        "board": board,
        "words": board.words,
        "raise_pending": faults.raise_pending,
    }
    # A guard does not know addresses, and the copy units depend on their alignment.
    checks: dict[int, list[str]] = {}
    allocating = []
    for k, (field, (size, stride, dtype)) in enumerate(
        zip(request.fields, allocations(request, 0), strict=True)
    ):
        checks.setdefault(field.alignment - 1, []).append(f"s{k}")
        scope |= {f"stride{k}": stride, f"dtype{k}": dtype}
        sizes = "".join(f", {each}" for each in size[1:])
        allocating.append(f"    o{k} = empty((count{sizes},), stride{k}, dtype{k})")
    elsewhere = " or ".join(
        f"({' | '.join(names)}) & {mask}" for mask, names in checks.items() if mask
    )
    if addresses is not None:
        elsewhere = " or ".join(f"s{k} != {address}" for k, address in enumerate(addresses))
    pointers = ", ".join(f"s{k}, o{k}.data_ptr()" for k in KernelRunner.order(request))
    lines = [
        *GUARDED,
        "    if words[0] != board.taken:",
        "        raise_pending(board.device)",
        "    count = indices.numel()",
        "    if count not in launches or current_device() != device:",
        "        return None",
        f"    ({', '.join(f'b{k}' for k in numbers)},) = buffers",
        *(f"    s{k} = b{k}.data_ptr()" for k in numbers),
        *([f"    if {elsewhere}:", "        return None"] if elsewhere else []),
        *in_memory(needs, request.index_dtype.itemsize),
        *allocating,
        "    function, grid, threads, shared_bytes, write, pool, launch = launches[count]",
        "    try:",
        "        block = pool.pop()",
        "    except IndexError:",
        "        block = launch.new_block()",
        "    memory, address, _ = block",
        f"    write(memory, (indices.data_ptr(), {pointers}))",
        "    try:",
        "        launch_kernel(",
        "            function, grid, 1, 1, threads, 1, 1, shared_bytes,",
        "            current_stream(device), address, 0,",
        "        )",
        "    except Exception as error:",
        "        launch.retry(error, block)",
        "    pool.append(block)",
        f"    return ({', '.join(f'o{k}' for k in numbers)},)",
    ]
    exec("\n".join(lines), scope)
    return scope["run"]  # type: ignore[no-any-return]
