"""Reinforcement learning in the style of PPO: a rollout of each rank, then several updates with it.

taskd run --nproc-per-node 2 examples/gallery/ppo.py
"""

from typing import Any

import torch
import torch.distributed as dist
from shared import pace, show
from torch import nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd  # +

STEPS, ENVIRONMENTS, LENGTH, EPOCHS, CLIP = 40, 4, 8, 3, 0.2
STATES, ACTIONS = 6, 3


class Environments:
    """A few random walks of this rank, which the action moves. They go on from step to step."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.now = torch.randn(ENVIRONMENTS, STATES, generator=self.generator)

    def act(self, actions: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(self.now.shape, generator=self.generator)
        self.now = 0.9 * self.now + 0.1 * noise
        self.now[:, 0] += 0.1 * (actions - 1)
        return -self.now[:, 0].square()

    def state_dict(self) -> dict[str, Any]:  # +
        return {"generator": self.generator.get_state(), "now": self.now}  # +

    def load_state_dict(self, state: dict[str, Any]) -> None:  # +
        self.generator.set_state(state["generator"])  # +
        self.now = state["now"].clone()  # +


def network(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(STATES, 32), nn.Tanh(), nn.Linear(32, outputs))


torch.set_num_threads(1)
torch.manual_seed(1)
job = taskd.init()  # +
actor, critic = DDP(network(ACTIONS)), DDP(network(1))
optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=3e-3)
environments = Environments(seed=job.rank)
job.protect(model=[actor, critic], optimizer=optimizer, environments=environments)  # +
torch.manual_seed(job.rank)  # each rank draws its own actions

for step in job.steps(STEPS):  # +
    for attempt in step:  # +
        with attempt:  # +
            pace()
            states, actions, chances, rewards = [], [], [], []
            with torch.no_grad():
                for _ in range(LENGTH):
                    policy = Categorical(logits=actor.module(environments.now))
                    states.append(environments.now)
                    actions.append(policy.sample())
                    chances.append(policy.log_prob(actions[-1]))
                    rewards.append(environments.act(actions[-1]))
            returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
            rollout = [torch.cat(one) for one in (states, actions, chances, [*returns])]
            for _ in range(EPOCHS):
                for chosen in torch.randperm(len(rollout[0])).chunk(2):
                    state, action, chance, gain = (one[chosen] for one in rollout)
                    value = critic(state).squeeze(-1)
                    advantage = (gain - value).detach()
                    policy = Categorical(logits=actor(state))
                    ratio = (policy.log_prob(action) - chance).exp()
                    limited = ratio.clamp(1 - CLIP, 1 + CLIP)
                    surrogate = torch.min(ratio * advantage, limited * advantage)
                    loss = (gain - value).square().mean() - surrogate.mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            reward = torch.stack(rewards).mean()
            dist.all_reduce(reward)
    if step % 10 == 0 and job.rank == 0:
        print(f"step {step}: reward {reward.item() / job.world_size:.4f}", flush=True)

show(job, actor, critic)
