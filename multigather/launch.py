"""Launch a compiled GPU function with its parameters by value, the cheapest way there is.

Both kernel backends launch through this: to the driver a CUDA C function and a Triton function are
the same. A repeated call launches from the compiled extension `_native`, where that was built; it
calls the driver by address. Every other launch, and every one without the extension, goes through
the first of these that is there: CuPy's binding of the driver call (4 to 6 microseconds on a slow
host), NVIDIA's cuda.bindings, ctypes. These three are called alike.
"""

from __future__ import annotations

import array
import ctypes
import functools
import itertools
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from . import native
from .fork import cached_property

# function, grid x, y, z, block x, y, z, shared bytes, stream, address of parameters, 0
LaunchFunction = Callable[..., Any]


class LaunchError(RuntimeError):
    """The driver refused a launch; the message has its name for the error."""


def _from_cupy() -> LaunchFunction:
    from cupy.cuda import driver

    return driver.launchKernel  # type: ignore[no-any-return]


def _from_bindings() -> LaunchFunction:
    from cuda.bindings import driver

    call, stream_of, function_of = driver.cuLaunchKernel, driver.CUstream, driver.CUfunction

    def launch(function: int, *arguments: int) -> None:
        sizes, stream, rest = arguments[:7], arguments[7], arguments[8:]
        (result,) = call(function_of(function), *sizes, stream_of(stream), *rest)
        if result:
            raise LaunchError(f"cuLaunchKernel: {result.name}")

    return launch


def _from_ctypes() -> LaunchFunction:
    library = ctypes.CDLL("libcuda.so.1")
    call = library.cuLaunchKernel
    call.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]

    def launch(*arguments: int) -> None:
        result = call(*arguments)
        if result:
            name = ctypes.c_char_p()
            library.cuGetErrorName(result, ctypes.byref(name))
            raise LaunchError(f"cuLaunchKernel: {(name.value or b'error').decode()} ({result})")

    return launch


LADDER = (_from_cupy, _from_bindings, _from_ctypes)


@functools.cache
def launch_function() -> LaunchFunction:
    """The first rung of the ladder that this machine has.

    Raises:
        LaunchError: there is no CUDA driver.
    """
    for rung in LADDER:
        try:
            return rung()
        except (ImportError, OSError, AttributeError):
            continue
    raise LaunchError("no way to launch: neither CuPy, cuda.bindings nor libcuda.so.1 is there")


@functools.cache
def driver_address() -> int:
    """Address of the driver's ``cuLaunchKernel``, 0 without a CUDA driver."""
    try:
        function = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _stream_function() -> Callable[[int], int]:
    """Address of torch's current stream of a device, by number."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda device: torch.cuda.current_stream(device).cuda_stream)


def _device_function() -> Callable[[], int]:
    """Number of the current device."""
    return getattr(torch._C, "_cuda_getDevice", None) or torch.cuda.current_device


current_stream = _stream_function()
current_device = _device_function()


def fast_allocation(device: str) -> Callable[..., torch.Tensor] | None:
    """Torch's allocation without dispatch, ``(size, stride, dtype)``; on the current GPU or a CPU.

    It takes exact tuples and on a GPU costs a third of `torch.empty`, 2.4 against 6.1 microseconds
    on a slow host. Private to torch; None where it is missing.

    Args:
        device: "cuda" or "cpu".
    """
    try:
        from torch._C._dynamo import guards
    except ImportError:
        return None
    return getattr(guards, f"_empty_strided_{device}", None)


class Block(NamedTuple):
    """Memory of one launch's parameters, and the array of their addresses that the driver takes."""

    memory: array.array[int]
    address: int
    addresses: ctypes.Array[ctypes.c_void_p]

    @classmethod
    def of(cls, parameters: bytes, offsets: Sequence[int]) -> Block:
        """A block with this content, whose parameters start at these offsets."""
        memory = array.array("Q", parameters)
        start, _ = memory.buffer_info()
        addresses = (ctypes.c_void_p * len(offsets))(*(start + offset for offset in offsets))
        return cls(memory, ctypes.addressof(addresses), addresses)


@functools.cache
def writer(places: tuple[int, ...]) -> Callable[[array.array[int], Sequence[int]], None]:
    """A function that writes addresses to these places of a block's memory.

    It is generated as one assignment: 0.4 microseconds for nine addresses, against 1.1 in a loop,
    and 0.3 for packing them where they follow one another.
    """
    targets = "".join(f"memory[{place // 8}], " for place in places)
    scope: dict[str, Any] = {}
    exec(f"def write(memory, addresses):\n    {targets} = addresses", scope)
    return scope["write"]  # type: ignore[no-any-return]


