"""The whole GPU check with the Python and packages at hand: no virtual environment, no network.

Installs this package into a temporary folder, without build isolation or dependencies, puts that
folder on PYTHONPATH, says which packages are missing, runs ``python -m pytest -m gpu tests`` and,
if the tests pass, a quick ``multigather tune`` into a temporary folder, a ``multigather check`` of
what it found there, and ``multigather bench``. Arguments are passed on to pytest. Works where
site-packages is read-only.

    python3 tools/gpu_check.py -k triton -x
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# What needs each package; a tuple names the distributions that provide it.
PACKAGES = (
    (("torch",), "everything"),
    (("pytest",), "the tests"),
    (("triton",), "the triton backend"),
    (("cupy-cuda13x", "cupy-cuda12x", "cupy"), "the cupy backend"),
    (("numpy",), "cupy, and the demo"),
    (("hypothesis",), "the property tests"),
    (("pydantic",), "reading and writing tuning files"),
    (("platformdirs",), "the folder of tuning files"),
    (("filelock",), "writing tuning files"),
    (("typer",), "the command line"),
    (("rich",), "the command line"),
    (("gymnasium",), "the demo"),
    (("tensordict",), "TensorDicts as arguments"),
    (("torchrl",), "the integration of TorchRL"),
    (("torch_geometric", "torch-geometric"), "the integration of PyG"),
)
REQUIRED = ("torch", "pytest")


def install(site: Path, python: str = sys.executable) -> str:
    """Install this package into the folder ``site`` with the pip of ``python``; return how.

    pip does it where it works, and builds the compiled extension if there is a compiler. Where pip
    or a recent setuptools is missing, the folders are copied to where pip would put them, without
    the extension.
    """
    with tempfile.TemporaryDirectory() as folder:
        # A copy, because building leaves files in the source tree.
        source = Path(folder, "source")
        source.mkdir()
        for name in ("multigather", "kernels", "tuning_cache"):
            # An extension that was built in the checkout may be older than its source.
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        flags = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--target", site]
        command = [python, "-m", "pip", "install", *flags, source]
        pip = subprocess.run(command, capture_output=True, text=True, check=False)
        if pip.returncode == 0:
            return "by pip"
        shutil.rmtree(site, ignore_errors=True)
        package = site / "multigather"
        shutil.copytree(source / "multigather", package)
        shutil.copytree(source / "kernels", package / "kernels")
        shutil.copytree(source / "tuning_cache", package / "tuning_cache")
    reason = (pip.stderr.strip() or "pip printed nothing").splitlines()[-1]
    return f"by copying, because pip could not: {reason}"


def environment_with(site: Path) -> dict[str, str]:
    """This process's environment, in which the package in ``site`` is the one that is imported."""
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    # PYTHONSAFEPATH keeps the checkout's own multigather/, which has no kernels, off the path.
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}


def missing_packages() -> list[str]:
    """Print the version of each of `PACKAGES`; return the required ones that are missing."""
    missing = []
    for distributions, purpose in PACKAGES:
        for name in distributions:
            try:
                print(f"  {name} {metadata.version(name)}")
                break
            except metadata.PackageNotFoundError:
                continue
        else:
            name = distributions[0]
            print(f"  {name} is missing: needed for {purpose}")
            if name in REQUIRED:
                missing.append(name)
    return missing


def main(arguments: list[str]) -> int:
    """Run the check; return pytest's exit status, or 2 if it cannot start."""
    print(f"{sys.executable}, Python {sys.version.split()[0]}")
    missing = missing_packages()
    if missing:
        print(f"cannot run without {' and '.join(missing)}")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site")
        print(f"multigather installed into a temporary folder {install(site)}", flush=True)
        environment = environment_with(site)
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests", *arguments]
        status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        if status:
            return status
        for command in (
            ["tune", "--preset", "quick"],
            ["check", "--sample", "5", "--max-regret", "0.15"],
            ["bench"],
        ):
            print("multigather", *command, flush=True)
            whole = [sys.executable, "-m", "multigather", *command, "--device", "cuda"]
            # What this tunes is for this check only; bench then runs on what ships.
            place = {"MULTIGATHER_CACHE_DIR": folder} if command != ["bench"] else {}
            status = subprocess.run(whole, cwd=ROOT, env={**environment, **place}).returncode
            if status:
                return status
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
