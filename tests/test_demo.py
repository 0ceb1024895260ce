"""The demo: its data is real, it checks every byte, and it fails when a byte is wrong."""

import json
import sys

import pytest
import torch

import multigather
from multigather import demo

pytest.importorskip("gymnasium")


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch):
    monkeypatch.setattr(demo, "ROUNDS", 1)
    monkeypatch.setattr(demo, "ROUND_SECONDS", 0.0)


def test_transitions_come_from_the_environment():
    columns = demo.collect_transitions(3000, seed=1)
    assert {name: (len(c), c.dtype) for name, c in columns.items()} == {
        "obs": (3000, torch.float32),
        "action": (3000, torch.int64),
        "reward": (3000, torch.float32),
        "next_obs": (3000, torch.float32),
        "terminated": (3000, torch.bool),
        "step": (3000, torch.int64),
    }
    # Within an episode an observation is the one that the step before led to.
    led_to = {tuple(row) for row in columns["next_obs"][~columns["terminated"]].tolist()}
    later = columns["obs"][columns["step"] > 0].tolist()
    assert len(later) > 2000
    assert all(tuple(row) in led_to for row in later)
    # An episode starts near the origin and terminates outside CartPole's limits, and only there.
    first = columns["obs"][columns["step"] == 0]
    assert len(first) > 50
    assert first.abs().max() <= 0.05
    outside = (columns["next_obs"][:, 0].abs() > 2.4) | (columns["next_obs"][:, 2].abs() > 0.2095)
    assert torch.equal(outside, columns["terminated"])
    assert (columns["reward"] == 1).all()


def test_transitions_follow_the_seed():
    first, again, other = (demo.collect_transitions(200, seed)["obs"] for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])])
def test_demo_passes(device, capsys):
    assert demo.main(device, steps=300, seed=0, as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["mismatches"] == []
    counts = {(t["workload"], t["count"]) for t in report["timings"]}
    assert len(counts) == 10
    assert report["outputs"] == demo.BATCHES * (4 * 6 + 3 * 4 + 3 * 4)
    assert all(t["gather_us"] > 0 for t in report["timings"])
    assert report["device"].startswith(device)
    assert len(report["picks"]) == 3


def test_text_report_shows_brackets_and_verdict(capsys):
    assert demo.main("cpu", steps=100, seed=0, as_json=False) == 0
    printed = capsys.readouterr().out
    assert "all 384 outputs bit-identical to buffer[indices]" in printed
    assert "b[idx]" in printed
    for status in multigather.backends():
        assert status.name in printed


def test_demo_fails_on_one_wrong_bit(monkeypatch, capsys):
    real = multigather.gather

    def wrong(indices, *buffers, **options):
        outs = real(indices, *buffers, **options)
        if len(indices) == 48:
            outs[3].view(torch.uint8)[5, 2] ^= 1
        return outs

    monkeypatch.setattr(multigather, "gather", wrong)
    assert demo.main("cpu", steps=100, seed=0, as_json=False) == 1
    printed = capsys.readouterr().out
    assert f"{2 * demo.BATCHES} of 384 outputs differ" in printed
    assert "decode 257, 48 indices, index set 0, hidden: 1 of 688128 bytes differ" in printed
    assert "first in row 5" in printed
    assert "bit-identical" not in printed


@pytest.mark.parametrize(
    ("got", "want", "text"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), "1 of 4 bytes differ, first in row 0"),
        (torch.zeros(2, 3), torch.zeros(3, 2), "shape is"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32), "dtype is"),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), None),
        (torch.zeros(0, 3), torch.zeros(0, 3), None),
    ],
)
def test_difference_compares_bits(got, want, text):
    found = demo.difference(got, want)
    assert found is None if text is None else text in found


def test_missing_gymnasium_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    assert demo.main("cpu", steps=10, seed=0, as_json=False) == 2
    error = capsys.readouterr().err
    assert "gymnasium is not installed" in error
    assert ".[demo]" in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_missing_gpu_is_named(capsys):
    assert demo.main("cuda", steps=10, seed=0, as_json=False) == 2
    assert "torch" in capsys.readouterr().err
