"""What pyproject.toml cannot say: the compiled extension, which a machine may do without."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "multigather._native",
            ["multigather/_native.c"],
            optional=True,  # without a compiler the package is installed all the same
        )
    ]
)
