"""Device code, installed as ``multigather.kernels``.

``gather.cu``, ``scatter_add.cu`` for gradients and ``route.cu`` for sharded buffers are CUDA C,
compiled at run time by the cupy backend, each with ``common.cuh`` before it; ``gather_triton.py``
is the Triton kernel with its configurations. Nothing here is imported before a call needs it.
"""
