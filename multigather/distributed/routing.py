"""Gathers from DTensors, which `multigather.gather` sends here."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from .. import api, dispatch
from ..containers import Buffers
from ..outputs import check_outputs
from ..request import Request
from .agreement import Offer
from .plan import Options, Part, agreed, local_executable, sharding_of
from .sharding import Sharding

# Of each kind, for a mesh. All ranks drop agreements at the same call.
KEPT = 256


class Known:
    """What was made for the DTensors of a mesh.

    Attributes:
        agreements: what its ranks agreed on. The keys are of what all ranks have alike, because
            agreeing is a collective call.
        shardings: what was made of that, by a rank's own memory too.
    """

    def __init__(self) -> None:
        self.agreements: dict[Any, list[Offer]] = {}
        self.shardings: dict[Any, Sharding] = {}


# By the mesh's id, for as long as it lives: a mesh of new process groups may equal an old one.
_known: dict[int, Known] = {}


def _known_of(mesh: DeviceMesh) -> Known:
    if id(mesh) not in _known:
        _known[id(mesh)] = Known()
        weakref.finalize(mesh, _known.pop, id(mesh), None)
    return _known[id(mesh)]


class Parts:
    """The local tensors of a call's DTensors.

    Attributes:
        buffers: of the call.
        tensors: the local tensor of each DTensor.
        sharded: numbers of those whose rows are divided among ranks.
        mesh: the ranks, and its dimension that the rows are divided along; None if none are.

    Args:
        buffers: of the call.
    """

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers
        self.tensors: list[torch.Tensor] = []
        self.sharded: list[int] = []
        self.mesh: tuple[DeviceMesh, int] | None = None
        self.rows = 0
        for number, tensor in enumerate(buffers.tensors):
            if not isinstance(tensor, DTensor):
                raise ValueError(
                    f"buffer {number} is a {type(tensor).__name__} among DTensors; make it one "
                    "with DTensor.from_local(..., [Replicate()]), or gather it by a call of its own"
                )
            place = _sharded_dim(tensor, number)
            if place is not None:
                mesh = tensor.device_mesh, place
                if self.mesh is not None and (mesh != self.mesh or len(tensor) != self.rows):
                    raise ValueError(
                        f"buffer {number} has {len(tensor)} rows on {mesh[0]}, dimension {place}; "
                        f"the DTensors before it that are sharded have {self.rows} on "
                        f"{self.mesh[0]}, dimension {self.mesh[1]}. Gather it by a call of its own"
                    )
                self.mesh, self.rows = mesh, len(tensor)
                self.sharded.append(number)
            self.tensors.append(tensor.to_local())

    def only(self, sharded: bool) -> tuple[torch.Tensor | None, ...]:
        """One item per tensor: its local tensor if it is of the wanted kind, else None.

        The places of the others keep the names that errors have for buffers.
        """
        return tuple(
            tensor if (number in self.sharded) == sharded else None
            for number, tensor in enumerate(self.tensors)
        )


def _sharded_dim(tensor: DTensor, number: int) -> int | None:
    """The mesh dimension that rows are divided along; None where every rank has all."""
    found = None
    for dim, placement in enumerate(tensor.placements):
        if type(placement) is Shard and placement.dim == 0 and found is None:
            found = dim
        elif type(placement) is not Replicate:
            raise ValueError(
                f"buffer {number} is a DTensor placed {tensor.placements}; rows can be gathered "
                "from Replicate, and from Shard(0) along one dimension of the mesh. Redistribute "
                "it, or gather its .to_local()"
            )
    return found


def gather(
    indices: Any, buffers: Buffers, out: Sequence[Any] | None, bounds: str, backend: str | None
) -> tuple[Any, ...]:
    """`multigather.gather` from DTensors; every rank of the mesh makes the call.

    Args:
        indices: this rank's own, global row numbers.
        buffers: DTensors, None, and containers of them.
        out: plain tensors.
        bounds: as for `multigather.gather`.
        backend: as for `multigather.gather`.

    Returns:
        This rank's rows, as plain tensors in the structure of ``buffers``.

    Raises:
        ValueError: a placement, or a mixture of them, that no rows can be gathered from.
        TypeError, IndexError, UnsupportedError: as `multigather.gather`.
    """
    parts = Parts(buffers)
    if isinstance(indices, DTensor):
        if any(type(placement) is not Replicate for placement in indices.placements):
            raise ValueError(
                f"indices are a DTensor placed {indices.placements}; pass each rank its own, such "
                "as their .to_local()"
            )
        indices = indices.to_local()
    results: list[torch.Tensor | None] = [None] * len(parts.tensors)
    outs: list[torch.Tensor | None] = [None] * len(parts.tensors)
    own = [parts.tensors[number] for number in parts.sharded]

    def take_outputs(tensor: torch.Tensor, request: Request) -> list[torch.Tensor] | None:
        if out is None:
            return None
        outs[:] = api.flatten_outputs(out, buffers)
        chosen = [outs[number] for number in parts.sharded]
        check_outputs(chosen, own, tensor, request, sharding.labels)  # type: ignore[arg-type]
        return chosen  # type: ignore[return-value]

    if parts.mesh is not None:
        sharding = _sharding(parts, bounds, backend)
        for number, result in zip(
            parts.sharded, sharding(indices, own, take_outputs)[0], strict=True
        ):
            results[number] = result
    elif out is not None:
        outs[:] = api.flatten_outputs(out, buffers)
    replicated = parts.only(sharded=False)
    if any(each is not None for each in replicated):
        into = None
        if out is not None:
            into = [None if buf is None else outs[k] for k, buf in enumerate(replicated)]
        found = api.gather(indices, *replicated, out=into, bounds=bounds, backend=backend)
        results = [
            mine if each is None else each for mine, each in zip(results, found, strict=True)
        ]
    if out is not None:
        return tuple(out)
    return buffers.mirrored(results, indices.shape)  # type: ignore[arg-type]


def explain(buffers: Buffers, bounds: str, backend: str | None) -> dispatch.Explanation:
    """`multigather.explain` for DTensors; like a gather a call that every rank makes."""
    parts = Parts(buffers)
    kind = parts.mesh is not None
    chosen = parts.only(sharded=kind)
    local = local_executable(Buffers(chosen), bounds, backend)
    found = dispatch.explain(local.request, backend, local.site)
    text = "  every rank has all rows"
    if kind:
        text = "  " + _sharding(parts, bounds, backend).explain().replace("\n", "\n  ")
    return dataclasses.replace(found, request=f"{text}\n  own rows:\n{found.request}")


def _sharding(parts: Parts, bounds: str, backend: str | None) -> Sharding:
    """The gather of the sharded tensors, made where there is none yet."""
    assert parts.mesh is not None
    mesh, dim = parts.mesh
    group = mesh.get_group(dim)
    options = Options(bounds)
    chosen = parts.only(sharded=True)
    fields = [(each.dtype, each.shape[1:]) for each in chosen if each is not None]
    key = (dim, bounds, backend, parts.rows, tuple(fields))
    known = _known_of(mesh)
    agreements, shardings = known.agreements, known.shardings
    offers = agreements.get(key)

    def own_part() -> Part:
        return Part(local_executable(Buffers(chosen), bounds, backend))

    if offers is None:
        part, offers = agreed(group, own_part, options)
        if len(agreements) >= KEPT:
            agreements.clear()
        agreements[key] = offers
    else:
        part = own_part()
    own_key = (key, tuple(offers), part.local.request, part.local.site.labels)
    if own_key not in shardings:
        if len(shardings) >= KEPT:
            shardings.clear()
        shardings[own_key] = sharding_of(group, offers, part, options, backend)
    return shardings[own_key]
