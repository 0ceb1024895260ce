"""The stand-in for SGLang's gather of decoding state, over the cases that SGLang tests."""

from __future__ import annotations

import inspect

import pytest
import torch

import multigather
from multigather.integrations import sglang
from multigather.integrations.sglang import gather_spec_extras

# Slots of the pool, requests, topk, hidden size.
SHAPES = [
    (16, 8, 1, 7),
    (64, 33, 4, 128),
    (128, 128, 8, 1024),
    (100, 50, 2, 4096),
    (257, 200, 16, 4097),
    (2048, 777, 8, 5120),
]


def pools(
    device: str, pool: int, topk: int, hidden: tuple[int, ...] | None, dtype: torch.dtype
) -> list[torch.Tensor | None]:
    generator = torch.Generator(device).manual_seed(pool)
    return [
        torch.rand(pool, topk, device=device, generator=generator),
        torch.randint(150_000, (pool, topk), device=device, generator=generator),
        torch.randint(150_000, (pool,), device=device, generator=generator),
        None
        if hidden is None
        else torch.randn(pool, *hidden, device=device, generator=generator).to(dtype),
    ]


def assert_gathered(indices: torch.Tensor, bufs: list[torch.Tensor | None]) -> None:
    """Values, types, shapes and device are right; the pools are untouched and not shared."""
    before = [None if buf is None else buf.clone() for buf in bufs]
    results = gather_spec_extras(indices, *bufs)
    assert isinstance(results, tuple) and len(results) == 4
    for result, buf, copy in zip(results, bufs, before, strict=True):
        if buf is None:
            assert result is None
            continue
        want = buf[indices.long()]
        assert result.dtype == want.dtype and result.device == want.device
        assert result.shape == want.shape and result.is_contiguous()
        assert torch.equal(result, want) and torch.equal(buf, copy)
        assert result.untyped_storage().data_ptr() != buf.untyped_storage().data_ptr()


def test_signature() -> None:
    assert list(inspect.signature(gather_spec_extras).parameters) == [
        "indices", "topk_p_buf", "topk_index_buf", "output_tokens_buf", "hidden_states_buf", "more",
    ]  # fmt: skip


RELAY = ("hidden states", "draft_probs", "dsa_topk_indices", "new_seq_lens")


@pytest.mark.parametrize("missing", [(), *((each,) for each in RELAY), RELAY[:3], RELAY], ids=str)
def test_all_that_the_relay_keeps(device: str, missing: tuple[str, ...]) -> None:
    """The newer relay gathers up to three more pools by the same slots; any may be missing."""
    bufs = pools(device, 33, 4, (3, 64), torch.bfloat16)
    bufs += [
        torch.rand(33, 3, 1001, device=device),
        torch.randint(4096, (33, 512), dtype=torch.int32, device=device),
        torch.randint(4096, (33,), device=device),
    ]
    for name in missing:
        bufs[3 + RELAY.index(name)] = None
    indices = torch.tensor([5, 32, 0, 5], device=device)
    for turn in range(3):
        results = gather_spec_extras(indices.roll(turn), *bufs)
        assert len(results) == 7
        for result, buf in zip(results, bufs, strict=True):
            if buf is None:
                assert result is None
            else:
                assert result.dtype == buf.dtype
                assert torch.equal(result, buf[indices.roll(turn)])


def test_the_relay_s_pools_are_one_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(indices: torch.Tensor, *bufs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls.append(len(bufs))
        return multigather.gather(indices, *bufs)

    monkeypatch.setattr(sglang, "gather", counted)
    bufs = pools("cpu", 9, 1, None, torch.bfloat16)
    sglang.gather_spec_extras(torch.tensor([1]), *bufs, None, torch.ones(9, 4), torch.ones(9))
    assert calls == [5]


@pytest.mark.parametrize("with_hidden", [True, False], ids=["hidden", "no hidden"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(device: str, shape: tuple[int, int, int, int], with_hidden: bool) -> None:
    pool, count, topk, hidden = shape
    bufs = pools(device, pool, topk, (hidden,) if with_hidden else None, torch.bfloat16)
    generator = torch.Generator(device).manual_seed(1)
    indices = torch.randperm(pool, device=device, generator=generator)[:count]
    for turn in range(3):  # the first call checks, the others take the short way
        assert_gathered(indices.roll(turn), bufs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
def test_dtypes(device: str, dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    bufs = pools(device, 64, 4, (128,), dtype)
    indices = torch.arange(63, 0, -2, device=device).to(index_dtype)
    assert_gathered(indices, bufs)
    assert_gathered(indices, [*bufs[:3], None])


@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.arange(1, 61, device=device)[::3],
        lambda device: torch.tensor([5, 5, 1, 5, 63, 63], device=device),
        lambda device: torch.empty(0, dtype=torch.int64, device=device),
        lambda device: torch.tensor([0], device=device),
        lambda device: torch.tensor([-1, 3], device=device),
    ],
    ids=["strided", "repeated", "empty", "padding row", "negative"],
)
@pytest.mark.parametrize("hidden", [(128,), (3, 64), None], ids=["2-d", "3-d", "no hidden"])
def test_indices(device: str, make, hidden: tuple[int, ...] | None) -> None:
    assert_gathered(make(device), pools(device, 64, 4, hidden, torch.bfloat16))


@pytest.mark.gpu
def test_graph_replay_and_another_stream() -> None:
    """SGLang gathers on its forward stream; graphs replay with the indices' new values."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    bufs = pools("cuda", 257, 1, (7168,), torch.bfloat16)
    indices = torch.arange(1, 49, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert_gathered(indices, bufs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = gather_spec_extras(indices, *bufs)
    for turn in range(3):
        indices.copy_(torch.randperm(256, device="cuda")[:48] + 1)
        graph.replay()
        torch.cuda.synchronize()
        for result, buf in zip(results, bufs, strict=True):
            assert torch.equal(result, buf[indices]), turn
