"""An actor: environments and a copy of the agent, which together make trajectories.

A plain class: `engines.py` runs it in this process or turns it into a remote one.
"""

import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cpu_threads

import numpy as np

from a2c_config import A2CConfig
from atari_agent import AtariAgent, create_agent
from env_utils import action_num, make_vector_env
from rollout import EpisodeStats, Trajectory, compute_gae


class Actor:
    """Steps `env_num` environments with the newest weights.

    Args:
        config: the run's settings.
        index: this actor's place among all, from 0; it picks the seeds.
        agent: an agent to act with, shared with other actors of this process; None makes one on the CPU.
        env_thread_num: C++ threads that step the environments.
    """

    def __init__(
        self, config: A2CConfig, index: int, agent: AtariAgent | None = None, env_thread_num: int = 1
    ) -> None:
        self.config = config
        self.agent = agent or create_agent(config, action_num(config.env_name), "cpu")
        env_seed, action_seed = np.random.SeedSequence([config.seed, index]).generate_state(2)
        self.rng = np.random.default_rng(action_seed)
        self.env = make_vector_env(
            config.env_name,
            config.env_num,
            seed=int(env_seed >> 2),  # leaves room for seed + env_num below 2**31
            env_dim=config.env_dim,
            episodic_life=config.episodic_life,
            num_threads=env_thread_num,
            max_episode_frames=config.max_episode_frames,
        )
        self.obs = self.env.reset()

    def collect(self, weights: dict[str, np.ndarray] | bytes, version: int) -> Trajectory:
        """Take T = `sample_batch_steps` steps in all N environments with `weights`, update number `version`.

        For many remote actors the weights are pickled once: then they come as these bytes.
        """
        self.agent.set_weights(pickle.loads(weights) if isinstance(weights, bytes) else weights)
        *_, trajectory = self.steps(version)
        return trajectory

    def steps(self, version: int, all_obs: np.ndarray | None = None) -> Iterator[Trajectory | None]:
        """`collect` in slices: yields None whenever its environments have work, and the trajectory at last.

        Between two slices another actor can infer while these environments step in their C++ threads.
        The trajectory's observations are written to `all_obs`, uint8 [T, N, 4, D, D], if it is given.
        """
        steps, env_num = self.config.sample_batch_steps, self.config.env_num
        if all_obs is None:
            all_obs = np.empty((steps, *self.obs.shape), np.uint8)
        actions = np.empty((steps, env_num), np.int64)
        rewards, values = np.empty((2, steps, env_num), np.float32)
        dones = np.empty((steps, env_num), bool)
        episodes: list[EpisodeStats] = []
        seconds = {"stepping": 0.0, "inferring": 0.0}

        for t in range(steps):
            start = time.perf_counter()
            all_obs[t] = self.obs
            actions[t], values[t] = self.agent.sample(all_obs[t], self.rng)
            seconds["inferring"] += time.perf_counter() - start
            self.env.send(actions[t])
            yield None
            start = time.perf_counter()
            step = self.env.recv()
            seconds["stepping"] += time.perf_counter() - start
            self.obs, rewards[t], dones[t] = step.obs, step.rewards, step.dones
            if step.final_obs is not None:
                # A time limit is not a death: without this bootstrap a long rally looks worthless.
                final_values = self.agent.value(step.final_obs)
                rewards[t, step.truncated] += self.config.gamma * final_values[step.truncated]
            episodes += step.episodes

        start = time.perf_counter()
        bootstrap_values = self.agent.value(self.obs)
        seconds["inferring"] += time.perf_counter() - start
        advantages, target_values = compute_gae(
            rewards, values, dones, bootstrap_values, self.config.gamma, self.config.gae_lambda
        )
        yield Trajectory(all_obs, actions, advantages, target_values, values, version, episodes, seconds)

    def get_state(self) -> dict[str, Any]:
        """Where this actor stands between two trajectories: arrays, and values ready for JSON."""
        return {"rng": self.rng.bit_generator.state, "env": self.env.get_state(self.obs)}

    def set_state(self, state: dict[str, Any]) -> str:
        """Go on from `get_state`; return why its games begin anew, or "" where they go on."""
        self.rng.bit_generator.state = state["rng"]
        self.obs, reason = self.env.set_state(state["env"])
        return reason

    def close(self) -> None:
        """Stop the environments' threads."""
        self.env.close()


def local_actors(config: A2CConfig, agent: AtariAgent) -> list[Actor]:
    """All actors of a run in this process, sharing `agent` and the cores."""
    threads = cpu_threads.env_threads(config.env_num)
    # At once: the emulator needs some 0.1 s of a core for each environment's first game.
    with ThreadPoolExecutor(config.actor_num) as pool:
        return list(pool.map(lambda index: Actor(config, index, agent, threads), range(config.actor_num)))
