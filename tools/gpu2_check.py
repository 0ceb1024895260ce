"""The check of what needs two GPUs, with the Python and packages at hand: no venv, no network.

Installs this package into a temporary folder as tools/gpu_check.py does, runs the tests of
multigather.distributed that are marked gpu, in processes that talk through NCCL and read each
other's memory, then benchmarks/distributed.py on as many GPUs, and ends with a short table.

    python3 tools/gpu2_check.py --gpus 2 --json gpu2.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu_check import ROOT, environment_with, install, missing_packages


def summary(report: dict[str, Any]) -> str:
    """One line per workload: microseconds of each way, and against an all-to-all per buffer."""
    lines = []
    for each in report["results"]:
        times = each["median_us"]
        theirs = times["all-to-all per buffer"]
        ways = ", ".join(f"{name} {us:.0f} us ({theirs / us:.2f} x)" for name, us in times.items())
        lines.append(
            f"{each['workload']}, {each['pattern']}, {each['indices_per_rank']} indices: {ways}"
        )
        lines += [f"  not {name}: {why}" for name, why in each["missing"].items()]
    for row_bytes, rate in report["peer_gb_per_s"].items():
        share = rate["rows"] / rate["copy"]
        lines.append(
            f"peer reads, rows of {row_bytes} bytes: {rate['rows']} GB/s, {share:.0%} of the "
            f"{rate['copy']} of a copy"
        )
    for kind, times in report["decode_us"].items():
        ways = ", ".join(f"{name} {us} us" for name, us in times.items())
        lines.append(f"decode step, {kind}: {ways}")
    return "\n".join(lines)


def main() -> int:
    """Run the check; the exit status of what failed, 2 if it cannot start."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=2, help="processes of the benchmark")
    parser.add_argument("--scale", type=float, default=1.0, help="of the benchmark's tables")
    parser.add_argument("--rounds", type=int, default=21, help="of the benchmark")
    parser.add_argument("--json", type=Path, help="file for the benchmark's results")
    parser.add_argument("-k", help="the tests to run, as for pytest")
    args = parser.parse_args()
    print(f"{sys.executable}, Python {sys.version.split()[0]}")
    missing = missing_packages()
    if missing:
        print(f"cannot run without {' and '.join(missing)}")
        return 2
    import torch

    if torch.cuda.device_count() < args.gpus:
        print(f"needs {args.gpus} GPUs, torch sees {torch.cuda.device_count()}")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site")
        print(f"multigather installed into a temporary folder {install(site)}", flush=True)
        environment = environment_with(site)
        # The transport needs no NVLink multicast, in NCCL neither.
        for name, value in (("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")):
            environment.setdefault(name, value)
        chosen = ["-k", args.k] if args.k else []
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-ra", "tests/test_distributed.py"]
        status = subprocess.run([*command, *chosen], cwd=ROOT, env=environment).returncode
        if status:
            return status
        results = args.json or Path(folder, "results.json")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(args.gpus), "benchmarks/distributed.py"),
            *("--device", "cuda", "--scale", str(args.scale), "--rounds", str(args.rounds)),
            *("--out", os.fspath(results.resolve())),
        ]
        status = subprocess.run(command, cwd=ROOT, env=environment).returncode
        if status:
            return status
        print(summary(json.loads(results.read_text())))
        return 0


if __name__ == "__main__":
    sys.exit(main())
