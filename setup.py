"""What pyproject.toml cannot say: the compiled extension, which a machine may do without."""

import sys

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "multigather._native",
            ["multigather/_native.c", "kernels/gather_cpu.c"],
            include_dirs=["kernels"],
            depends=["kernels/gather_cpu.h"],
            # Loops over rows are written for it; distributions of Python compile with less.
            extra_compile_args=[] if sys.platform == "win32" else ["-O3"],
            optional=True,  # without a compiler the package is installed all the same
        )
    ]
)
