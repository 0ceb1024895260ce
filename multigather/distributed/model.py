"""What a sharded gather costs: bytes, messages and seconds for 2 to 1024 ranks, and a simulator.

    python -m multigather.distributed.model

prints the tables of ``docs/distributed.md``. The formulae count what a rank sends, receives and
copies in a call; `simulate` draws indices for every rank and counts the same.

A call's seconds are, with W ranks, H of them on a host, n indices per rank which ask for a rows (n,
or the different ones), and rows of s bytes:

- exchange: ``3 (latency + step + (W-1) message) + n index + 4 a s / memory + way``, where ``way =
  max(inside, outside)``, ``inside = b (H-1)/W / link``, ``outside = b (W-H)/W / network`` and b is
  what the busiest rank receives or serves, ``(s + 4) max(a, served)``. The 4 copies: read and
  written when packed, and when unpacked. If repeated rows are sent once, ``repeats`` is added. With
  a capacity there are 2 collectives in place of 3.
- an all-to-all per buffer: the same with ``2 + buffers`` collectives, each row sent as often as it
  is asked for.
- peer reads: ``launch + n s (W-1)/W / link + 2 n s / memory``, on one host.

``step`` and ``repeats`` are what a GPU's host takes to prepare and launch, the larger part of a
small call. They are added although the host works ahead while the GPU copies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

INDEX_BYTES = 4
PATTERNS = ("uniform", "zipf")


@dataclass(frozen=True)
class Load:
    """A call.

    Attributes:
        ranks: of the group.
        rows: of all ranks.
        indices: of each rank.
        row_bytes: of all buffers together.
        buffers: how many.
        pattern: "uniform", or "zipf", Zipf's law of exponent 1: the i-th most popular row has the
            share ``log((i + 1) / i) / log(rows + 1)``; popular rows lie anywhere.
    """

    ranks: int
    rows: int
    indices: int
    row_bytes: int
    buffers: int
    pattern: str = "uniform"


@dataclass(frozen=True)
class Machine:
    """Speeds, in seconds and bytes per second.

    Attributes:
        per_host: ranks of a host.
        latency: of a collective, whatever it sends.
        message: of each message that a rank sends in a collective.
        link: bandwidth of a rank to the others of its host.
        network: bandwidth of a rank to other hosts.
        memory: rate of copies in a rank's memory, read and written bytes together.
        index: sorting, counting and placing of one index.
        launch: of a gather alone.
        step: the host's work for each collective of a call, beside the collective itself.
        repeats: the host's work of finding repeated rows, however many indices there are.
    """

    per_host: int
    latency: float
    message: float
    link: float
    network: float
    memory: float
    index: float
    launch: float
    step: float = 0.0
    repeats: float = 0.0


# Measured between two GPUs of a host (benchmarks/nvidia-h200-2.json): a bare all-to-all, random
# rows by NVLink, gathers of own rows, a decode step's peer reads, and what is left of the calls. An
# index costs too little to be seen. From data sheets: a network card of 400 Gb/s per GPU. Assumed:
# 1 us for each message.
H200_HOSTS = Machine(
    per_host=8,
    latency=37e-6,
    message=1e-6,
    link=328e9,
    network=45e9,
    memory=3e12,
    index=0.0,
    launch=19e-6,
    step=130e-6,
    repeats=800e-6,
)


@dataclass(frozen=True)
class Traffic:
    """What a call moves.

    Attributes:
        asked: rows that a rank asks for.
        served: rows that the busiest rank is asked for.
        messages: that a rank sends in each all-to-all.
        sent_bytes: row numbers and rows that the busiest rank sends to others.
    """

    asked: float
    served: float
    messages: float
    sent_bytes: float


def popularity(load: Load) -> list[tuple[float, float]]:
    """How many rows have which share of the indices; like ones are put together."""
    if load.pattern == "uniform":
        return [(load.rows, 1 / load.rows)]
    total = math.log(load.rows + 1)
    result: list[tuple[float, float]] = []
    first = 1
    while first <= load.rows:
        # One by one at first, then in groups of 2 %.
        last = min(load.rows, first + first // 50)
        number = last - first + 1
        result.append((number, math.log((last + 1) / first) / total / number))
        first = last + 1
    return result


def different(load: Load) -> float:
    """Rows that a rank's indices name at least once, on average."""
    return sum(
        number * -math.expm1(load.indices * math.log1p(-share)) if share < 1 else number
        for number, share in popularity(load)
    )


def hot_share(load: Load, rows: int) -> float:
    """Share of the indices that the most popular ``rows`` take."""
    taken = 0.0
    for number, share in popularity(load):
        part = min(number, rows)
        taken += part * share
        rows -= int(part)
        if rows <= 0:
            break
    return taken


def traffic(load: Load, deduplicate: bool) -> Traffic:
    """What a call is expected to move."""
    asked = different(load) if deduplicate else float(load.indices)
    hottest = popularity(load)[0][1]
    # Each rank asks for the hottest row once at most, or as often as it wants it.
    extra = 1.0 if deduplicate else load.indices * hottest
    served = asked + (load.ranks - 1) * extra * (hottest * load.rows > 1)
    remote = (load.ranks - 1) / load.ranks
    sent = remote * (INDEX_BYTES * asked + load.row_bytes * max(served, asked))
    return Traffic(asked, served, load.ranks - 1, sent)


