"""Gathers in CUDA graphs: many replays, first use in a capture, shared pools, torch.compile."""

from __future__ import annotations

import pytest
import torch
from cases import Slab, run_program
from conftest import HAVE_GPU, Target

import multigather

TARGET_DEVICES = ("cuda",)  # read by conftest.py
BACKENDS = ("torch", "triton", "cupy")
needs_gpu = pytest.mark.skipif(not HAVE_GPU, reason="torch sees no CUDA device")


def buffers_of(device: str = "cuda") -> list[torch.Tensor]:
    """Whole numbers, so that what a replay must give can be computed exactly."""
    return [
        torch.arange(50, device=device)[:, None].expand(50, 7).contiguous(),
        torch.arange(50, device=device, dtype=torch.float32),
        torch.arange(50, device=device, dtype=torch.uint8)[:, None].expand(50, 33).contiguous(),
    ]


def test_a_thousand_replays(target: Target) -> None:
    """Every replay sees new indices and new sources, and writes the outputs anew."""
    buffers = buffers_of()
    indices = torch.zeros(16, dtype=torch.int64, device="cuda")
    outs = [torch.empty(16, *b.shape[1:], dtype=b.dtype, device="cuda") for b in buffers]
    for _ in range(2):
        multigather.gather(indices, *buffers, backend=target.backend)
        multigather.gather(indices, *buffers, out=outs, backend=target.backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = multigather.gather(indices, *buffers, backend=target.backend)
        multigather.gather(indices, *buffers, out=outs, backend=target.backend)
    generator = torch.Generator("cuda").manual_seed(0)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    first = torch.arange(50, device="cuda")
    for turn in range(1000):
        indices.copy_(torch.randint(-50, 50, (16,), device="cuda", generator=generator))
        # The content of row r is r + turn, modulo what a byte can hold.
        values = (first + turn) % 200
        for buffer in buffers:
            buffer.copy_(values.view(-1, *[1] * (buffer.dim() - 1)).expand_as(buffer))
        for out in (*made, *outs):
            out.fill_(201)
        graph.replay()
        wanted = (torch.where(indices < 0, indices + 50, indices) + turn) % 200
        for out in (*made, *outs):
            wrong += (out != wanted.view(-1, *[1] * (out.dim() - 1))).any()
    assert int(wrong) == 0
    multigather.check()


def test_graphs_that_share_a_pool(target: Target) -> None:
    """Two graphs in one pool, replayed in the order of their capture, and gathers between them."""
    buffers = buffers_of()
    indices = torch.zeros(16, dtype=torch.int64, device="cuda")
    multigather.gather(indices, *buffers, backend=target.backend)
    multigather.gather(indices[:5], *buffers, backend=target.backend)
    torch.cuda.synchronize()
    pool = torch.cuda.graph_pool_handle()
    graphs, made = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph, count in zip(graphs, (16, 5), strict=True):
        with torch.cuda.graph(graph, pool=pool):
            made.append(multigather.gather(indices[:count], *buffers, backend=target.backend))
    for turn in range(50):
        indices.copy_((torch.arange(16, device="cuda") * 3 + turn) % 50)
        for graph in graphs:
            graph.replay()
        between = multigather.gather(indices, *buffers, backend=target.backend)
        for outputs in (*made, between):
            for out, buffer in zip(outputs, buffers, strict=True):
                assert torch.equal(out, buffer[indices[: len(out)]])
    multigather.check()


def test_a_refusal_leaves_the_capture_usable(target: Target) -> None:
    """Wrong arguments in a capture raise what they raise elsewhere, and the capture goes on."""
    buffers = buffers_of()
    indices = torch.arange(5, device="cuda")
    multigather.gather(indices, *buffers, backend=target.backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(TypeError, match="integer dtype"):
            multigather.gather(indices.float(), *buffers, backend=target.backend)
        with pytest.raises(ValueError, match="never resized"):
            multigather.gather(indices, *buffers, out=[*buffers], backend=target.backend)
        with pytest.raises(ValueError, match="one device"):
            multigather.gather(indices, *buffers, torch.zeros(3), backend=target.backend)
        with pytest.raises(IndexError, match="has 0 rows"):
            multigather.gather(indices, buffers[0][:0], backend=target.backend)
        with pytest.raises(RuntimeError, match="captured"):
            multigather.check()
        made = multigather.gather(indices, *buffers, backend=target.backend)
    indices.add_(7)
    graph.replay()
    torch.cuda.synchronize()
    for out, buffer in zip(made, buffers, strict=True):
        assert torch.equal(out, buffer[indices])


def test_indices_of_the_host_in_a_capture(target: Target) -> None:
    """Pinned ones are copied by every replay; others, which a capture cannot copy, are refused."""
    buffers = buffers_of()
    pinned = torch.arange(5).pin_memory()
    multigather.gather(pinned, *buffers, backend=target.backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="pin"):
            multigather.gather(torch.arange(5), *buffers, backend=target.backend)
        made = multigather.gather(pinned, *buffers, backend=target.backend)
    for first in (3, 20, 45):
        torch.cuda.synchronize()
        pinned.copy_(torch.arange(first, first + 5))
        graph.replay()
        torch.cuda.synchronize()
        for out, buffer in zip(made, buffers, strict=True):
            assert torch.equal(out, buffer[first : first + 5])


def test_outputs_that_are_slices_in_a_graph(target: Target) -> None:
    """What stands beside the outputs is not written by any replay."""
    slab = Slab(20, (9,), torch.int16, "cuda", seed=1)
    out = Slab(6, (9,), torch.int16, "cuda", gap=6)
    indices = torch.zeros(6, dtype=torch.int32, device="cuda")
    for _ in range(2):
        multigather.gather(indices, slab.tensor, out=(out.tensor,), backend=target.backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        multigather.gather(indices, slab.tensor, out=(out.tensor,), backend=target.backend)
    for turn in range(20):
        indices.copy_(torch.arange(6, device="cuda") * 3 - turn)
        out.poison()
        graph.replay()
        assert torch.equal(out.tensor, slab.tensor[indices])
        out.assert_guards_intact()
    multigather.check()


FIRST_USE = """
import sys
import torch, multigather

# The first gather of the process, so also the first kernel of it, is made in a capture.
buffer = torch.arange(350.0, device="cuda").view(50, 7)
narrow = torch.arange(50 * 33, device="cuda").to(torch.uint8).view(50, 33)
indices = torch.arange(8, device="cuda")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
refusal = None
with torch.cuda.graph(graph):
    doubled = buffer * 2
    try:
        made = multigather.gather(indices, buffer, narrow, backend=sys.argv[1])
    except Exception as error:
        refusal = error
    tripled = buffer * 3
for turn in (5, 40):
    indices.copy_(torch.arange(8, device="cuda") + turn)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(doubled, buffer * 2) and torch.equal(tripled, buffer * 3)
    if refusal is None:
        assert torch.equal(made[0], buffer[indices]) and torch.equal(made[1], narrow[indices])
if refusal is not None:
    assert "captur" in str(refusal), repr(refusal)
    for rows, source in zip(multigather.gather(indices, buffer, narrow), (buffer, narrow)):
        assert torch.equal(rows, source[indices])
if refusal is None:
    indices[3] = 77
    graph.replay()
    try:
        multigather.check()
        raise SystemExit("a bad index in a replay was not reported")
    except IndexError as error:
        assert "is 77, " in str(error)
print("works" if refusal is None else f"refused: {refusal}")
"""


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_gather_of_a_process_in_a_capture(backend: str) -> None:
    """It works, or says that a capture is the reason; either way the rest of the capture works."""
    printed = run_program(FIRST_USE, backend).stdout
    assert printed.startswith(("works", "refused: "))


COMPILED = """
import sys
import torch, multigather

backend = sys.argv[1]
buffer = torch.arange(350.0, device="cuda").view(50, 7)
narrow = torch.arange(50 * 33, device="cuda").to(torch.uint8).view(50, 33)

@torch.compile(mode="reduce-overhead", fullgraph=True)
def step(indices, buffer, narrow):
    rows, bytes_ = multigather.gather(indices + 1, buffer * 2, narrow, backend=backend)
    return rows.sum(1), bytes_

with torch.no_grad():
    for turn in range(12):
        torch.compiler.cudagraph_mark_step_begin()
        indices = (torch.arange(8, device="cuda") * 5 + turn) % 49
        sums, bytes_ = step(indices, buffer, narrow)
        assert torch.equal(sums, (buffer * 2)[indices + 1].sum(1)), turn
        assert torch.equal(bytes_, narrow[indices + 1]), turn
        buffer.add_(1)
    multigather.check()
    torch.compiler.cudagraph_mark_step_begin()
    step(torch.full((8,), 60, device="cuda"), buffer, narrow)
    try:
        multigather.check()
        raise SystemExit("a bad index was not reported")
    except IndexError as error:
        assert "is 61, " in str(error), error
print("works")
"""


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_with_reduced_overhead(backend: str) -> None:
    """torch.compile captures the gather into graphs of its own and replays them."""
    assert run_program(COMPILED, backend).stdout == "works\n"
