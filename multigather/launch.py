"""Launch a compiled GPU function with its parameters by value, the cheapest way there is.

Both kernel backends launch through this: to the driver a CUDA C function and a Triton function are
the same. The way is chosen once: CuPy's binding of the driver call (4 to 6 microseconds on a slow
host), else NVIDIA's cuda.bindings, else ctypes. All three are called alike.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

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


def _stream_function() -> Callable[[int], int]:
    """Address of torch's current stream of a device, by number."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda device: torch.cuda.current_stream(device).cuda_stream)


def _device_function() -> Callable[[], int]:
    """Number of the current device."""
    return getattr(torch._C, "_cuda_getDevice", None) or torch.cuda.current_device


current_stream = _stream_function()
current_device = _device_function()


def fast_allocation() -> Callable[..., torch.Tensor] | None:
    """Torch's allocation without dispatch, ``(size, stride, dtype)`` on the current device.

    It takes exact tuples and costs a third of `torch.empty`, 2.4 against 6.1 microseconds on a slow
    host. Private to torch; None where it is missing.
    """
    try:
        from torch._C._dynamo import guards
    except ImportError:
        return None
    return getattr(guards, "_empty_strided_cuda", None)


class Block(NamedTuple):
    """Memory of one launch's parameters, and the array of their addresses that the driver takes."""

    memory: ctypes.Array[ctypes.c_char]
    address: int
    array: ctypes.Array[ctypes.c_void_p]

    @classmethod
    def of(cls, template: bytes, offsets: Sequence[int]) -> Block:
        """A block with this content, whose parameters start at these offsets."""
        memory = (ctypes.c_char * len(template)).from_buffer(bytearray(template))
        start = ctypes.addressof(memory)
        array = (ctypes.c_void_p * len(offsets))(*(start + offset for offset in offsets))
        return cls(memory, ctypes.addressof(array), array)


class Launch:
    """One launch of which only the pointers are still open.

    The driver copies the parameters while another thread may run, so a call borrows a block of
    memory from the pool and gives it back; two threads never write into the same one.

    Args:
        function: handle of the function, valid on the device.
        grid: number of thread blocks, 1 to 2**31 - 1.
        threads: threads per block.
        shared_bytes: dynamic shared memory.
        device: number of the device.
        parameters: content of a block; its addresses may be anything.
        places: where in a block each address that a call brings goes.
        offsets: where in a block each parameter of the function starts.
        keep: objects that must live as long as the function.
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
    ) -> None:
        self.function = function
        self.grid = grid
        self.threads = threads
        self.shared_bytes = shared_bytes
        self.device = device
        self.places = tuple(places)
        self.pool: list[Block] = []
        # What a call needs, to be unpacked at once.
        self.facts = (function, grid, threads, shared_bytes, self.pool, self)
        self._template = parameters
        self._offsets = tuple(offsets)
        self._keep = keep

    def new_block(self) -> Block:
        """Another block of parameters, its constants in place."""
        return Block.of(self._template, self._offsets)

    def __call__(self, addresses: Sequence[int]) -> None:
        """Launch on torch's current stream of the device."""
        if current_device() != self.device:
            with torch.cuda.device(self.device):
                return self(addresses)
        try:
            block = self.pool.pop()
        except IndexError:
            block = self.new_block()
        for place, address in zip(self.places, addresses, strict=True):
            struct.pack_into("=Q", block.memory, place, address)
        try:
            self._launch(block)
        except Exception as error:
            self.retry(error, block)
        self.pool.append(block)
        return None

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
