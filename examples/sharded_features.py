"""Train on features whose rows are spread over all ranks, more than one of them could hold.

Each rank has an equal part of a table: features, a label and a weight for each item. Every step it
draws items from the whole table, as a sampler does, and gets their rows with one gather, whoever
has them. The model is small and copied to each rank; its gradients are averaged.

    torchrun --nproc-per-node 2 examples/sharded_features.py

One process a GPU where there are GPUs (NCCL, and reads from peers if the GPUs are of one host and
can do so), else on CPUs (gloo).
"""

from __future__ import annotations

import argparse
import contextlib

import torch
import torch.distributed as dist

from multigather.distributed import shard, symmetric
from multigather.errors import UnsupportedError

CLASSES = 7


def own_items(items: int, width: int, device: torch.device) -> dict[str, torch.Tensor]:
    """This rank's part of the table; made up here, read from its own files in a real program."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    labels = torch.randint(CLASSES, (items,), generator=generator)
    centres = torch.randn(CLASSES, width, generator=torch.Generator().manual_seed(1000))
    features = centres[labels] + 6 * torch.randn(items, width, generator=generator)
    table = {"features": features, "label": labels, "weight": torch.ones(items)}
    return {name: column.to(device) for name, column in table.items()}


def train(
    items: int, width: int, batch: int, steps: int, device: torch.device
) -> tuple[float, float]:
    """Train for some steps; the first and the last loss, averaged over the ranks."""
    table = own_items(items, width, device)
    # Where GPUs can read one another's memory, a step needs no collective for its rows.
    with contextlib.suppress(UnsupportedError):
        (table,) = symmetric(table)
    plan = shard(table)
    if dist.get_rank() == 0:
        print(plan.explain())
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(width, 64), torch.nn.ReLU(), torch.nn.Linear(64, CLASSES)
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    losses = []
    for step in range(steps):
        wanted = torch.randint(items * dist.get_world_size(), (batch,), generator=generator)
        (rows,) = plan(wanted.to(device))
        scores = model(rows["features"])
        each = torch.nn.functional.cross_entropy(scores, rows["label"], reduction="none")
        loss = (each * rows["weight"]).mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        average = loss.detach().clone()
        dist.all_reduce(average)
        losses.append(float(average) / dist.get_world_size())
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    return losses[0], losses[-1]


def main() -> None:
    """Join the group that torchrun describes, train, leave."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=20_000, help="of each rank")
    parser.add_argument("--width", type=int, default=128, help="features of an item")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    gpus = torch.cuda.device_count()
    dist.init_process_group("nccl" if gpus else "gloo")
    device = torch.device("cpu")
    if gpus:
        device = torch.device("cuda", dist.get_rank() % gpus)
        torch.cuda.set_device(device)
    first, last = train(args.items, args.width, args.batch, args.steps, device)
    if dist.get_rank() == 0:
        print(f"loss {first:.3f} at first, {last:.3f} at last")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
