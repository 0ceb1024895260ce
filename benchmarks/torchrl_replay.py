"""Time `ReplayBuffer.sample` with TorchRL's storage and with multigather's, in one process.

Two buffers of random values: transitions of a humanoid agent ("replay"), and stacked frames of a
video game, now and next ("frames"). Before any time is taken, batches of both storages are compared
bit for bit, from the same seed. Times are of interleaved rounds. Prints one JSON object.

    python benchmarks/torchrl_replay.py --device cpu --batch-size 256 --keep-memory

On a CPU a batch of frames is 14 MB of new memory. glibc may hand it back to the system after every
batch, as it happens to lie, and then the page faults of the next one take 10 ms whatever reads the
rows. ``--keep-memory`` tells it not to, for both storages, as MALLOC_TRIM_THRESHOLD_=1073741824 and
MALLOC_MMAP_THRESHOLD_=33554432 in the environment do.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import time
from collections.abc import Callable
from importlib import metadata

os.environ.setdefault("RL_LOGGING_LEVEL", "ERROR")  # before torchrl reads it

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage as TorchrlStorage
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

import multigather
from multigather.benchmark.timing import rounds_of
from multigather.integrations.torchrl import LazyTensorStorage

STORAGES = {"multigather": LazyTensorStorage, "torchrl": TorchrlStorage}


def keep_memory() -> bool:
    """Tell glibc to keep freed memory; return whether it agreed."""
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD in malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(trim_threshold, 1 << 30) and mallopt(mmap_threshold, 1 << 25))


def transitions(workload: str, rows: int, seed: int) -> TensorDict:
    """Random transitions on the CPU, as a collector of TorchRL lays them out."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(rows, *shape, generator=generator)

    def frames() -> torch.Tensor:
        shape = (rows, 4, 84, 84)
        return torch.randint(256, shape, dtype=torch.uint8, generator=generator)

    observation = frames if workload == "frames" else (lambda: numbers(376))
    if workload == "frames":
        action = torch.randint(18, (rows,), generator=generator)
    else:
        action = numbers(17)
    following = TensorDict(
        {
            "observation": observation(),
            "reward": numbers(),
            "done": torch.rand(rows, generator=generator) < 0.01,
        },
        batch_size=[rows],
    )
    steps = torch.arange(rows)
    fields = {"observation": observation(), "action": action, "next": following, "step": steps}
    return TensorDict(fields, batch_size=[rows])


def assert_equal(one: TensorDict, other: TensorDict) -> int:
    """Compare every tensor as bytes; return how many there are."""
    keys = sorted(one.keys(True, True), key=str)
    assert keys == sorted(other.keys(True, True), key=str)
    assert one.batch_size == other.batch_size
    for key in keys:
        a, b = one[key], other[key]
        assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device), key
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), key
    return len(keys)


def measure(
    workload: str, rows: int, batch: int, device: torch.device, rounds: int
) -> dict[str, object]:
    """Compare, then time; see the module's docstring."""
    data = transitions(workload, rows, 0)
    calls: dict[str, Callable[[], object]] = {}
    sampled: dict[str, list[TensorDict]] = {}
    for kind, buffer_class in (
        ("ReplayBuffer", ReplayBuffer),
        ("TensorDictReplayBuffer", TensorDictReplayBuffer),
    ):
        for name, storage in STORAGES.items():
            buffer = buffer_class(storage=storage(rows, device=device), batch_size=batch)
            buffer.extend(data)
            torch.manual_seed(0)
            sampled[name] = [buffer.sample() for _ in range(5)]
            calls[f"{kind}, {name}"] = buffer.sample
        tensors = sum(
            assert_equal(*pair)
            for pair in zip(sampled["torchrl"], sampled["multigather"], strict=True)
        )
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        multigather.check()

    def once(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    def timer(call: Callable[[], object]) -> Callable[[], float]:
        for _ in range(3):
            once(call)
        repeats = max(1, int(0.02 / once(call)))
        return lambda: statistics.median(once(call) for _ in range(repeats)) * 1e6

    times = rounds_of({name: timer(call) for name, call in calls.items()}, rounds)
    medians = {name: statistics.median(each) for name, each in times.items()}
    return {
        "workload": workload,
        "rows": rows,
        "batch": batch,
        "bytes_per_row": sum(leaf[0].nbytes for leaf in data.values(True, True)),
        "equal_tensors": tensors,
        "median_us": {name: round(value, 1) for name, value in medians.items()},
        "least_us": {name: round(min(each), 1) for name, each in times.items()},
        "speedup": {
            kind: round(medians[f"{kind}, torchrl"] / medians[f"{kind}, multigather"], 2)
            for kind in ("ReplayBuffer", "TensorDictReplayBuffer")
        },
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--rows", type=int, help="of the buffers; by default 100000 and 4000")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, help="of torch on the CPU")
    parser.add_argument("--keep-memory", action="store_true", help="see above; Linux only")
    parser.add_argument("--workload", choices=("replay", "frames"), action="append")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    rows = {"replay": args.rows or 100_000, "frames": args.rows or 4000}
    report = {
        "keeps_memory": args.keep_memory and keep_memory(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "torchrl": metadata.version("torchrl"),
        "workloads": [
            measure(name, rows[name], args.batch_size, device, args.rounds)
            for name in args.workload or ("replay", "frames")
        ],
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
