"""Train on mini-batches of a graph whose features come through multigather, and time the fetch.

Trains GraphSAGE on Zachary's karate club (34 nodes, ships with PyG) with a loader whose feature
store is `multigather.integrations.pyg.FeatureStore`, after checking that its batches equal those of
PyG's own store. Then generates a larger graph and times the fetch of a batch's features both ways,
in interleaved rounds. Prints one JSON object.

    python examples/pyg_features.py --nodes 200000 --device cpu

With ``--device pinned`` the features stay in pinned host memory and the batches are on the GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch_geometric.data import Data
from torch_geometric.datasets import KarateClub
from torch_geometric.loader import NodeLoader
from torch_geometric.nn import SAGEConv
from torch_geometric.sampler import BaseSampler, NodeSamplerInput, SamplerOutput

import multigather
from multigather.integrations.pyg import FeatureStore


class UniformSampler(BaseSampler):
    """Some neighbours of each node, drawn uniformly; torch only, where pyg-lib is not installed.

    Args:
        edge_index: edges, shape ``[2, edges]``, from neighbour to node.
        nodes: number of nodes.
        fanout: how many neighbours per node, for each hop.
    """

    def __init__(self, edge_index: torch.Tensor, nodes: int, fanout: list[int]) -> None:
        order = edge_index[1].argsort(stable=True)
        self.neighbours = edge_index[0][order]
        degree = torch.bincount(edge_index[1], minlength=nodes)
        self.start = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
        self.fanout = fanout
        self.place = torch.full((nodes,), -1)

    def sample_from_nodes(self, index: NodeSamplerInput, **_: object) -> SamplerOutput:
        """Sample around the seeds; these come first among the nodes."""
        nodes = index.node
        sources, targets, per_hop = [], [], [len(nodes)]
        frontier = nodes
        for fanout in self.fanout:
            first, last = self.start[frontier], self.start[frontier + 1]
            drawn = torch.rand(len(frontier), fanout) * (last - first)[:, None]
            edges = first[:, None] + drawn.long()
            edges = edges[last > first].reshape(-1).unique()
            source = self.neighbours[edges]
            target = torch.searchsorted(self.start, edges, right=True) - 1
            self.place[nodes] = 0
            frontier = source[self.place[source] < 0].unique()
            self.place[nodes] = -1
            nodes = torch.cat([nodes, frontier])
            per_hop.append(len(frontier))
            sources.append(source)
            targets.append(target)
        self.place[nodes] = torch.arange(len(nodes))
        row, col = self.place[torch.cat(sources)], self.place[torch.cat(targets)]
        self.place[nodes] = -1
        return SamplerOutput(
            nodes, row, col, None, num_sampled_nodes=per_hop, metadata=(index.input_id, index.time)
        )

    def sample_from_edges(self, index: object, neg_sampling: object = None) -> SamplerOutput:
        """Not needed here."""
        raise NotImplementedError("this example loads nodes only")


class GraphSage(torch.nn.Module):
    """Two layers."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(features, 16), SAGEConv(16, classes)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        """Scores of each node's classes, shape ``[nodes, classes]``."""
        return self.second(self.first(x, edge_index).relu(), edge_index)


def loader_of(source: object, data: Data, fanout: list[int], batch_size: int) -> NodeLoader:
    """A loader of all nodes of ``data``.

    Args:
        source: ``data``, or a feature and a graph store.
        data: the graph.
        fanout: how many neighbours per node, for each hop.
        batch_size: number of seed nodes.
    """
    sampler = UniformSampler(data.edge_index, data.num_nodes, fanout)
    return NodeLoader(
        source, sampler, torch.arange(data.num_nodes), batch_size=batch_size, shuffle=True
    )


def check_equal(data: Data, fanout: list[int], batch_size: int, batches: int = 5) -> int:
    """Compare PyG's batches and ours, bit for bit; return how many tensors."""
    compared = 0
    both = []
    for source in (data, (FeatureStore.from_data(data), data)):
        torch.manual_seed(0)
        loader = loader_of(source, data, fanout, batch_size)
        both.append([batch for _, batch in zip(range(batches), loader, strict=False)])
    for theirs, ours in zip(*both, strict=True):
        ours = ours.to_dict()
        for key, value in theirs.to_dict().items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, ours[key]), key
                compared += 1
    return compared


def train(data: Data, epochs: int) -> float:
    """Train on the labels of every other node; return the accuracy on the others."""
    torch.manual_seed(0)
    data.train_mask = torch.arange(data.num_nodes) % 2 == 0
    loader = loader_of((FeatureStore.from_data(data), data), data, [10, 10], 8)
    model = GraphSage(data.num_features, int(data.y.max()) + 1)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=0.01)
    for _ in range(epochs):
        for batch in loader:
            # The seeds come first; the labels of other nodes are not theirs to learn from.
            seeds = torch.arange(batch.num_nodes) < batch.batch_size
            known = batch.train_mask & seeds
            if not known.any():
                continue
            optimiser.zero_grad()
            scores = model(batch.x, batch.edge_index)
            torch.nn.functional.cross_entropy(scores[known], batch.y[known]).backward()
            optimiser.step()
    with torch.no_grad():
        guesses = model(data.x, data.edge_index).argmax(1)
    unknown = ~data.train_mask
    return float((guesses == data.y)[unknown].double().mean())