class Scale(NamedTuple):
    """How a launch depends on the number of indices, so that it is made once for a range of them.

    Attributes:
        least: number of indices that it is for, at least.
        most: and at most.
        count_place: where in a block the number is, as 64 bits.
        starts_place: where the number of the first thread block of each term is, as 32 bits one
            after the other; `NOWHERE` if the kernel does not ask.
        terms: what the grid is the sum of: ``-(-count * parts // tile) * chunks`` for each
            ``(parts, tile, chunks)``.
    """

    least: int
    most: int
    count_place: int
    starts_place: int
    terms: tuple[tuple[int, int, int], ...]


NOWHERE = 2**64 - 1


class Launch:
    """One launch of which only the addresses are still open.

    The driver copies the parameters while another thread may run, so a call borrows a block of
    memory from the pool and gives it back; two threads never write into the same one.

    Args:
        function: handle of the function, valid on the device.
        grid: number of thread blocks, 1 to 2**31 - 1.
        threads: threads per block.
        shared_bytes: dynamic shared memory.
        device: number of the device.
        parameters: content of a block, a multiple of 8 bytes; its addresses may be anything.
        places: where in a block each address that a call brings goes, multiples of 8.
        offsets: where in a block each parameter of the function starts.
        keep: objects that must live as long as the function.
        scale: how to make the same launch for another number of indices, if that is known.
    """

    def __init__(
        self,
        function: int,
        grid: int,
        threads: int,
        shared_bytes: int,
        device: int,
        parameters: bytes,
        places: Sequence[int],
        offsets: Sequence[int],
        keep: Any = None,
        scale: Scale | None = None,
    ) -> None:
        self.scale = scale
        self.function = function
        self.grid = grid
        self.threads = threads
        self.shared_bytes = shared_bytes
        self.device = device
        self.parameters = parameters
        self.places = tuple(places)
        self.offsets = tuple(offsets)
        self.write = writer(self.places)
        self.pool: list[Block] = []
        # What a call needs, to be unpacked at once.
        self.facts = (function, grid, threads, shared_bytes, self.write, self.pool, self)
        self._keep = keep

    def at(self, count: int) -> Launch:
        """The launch for another number of indices within the scale's range."""
        assert self.scale is not None
        parameters = bytearray(self.parameters)
        _, _, count_place, starts_place, terms = self.scale
        struct.pack_into("=q", parameters, count_place, count)
        tiles = [-(-count * parts // tile) * chunks for parts, tile, chunks in terms]
        if starts_place != NOWHERE:
            starts = itertools.accumulate(tiles[:-1], initial=0)
            struct.pack_into(f"={len(tiles)}I", parameters, starts_place, *starts)
        return Launch(
            self.function,
            sum(tiles),
            self.threads,
            self.shared_bytes,
            self.device,
            bytes(parameters),
            self.places,
            self.offsets,
            self._keep,
            self.scale,
        )

    def new_block(self) -> Block:
        """Another block of parameters, its constants in place."""
        return Block.of(self.parameters, self.offsets)

    def __call__(self, addresses: Sequence[int], count: int | None = None) -> None:
        """Launch on torch's current stream of the device, for another count if one is given."""
        if count is not None:
            return self.at(count)(addresses)
        if current_device() != self.device:
            with torch.cuda.device(self.device):
                return self(addresses)
        try:
            block = self.pool.pop()
        except IndexError:
            block = self.new_block()
        self.write(block.memory, addresses)
        try:
            self._launch(block)
        except Exception as error:
            self.retry(error, block)
        self.pool.append(block)
        return None

    @cached_property
    def native(self) -> Any:
        """The same launch for `_native`; what its driver call refuses comes here instead."""
        assert native.extension is not None
        return native.extension.Launch(
            driver_address(),
            self.function,
            self.grid,
            self.threads,
            self.shared_bytes,
            self.device,
            current_stream,
            self.parameters,
            self.places,
            self.offsets,
            self,
            self.scale
            and (*self.scale[:4], [number for term in self.scale.terms for number in term]),
        )

    def _launch(self, block: Block) -> None:
        launch_function()(
            self.function, self.grid, 1, 1, self.threads, 1, 1,
            self.shared_bytes, current_stream(self.device), block.address, 0,
        )  # fmt: skip

    def retry(self, error: Exception, block: Block) -> None:
        """Launch again if only the thread's context was missing, else raise the error.

        A new thread has no current context until it makes a call of the CUDA runtime; torch's
        cached allocations make none.
        """
        if "INVALID_CONTEXT" not in str(error):
            raise error
        torch.cuda.mem_get_info(self.device)
        self._launch(block)
