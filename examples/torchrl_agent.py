"""Train a DQN agent on CartPole from a TorchRL replay buffer that samples through multigather.

The storage is the only line that differs from a program without multigather; ``--storage torchrl``
runs that one. With the same seed both see the same batches, so they end with the same network: the
checksum that is printed is the same. Prints one JSON object.

    python examples/torchrl_agent.py --steps 60000
"""

from __future__ import annotations

import argparse
import copy
import json
import time

import gymnasium
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage as TorchrlStorage
from torchrl.data import TensorDictReplayBuffer

from multigather.integrations.torchrl import LazyTensorStorage

ENVIRONMENTS = 16
BATCH = 256
DISCOUNT = 0.99
TARGET_EVERY = 50  # updates of the network between those of its target


def network(observations: int, actions: int) -> torch.nn.Module:
    """Values of each action, from an observation."""
    return torch.nn.Sequential(
        torch.nn.Linear(observations, 120),
        torch.nn.ReLU(),
        torch.nn.Linear(120, 84),
        torch.nn.ReLU(),
        torch.nn.Linear(84, actions),
    )


def loss_of(values: torch.nn.Module, target: torch.nn.Module, batch: TensorDict) -> torch.Tensor:
    """Double DQN: the network chooses the next action, its target says what that is worth."""
    chosen = values(batch["observation"]).gather(1, batch["action"][:, None])[:, 0]
    with torch.no_grad():
        after = batch["next", "observation"]
        best = values(after).argmax(1, keepdim=True)
        worth = target(after).gather(1, best)[:, 0]
        goal = batch["next", "reward"] + DISCOUNT * worth * ~batch["next", "terminated"]
    return torch.nn.functional.smooth_l1_loss(chosen, goal)


def train(storage: str, steps: int, capacity: int, updates: int, seed: int) -> dict[str, object]:
    """Play and learn; return what came of it.

    Args:
        storage: "multigather" or "torchrl".
        steps: transitions to collect.
        capacity: transitions that the buffer keeps.
        updates: of the network, for each step of all environments.
        seed: of the environments, the policy, the network and the sampler.
    """
    torch.manual_seed(seed)
    kind = LazyTensorStorage if storage == "multigather" else TorchrlStorage
    buffer = TensorDictReplayBuffer(storage=kind(capacity), batch_size=BATCH)
    env = gymnasium.make_vec(
        "CartPole-v1", num_envs=ENVIRONMENTS, vectorization_mode="vector_entry_point"
    )
    observations = env.single_observation_space.shape[0]
    actions = int(env.single_action_space.n)
    values = network(observations, actions)
    target = copy.deepcopy(values)
    optimiser = torch.optim.Adam(values.parameters(), lr=1e-3)

    obs, _ = env.reset(seed=seed)
    obs = torch.as_tensor(obs)
    ended = torch.zeros(ENVIRONMENTS, dtype=torch.bool)
    returns, finished = torch.zeros(ENVIRONMENTS), []
    collected = learned = 0
    sampling = 0.0
    start = time.perf_counter()
    while collected < steps:
        explore = max(0.05, 1 - collected / (0.3 * steps))
        with torch.no_grad():
            action = values(obs).argmax(1)
        random = torch.rand(ENVIRONMENTS) < explore
        action = torch.where(random, torch.randint(actions, (ENVIRONMENTS,)), action)
        after, reward, terminated, truncated, _ = env.step(action.numpy())
        after, reward = torch.as_tensor(after), torch.as_tensor(reward, dtype=torch.float32)
        terminated, truncated = torch.as_tensor(terminated), torch.as_tensor(truncated)
        # The step after an episode's end only resets that environment: no transition.
        played = ~ended
        transitions = TensorDict(
            {
                "observation": obs,
                "action": action,
                "next": TensorDict(
                    {"observation": after, "reward": reward, "terminated": terminated},
                    batch_size=[ENVIRONMENTS],
                ),
            },
            batch_size=[ENVIRONMENTS],
        )
        buffer.extend(transitions[played])
        collected += int(played.sum())
        returns = torch.where(played, returns + reward, 0.0)
        ended = terminated | truncated
        finished += returns[ended].tolist()
        obs = after
        if collected < 2000:
            continue
        for _ in range(updates):
            before = time.perf_counter()
            batch = buffer.sample()
            sampling += time.perf_counter() - before
            optimiser.zero_grad()
            loss_of(values, target, batch).backward()
            optimiser.step()
            learned += 1
            if learned % TARGET_EVERY == 0:
                target.load_state_dict(values.state_dict())
    env.close()
    seconds = time.perf_counter() - start
    return {
        "storage": storage,
        "transitions": collected,
        "updates": learned,
        "episodes": len(finished),
        "mean_return_first_20": round(sum(finished[:20]) / max(len(finished[:20]), 1), 1),
        "mean_return_last_20": round(sum(finished[-20:]) / max(len(finished[-20:]), 1), 1),
        "seconds": round(seconds, 1),
        "sample_us": round(sampling / max(learned, 1) * 1e6, 1),
        "network_checksum": float(sum(p.detach().double().sum() for p in values.parameters())),
    }


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--storage", choices=("multigather", "torchrl"), default="multigather")
    parser.add_argument("--steps", type=int, default=60_000, help="transitions to collect")
    parser.add_argument("--capacity", type=int, default=20_000, help="of the replay buffer")
    parser.add_argument("--updates", type=int, default=2, help="per step of all environments")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="a network this small needs one")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result = train(args.storage, args.steps, args.capacity, args.updates, args.seed)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