def generated(nodes: int, seed: int) -> Data:
    """A random graph with the features that a large one has: two embeddings and a few numbers."""
    generator = torch.Generator().manual_seed(seed)
    return Data(
        x=torch.randn(nodes, 100, generator=generator),
        text=torch.randn(nodes, 128, generator=generator).to(torch.bfloat16),
        y=torch.randint(40, (nodes,), generator=generator),
        year=torch.randint(1990, 2026, (nodes,), dtype=torch.int32, generator=generator),
        train_mask=torch.rand(nodes, generator=generator) < 0.5,
        edge_index=torch.randint(nodes, (2, 10 * nodes), generator=generator),
        num_nodes=nodes,
    )


def time_fetch(data: Data, device: str, batch_size: int, rounds: int) -> dict[str, object]:
    """Times in µs to fetch the features of a batch, and on a CPU to load it whole.

    "index_select" is what PyG's loaders do with a `Data`, one feature after another; "indexing" is
    ``feature[nodes]``, what `Data` does as a feature store.
    """
    where = "cuda" if device == "pinned" else device
    features = data.clone()
    features.edge_index = None
    if device != "cpu":
        features = features.pin_memory() if device == "pinned" else features.to(device)
    names = [attr.attr_name for attr in features.get_all_tensor_attrs()]
    store = FeatureStore.from_data(features)
    loader = loader_of(data, data, [10, 5], batch_size)
    sets = [batch.n_id.to(where) for _, batch in zip(range(8), loader, strict=False)]

    def with_multigather(nodes: torch.Tensor) -> list[torch.Tensor]:
        attrs = store.get_all_tensor_attrs()
        for attr in attrs:
            attr.index = nodes
        return store.multi_get_tensor(attrs)

    def one_by_one(
        fetch: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], nodes: torch.Tensor
    ) -> list[torch.Tensor]:
        # Nodes on a GPU cannot index a tensor of the host.
        there = nodes.cpu() if device == "pinned" else nodes
        return [fetch(features[name], there).to(where) for name in names]

    fetches: dict[str, Callable[[torch.Tensor], list[torch.Tensor]]] = {
        "multigather": with_multigather,
        "index_select": lambda nodes: one_by_one(lambda x, i: x.index_select(0, i), nodes),
        "indexing": lambda nodes: one_by_one(lambda x, i: x[i], nodes),
    }
    for nodes in sets:
        wanted = [getattr(data, name)[nodes.cpu()] for name in names]
        for fetch in fetches.values():
            for got, want in zip(fetch(nodes), wanted, strict=True):
                assert torch.equal(got.cpu(), want)

    def load(loader: NodeLoader) -> None:
        for _, _batch in zip(range(len(sets)), loader, strict=False):
            pass

    def every_set(fetch: Callable[[torch.Tensor], object]) -> Callable[[], object]:
        def run() -> None:
            # A batch is dropped before the next one comes, as in training: to hold all of them
            # takes new memory from the system each time, and its page faults cost more than a copy.
            for nodes in sets:
                fetch(nodes)

        return run

    ways = {f"fetch, {name}": every_set(fetch) for name, fetch in fetches.items()}
    if device == "cpu":
        for name, source in (("multigather", (store, data)), ("index_select", data)):
            loader = loader_of(source, data, [10, 5], batch_size)
            ways[f"whole batch, {name}"] = lambda loader=loader: load(loader)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, call in ways.items():
            start = time.perf_counter()
            call()
            if where == "cuda":
                torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) / len(sets) * 1e6)
    multigather.check()
    return {
        "device": device,
        "nodes": data.num_nodes,
        "nodes_per_batch": round(statistics.mean(len(nodes) for nodes in sets)),
        "median_us": {name: round(statistics.median(each), 1) for name, each in times.items()},
        "least_us": {name: round(min(each), 1) for name, each in times.items()},
    }


def main() -> None:
    """Check, train, time, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda", "pinned"), default="cpu")
    parser.add_argument("--nodes", type=int, default=200_000, help="of the generated graph")
    parser.add_argument("--batch-size", type=int, default=256, help="seed nodes per batch")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()

    karate = KarateClub()[0]
    large = generated(args.nodes, 0)
    report = {
        "torch": torch.__version__,
        "equal_tensors": check_equal(karate, [10, 10], 8) + check_equal(large, [10, 5], 256),
        "karate_club_accuracy": round(train(karate, args.epochs), 3),
        "batch_fetch": time_fetch(large, args.device, args.batch_size, args.rounds),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
