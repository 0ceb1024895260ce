"""Our C and CUDA code, run on the CPU under the address and undefined-behaviour sanitizers.

The tests of the targets ``cuda-source-on-cpu`` and ``native-cpu``, and those of repeated calls, run
again, in processes of their own that have the sanitizers' runtime loaded before anything else; the
kernel (cuda_host) and the extension are built with their checks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import xml.etree.ElementTree as ElementTree
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# Test files that have tests of the target, and the fewest of these that must run to the end.
FILES = {
    "test_gather.py": 150,
    "test_known_faults.py": 100,
    "test_errors.py": 150,
    "test_plan.py": 15,
    "test_properties.py": 1,
    "test_pieces.py": 16,
    "test_shifted.py": 30,
    "test_scatter_add.py": 45,
    "test_route.py": 40,
    "test_packed_rows.py": 16,
}
TIME_LIMIT = 900


def runtime() -> list[str]:
    """Libraries to load first; empty if the sanitizer, which comes with g++, is not here."""
    compiler = shutil.which("g++")
    if compiler is None:
        return []
    paths = []
    # The sanitizer looks for the C++ library's functions when it starts, before torch brings it.
    for name in ("libasan.so", "libstdc++.so.6"):
        command = [compiler, f"-print-file-name={name}"]
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if not Path(answer).is_absolute():  # not found: the bare name comes back
            return []
        paths.append(answer)
    return paths


LIBRARIES = runtime()

pytestmark = pytest.mark.skipif(
    not LIBRARIES, reason="the address sanitizer's library, which comes with g++, is not here"
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python under the sanitizers, which report to its standard error and end it."""
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(LIBRARIES),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python leaks by design
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "MULTIGATHER_HOST_SANITIZE": "1",
        "CUDA_VISIBLE_DEVICES": "",  # the sanitizer and a CUDA context want the same addresses
        "PYTHONPATH": str(HERE),
    }
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment, capture_output=True, text=True, timeout=TIME_LIMIT, check=False,
    )  # fmt: skip


Outcome = tuple["subprocess.CompletedProcess[str]", Path]


def run_tests(file: str, folder: Path) -> Outcome:
    """Run one file's tests of the target; returns what the process did and the results' path."""
    results = folder / f"{file}.xml"
    done = run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "cuda-source-on-cpu",
        "--capture=sys",  # lets through what is not Python's: the reports
        f"--junitxml={results}", f"--basetemp={folder / f'{file}.tmp'}", str(HERE / file),
    )  # fmt: skip
    return done, results


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[Outcome]]:
    """What every file's tests did; two files at a time."""
    folder = tmp_path_factory.mktemp("sanitizers")
    with ThreadPoolExecutor(2) as pool:
        return {file: pool.submit(run_tests, file, folder) for file in FILES}


@pytest.mark.parametrize("file", FILES)
def test_no_sanitizer_reports_anything(file: str, outcomes: dict[str, Future[Outcome]]) -> None:
    """No access outside a buffer and no undefined behaviour, and the tests pass and are many."""
    done, results = outcomes[file].result()
    assert "Sanitizer" not in done.stderr, done.stderr
    assert "runtime error" not in done.stderr, done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    (suite,) = ElementTree.parse(results).getroot().iter("testsuite")
    assert suite.get("failures") == suite.get("errors") == "0"
    assert int(suite.get("tests", 0)) - int(suite.get("skipped", 0)) >= FILES[file]


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The extension, built with the sanitizers' checks and without a warning."""
    include = sysconfig.get_paths()["include"]
    if not Path(include, "Python.h").exists():
        pytest.skip("Python.h is not here")
    kernels = HERE.parent / "kernels"
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    built = tmp_path_factory.mktemp("extension") / f"_native{suffix}"
    command = [
        *("gcc", "-std=c11", "-shared", "-fPIC", "-g1", "-O1", "-Wall", "-Wextra", "-Werror"),
        *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
        *(f"-I{include}", f"-I{kernels}"),
        *(str(HERE.parent / "multigather" / "_native.c"), str(kernels / "gather_cpu.c")),
        *("-o", str(built)),
    ]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr
    return built


# Puts the extension of a path in the place of the installed one.
LOAD = """
import importlib.util
import sys
spec = importlib.util.spec_from_file_location("multigather._native", sys.argv[1])
sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[spec.name])
"""
TESTS = """
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""
# Of repeated calls and of the native backend, but those of what the sanitizers would change.
CHOSEN = "(native-cpu or test_native or (test_shortcut and native)) and not leaked"


def test_no_sanitizer_reports_anything_of_the_extension(extension: Path, tmp_path: Path) -> None:
    """No access outside an object, no undefined behaviour."""
    results = tmp_path / "results.xml"
    done = run(
        *("-c", LOAD + TESTS, str(extension), "-q", "-p", "no:cacheprovider", "--capture=sys"),
        *("-k", CHOSEN, f"--junitxml={results}", f"--basetemp={tmp_path / 'tmp'}"),
        *(str(HERE / f"test_{name}.py") for name in ("shortcut", "native", "packed")),
        *(str(HERE / file) for file in FILES),
    )
    assert "Sanitizer" not in done.stderr, done.stderr
    assert "runtime error" not in done.stderr, done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    (suite,) = ElementTree.parse(results).getroot().iter("testsuite")
    assert suite.get("failures") == suite.get("errors") == "0"
    assert int(suite.get("tests", 0)) - int(suite.get("skipped", 0)) > 600


NATIVE = """
import torch
from multigather import gather
buffer = torch.arange(4 * WIDTH, dtype=torch.uint8).view(4, WIDTH)
for _ in range(3):
    (row,) = gather(torch.tensor([VALUE]), buffer, bounds="unchecked", backend="native")