def exchange_seconds(
    load: Load, machine: Machine, deduplicate: bool = True, collectives: int = 3
) -> float:
    """Seconds of a call by exchange; with a capacity there are 2 collectives."""
    moved = traffic(load, deduplicate)
    bytes_ = (load.row_bytes + INDEX_BYTES) * max(moved.asked, moved.served)
    return (
        collectives * (machine.latency + machine.step + (load.ranks - 1) * machine.message)
        + load.indices * machine.index
        + (machine.repeats if deduplicate else 0.0)
        + 4 * moved.asked * load.row_bytes / machine.memory
        + _on_the_way(bytes_, load.ranks, machine)
    )


def per_buffer_seconds(load: Load, machine: Machine) -> float:
    """Seconds of a call with an all-to-all for each buffer."""
    return exchange_seconds(load, machine, False, 2 + load.buffers)


def peer_seconds(load: Load, machine: Machine) -> float:
    """Seconds of a call that reads rows from peers; infinite for several hosts."""
    if load.ranks > machine.per_host:
        return math.inf
    size = load.indices * load.row_bytes
    remote = (load.ranks - 1) / load.ranks
    return machine.launch + size * remote / machine.link + 2 * size / machine.memory


def _on_the_way(size: float, ranks: int, machine: Machine) -> float:
    together = min(ranks, machine.per_host)
    inside = size * (together - 1) / ranks / machine.link
    outside = size * (ranks - together) / ranks / machine.network
    return max(inside, outside)


def draw(load: Load, generator: torch.Generator) -> torch.Tensor:
    """A rank's indices."""
    if load.pattern == "uniform":
        return torch.randint(load.rows, (load.indices,), device="cpu", generator=generator)
    uniform = torch.rand(load.indices, dtype=torch.float64, device="cpu", generator=generator)
    order = ((load.rows + 1) ** uniform).long().clamp_(1, load.rows) - 1
    # Steps of the golden section spread the popular rows; without a common divisor they reach all.
    stride = int(load.rows * 0.618) | 1
    while math.gcd(stride, load.rows) > 1:
        stride += 2
    return order * stride % load.rows


def simulate(load: Load, deduplicate: bool, seed: int = 0) -> Traffic:
    """What a call moves with indices drawn for every rank."""
    generator = torch.Generator().manual_seed(seed)
    per_rank = -(-load.rows // load.ranks)
    served = torch.zeros(load.ranks, dtype=torch.int64, device="cpu")
    asked = messages = 0
    sent = torch.zeros(load.ranks, dtype=torch.int64, device="cpu")
    for rank in range(load.ranks):
        indices = draw(load, generator)
        if deduplicate:
            indices = torch.unique(indices)
        counts = torch.bincount(indices // per_rank, minlength=load.ranks)
        asked += len(indices)
        served += counts
        others = counts.clone()
        others[rank] = 0
        messages += int((others > 0).sum())
        sent += load.row_bytes * others
        sent[rank] += INDEX_BYTES * int(others.sum())
    return Traffic(
        asked / load.ranks, float(served.max()), messages / load.ranks, float(sent.max())
    )


def fitted(all_to_all_us: Mapping[str, float], ranks: int, memory: float, index: float) -> Machine:
    """A machine of one host by its measured all-to-alls, as benchmarks/distributed.py prints them.

    Args:
        all_to_all_us: microseconds by the bytes from each rank to each.
        ranks: of the group.
        memory: see `Machine`.
        index: see `Machine`.
    """
    times = {int(size): us * 1e-6 for size, us in all_to_all_us.items()}
    least, most = min(times), max(times)
    link = (ranks - 1) * (most - least) / max(times[most] - times[least], 1e-9)
    return Machine(ranks, times[least], 0.0, link, link, memory, index, 0.0)


def tables() -> str:
    """The tables of the documentation, in Markdown."""
    lines = [
        "| ranks | indices | per buffer, ms | exchange, ms | deduplicated, ms | peer reads, ms | "
        "different rows |",
        "|---|---|---|---|---|---|---|",
    ]
    features = Load(2, 4_000_000, 200_000, 672, 4)
    for ranks in (2, 8, 64, 256, 1024):
        for pattern in PATTERNS:
            load = replace(features, ranks=ranks, rows=4_000_000 * ranks, pattern=pattern)
            peer = peer_seconds(load, H200_HOSTS)
            lines.append(
                f"| {ranks} | {pattern} "
                f"| {1e3 * per_buffer_seconds(load, H200_HOSTS):.2f} "
                f"| {1e3 * exchange_seconds(load, H200_HOSTS, False):.2f} "
                f"| {1e3 * exchange_seconds(load, H200_HOSTS, True):.2f} "
                f"| {f'{1e3 * peer:.2f}' if math.isfinite(peer) else '-'} "
                f"| {different(load) / load.indices:.0%} |"
            )
    lines += [
        "",
        "| rows on every rank | share of indices | memory of each rank |",
        "|---|---|---|",
    ]
    load = replace(features, ranks=64, rows=256_000_000, pattern="zipf")
    for hot in (1_000, 10_000, 100_000, 1_000_000):
        lines.append(
            f"| {hot:,} | {hot_share(load, hot):.0%} | {hot * load.row_bytes / 2**20:,.0f} MiB |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables())
