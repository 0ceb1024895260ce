"""What the ranks of a group tell one another when a plan is made, and how collectives can fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class Offer:
    """What one rank brings to a plan.

    Attributes:
        rows: its own rows.
        fields: name, dtype and row shape of each of its buffers.
        device: their device's type.
        options: name and value of each option that must be the same on all ranks.
        symmetric: whether its buffers lie in memory that the others can read.
        error: what kept it from taking part; the rest then means nothing.
    """

    rows: int = 0
    fields: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    device: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    symmetric: bool = False
    error: str | None = None


def agree(group: dist.ProcessGroup, offer: Offer) -> list[Offer]:
    """Every rank's offer, in the order of ranks; one collective.

    Raises:
        ValueError: the offers do not go together, or a rank cannot take part; raised on all ranks,
            with the same text.
    """
    offers: list[Any] = [None] * group.size()
    with named("agreeing on the buffers (all_gather_object)", group):
        dist.all_gather_object(offers, offer, group=group)
    failed = [f"rank {rank}: {each.error}" for rank, each in enumerate(offers) if each.error]
    if failed:
        raise ValueError("\n  ".join(("no plan was made, because of", *failed)))
    found = differences(offers)
    if found:
        raise ValueError("\n  ".join(("the ranks do not bring the same buffers:", *found)))
    return offers


def differences(offers: Sequence[Offer]) -> list[str]:
    """In which rank differs from rank 0, and how; a line for each difference."""
    lines = []
    first = offers[0]
    for rank, offer in enumerate(offers):
        if len(offer.fields) != len(first.fields):
            lines.append(
                f"rank {rank} has {len(offer.fields)} buffers, rank 0 has {len(first.fields)}"
            )
        else:
            lines += [
                f"rank {rank} has {_text(ours)}, rank 0 has {_text(theirs)}"
                for ours, theirs in zip(offer.fields, first.fields, strict=True)
                if ours != theirs
            ]
        if offer.device != first.device:
            lines.append(f"rank {rank} has buffers on {offer.device}, rank 0 on {first.device}")
        lines += [
            f"rank {rank} has {name}={ours!r}, rank 0 has {name}={theirs!r}"
            for (name, ours), (_, theirs) in zip(offer.options, first.options, strict=True)
            if ours != theirs
        ]
    return lines


def _text(field: tuple[str, str, tuple[int, ...]]) -> str:
    label, dtype, row_shape = field
    return f"{label} {dtype} [rows{''.join(f', {size}' for size in row_shape)}]"


@contextmanager
def named(operation: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Say which operation it was if a collective in this block fails.

    Raises:
        torch.distributed.DistError: in place of what the collective raised, which is its cause.
    """
    try:
        yield
    except RuntimeError as error:
        raise dist.DistError(
            f"multigather.distributed failed while {operation}, on rank {group.rank()} of "
            f"{group.size()}: another rank died, or did not make the same call within the group's "
            f"time-out. torch.distributed says: {error}"
        ) from error