assert row[0].tolist() == buffer[VALUE].tolist()
print("done")
"""


@pytest.mark.parametrize(("good", "bad"), [(3, 4), (0, -1)], ids=["read-behind", "read-before"])
@pytest.mark.parametrize("width", [16, 40], ids=["a load", "memcpy"])
def test_sanitizers_would_report_the_extension(
    extension: Path, good: int, bad: int, width: int
) -> None:
    script = LOAD + NATIVE.replace("WIDTH", str(width))
    done = run("-c", script.replace("VALUE", str(good)), str(extension))
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    done = run("-c", script.replace("VALUE", str(bad)), str(extension))
    assert done.returncode != 0
    assert done.stdout == ""
    assert "heap-buffer-overflow" in done.stderr
    assert "gather_cpu.c" in done.stderr


# Scripts for Python; VALUE is replaced.
GATHER = """
import torch
from cuda_host import HostCudaBackend
from multigather import dispatch, gather
dispatch.BACKENDS = (HostCudaBackend(), *dispatch.BACKENDS[1:])
buffer = torch.arange(64, dtype=torch.uint8).view(4, 16)
(row,) = gather(torch.tensor([VALUE]), buffer, bounds="unchecked", backend="cupy")
assert row[0].tolist() == buffer[VALUE].tolist()
print("done")
"""

WRITE = """
import torch
from cuda_host import HostCudaBackend
from multigather.backends._cupy import CudaConfig
from multigather.request import Request, Site, field_of
buffer = torch.zeros(4, 16, dtype=torch.uint8)
indices = torch.zeros(VALUE, dtype=torch.int64)
request = Request(torch.device("cpu"), False, torch.int64, 2, "clip", (field_of(buffer),))
runner = HostCudaBackend().prepare(request, CudaConfig(), Site(1, (0,), ("bufs[0]",)))
outs = [torch.zeros(2, 16, dtype=torch.uint8)]
runner(indices, indices.shape, [buffer], outs)
print("done")
"""

ALIGN = """
import torch
from cuda_host import HostCudaBackend
from multigather.backends._cupy import CudaConfig
from multigather.request import Request, Site, field_of
memory = torch.zeros(80, dtype=torch.uint8)
memory = memory[-memory.data_ptr() % 16 :]
buffer, other = memory[:48].view(3, 16), memory[VALUE : VALUE + 48].view(3, 16)
indices = torch.tensor([2])
request = Request(torch.device("cpu"), False, torch.int64, 1, "clip", (field_of(buffer),))
runner = HostCudaBackend().prepare(request, CudaConfig(), Site(1, (0,), ("bufs[0]",)))
runner(indices, indices.shape, [other], None)
print("done")
"""

# All memory around the rows is out of bounds; VALUE is how many of its bytes a row is said to
# have. Rows start 8 and 0 bytes behind a multiple of 16, the finest that the sanitizer can tell.
SHIFTED = """
import ctypes
import itertools
import torch
from cuda_host import HostCudaBackend
from multigather.backends._cupy import SHIFTED, CudaConfig, units_of
from multigather.backends.base import destinations_of
from multigather.request import Request, Site, field_of
runtime, ROWS, STRIDE = ctypes.CDLL(None), 5, 1040
def mark(what, tensor):
    getattr(runtime, f"__asan_{what}_memory_region")(
        ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel())
    )
memory = torch.arange(16 + ROWS * STRIDE).remainder(251).to(torch.uint8)
table = memory[8 : 8 + ROWS * STRIDE].view(ROWS, STRIDE)
indices = torch.tensor([4, 0, 3, 1, 2])
for width, start in itertools.product((*range(33, 65), 511, 512, 1030), range(16)):
    source = table[:, : width + VALUE]
    out = torch.zeros(ROWS * 1045 + 16, dtype=torch.uint8)[start:][: ROWS * 1045].view(ROWS, 1045)
    out = out[:, : width + VALUE]
    field = field_of(source)
    if units_of(field, *destinations_of([out], 1))[0] != SHIFTED:
        continue
    request = Request(torch.device("cpu"), False, torch.int64, ROWS, "clip", (field,))
    runner = HostCudaBackend().prepare(request, CudaConfig(), Site(1, (0,), ("bufs[0]",)))
    mark("poison", memory)
    for row in table:
        mark("unpoison", row[:width])
    runner(indices, indices.shape, [source], [out])
    mark("unpoison", memory)
    assert torch.equal(out, source[indices])
print("done")
"""


@pytest.mark.parametrize(
    ("script", "good", "bad", "report"),
    [
        pytest.param(GATHER, 3, 4, "heap-buffer-overflow", id="read-behind"),
        pytest.param(GATHER, 0, -1, "heap-buffer-overflow", id="read-before"),
        pytest.param(WRITE, 2, 3, "heap-buffer-overflow", id="write-behind"),
        pytest.param(ALIGN, 16, 8, "misaligned address", id="misaligned"),
        pytest.param(SHIFTED, 0, 1, "use-after-poison", id="beside-a-shifted-row"),
    ],
)
def test_sanitizers_would_report(script: str, good: int, bad: int, report: str) -> None:
    """A kernel that leaves its buffers, or whose unit an address does not allow, is caught."""
    done = run("-c", script.replace("VALUE", str(good)))
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    done = run("-c", script.replace("VALUE", str(bad)))
    assert done.returncode != 0
    assert done.stdout == ""
    assert report in done.stderr
    assert "gather.cu" in done.stderr
