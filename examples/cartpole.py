"""The two sides of a parameter server as plain classes: `parameter_server.py` runs them on Ray and on PARL."""

import time
from collections import deque
from collections.abc import Callable

import gymnasium
import numpy as np

GAMES = 4  # per gradient
MAX_UPDATES, SOLVED = 400, 400  # a game ends after 500 steps; solved: 400 on average


class Server:
    """Owns some of the parameters and their moments: Adam, Kingma & Ba 2015, arXiv:1412.6980."""

    def __init__(self, parameters: np.ndarray, learning_rate: float = 0.1) -> None:
        self.parameters, self.learning_rate = parameters, learning_rate
        self.moments, self.updates = np.zeros((2, *parameters.shape)), 0

    def apply(self, gradients: np.ndarray) -> np.ndarray:
        """Take one step uphill; return the new parameters."""
        self.updates += 1
        for moment, beta, value in zip(self.moments, (0.9, 0.999), (gradients, gradients**2), strict=True):
            moment += (1 - beta) * (value - moment)
        mean, square = self.moments[0] / (1 - 0.9**self.updates), self.moments[1] / (1 - 0.999**self.updates)
        self.parameters = self.parameters + self.learning_rate * mean / (np.sqrt(square) + 1e-8)
        return self.parameters


class Worker:
    """Plays CartPole with the parameters it is given: REINFORCE (Williams 1992) with a linear policy."""

    def __init__(self, seed: int) -> None:
        self.env, self.rng = gymnasium.make("CartPole-v1"), np.random.default_rng(seed)
        self.env.reset(seed=seed)

    def gradients(self, *shards: np.ndarray) -> tuple[float, ...]:
        """Play some games with the parameters, float64 [5] in all; return their mean length, then gradients.

        The gradients come cut up as the parameters did, so that each shard goes to its own server.
        """
        weights, scores, returns, lengths = np.concatenate(shards), [], [], []
        for _ in range(GAMES):
            obs, done, length = np.append(self.env.reset()[0], 1), False, 0
            while not done:
                push_right = 1 / (1 + np.exp(-obs @ weights))
                action = int(self.rng.random() < push_right)
                scores.append((action - push_right) * obs)  # d log pi(action | obs) / d weights
                obs, _, terminated, truncated, _ = self.env.step(action)
                obs, done, length = np.append(obs, 1), terminated or truncated, length + 1
            returns.append((1 - 0.99 ** np.arange(length, 0, -1)) / 0.01)  # discounted, reward 1 per step
            lengths.append(length)
        advantages = np.concatenate(returns)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        gradients = (np.array(scores) * advantages[:, None]).mean(0)
        return float(np.mean(lengths)), *np.split(gradients, np.cumsum([len(shard) for shard in shards])[:-1])


def until_solved(engine: str, server_num: int, next_length: Callable[[], float]) -> None:
    """Take mean lengths of games as workers deliver them, until the last 20 average `SOLVED`."""
    lengths, updates, start = deque([0.0] * 20, maxlen=20), 0, time.perf_counter()
    while np.mean(lengths) < SOLVED and updates < MAX_UPDATES:
        lengths.append(next_length())
        updates += 1
    seconds, mean = time.perf_counter() - start, np.mean(lengths)
    print(f"{engine}, servers: {server_num}; games of {mean:.0f} steps after {updates} updates, {seconds:.1f} s")
