"""Gather rows that lie on several GPUs or hosts, on torch.distributed.

``shard(*local_bufs)(indices)`` gathers each rank's own global ``indices`` from the rows that all
ranks of a group hold together, whatever the number of buffers in three collectives.
"""

from .peer import symmetric
from .plan import ShardedPlan, shard
from .sharding import CapacityError

__all__ = ["CapacityError", "ShardedPlan", "shard", "symmetric"]
