"""Device code, installed as ``multigather.kernels``.

``gather.cu`` and, for gradients, ``scatter_add.cu`` are CUDA C, compiled at run time by the cupy
backend; ``gather_triton.py`` is the Triton kernel with its configurations. Nothing here is imported
before a call needs it.
"""
