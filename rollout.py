"""What actors hand to the learner: `Trajectory` and `EpisodeStats`, and the advantage estimate. NumPy only."""

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class EpisodeStats:
    """The score of one whole game.

    raw_return: the game's own points, before clipping, over all lives.
    length: sample steps (1 sample step = 4 emulator frames).
    """

    raw_return: float
    length: int


@dataclass
class Trajectory:
    """T sample steps of N environments, and how an actor saw them.

    Pickled, each frame travels once: a stack of four shares three frames with the stack before it.
    """

    obs: np.ndarray  # uint8 [T, N, 4, D, D]
    actions: np.ndarray  # int64 [T, N]
    advantages: np.ndarray  # float32 [T, N]
    target_values: np.ndarray  # float32 [T, N]
    values: np.ndarray  # float32 [T, N]
    weights_version: int
    episodes: list[EpisodeStats] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # by activity: stepping, inferring

    @classmethod
    def from_dict(cls, fields: dict) -> "Trajectory":
        """The inverse of `dataclasses.asdict`."""
        return cls(**fields | {"episodes": [EpisodeStats(**episode) for episode in fields["episodes"]]})

    def __getstate__(self) -> dict:
        state = dict(self.__dict__)
        state["obs"] = pack_stacks(self.obs)
        return state

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.obs = unpack_stacks(*state["obs"])


def join(arrays: list[np.ndarray]) -> np.ndarray:
    """Arrays of one shape [T, N, ...], one after the other, as [A*T*N, ...].

    Where they lie side by side in one buffer already, the result is a view of it and nothing is copied.
    """
    first, buffer = arrays[0], arrays[0].base
    if buffer is not None and buffer.flags.c_contiguous and buffer.size == first.size * len(arrays):
        addresses = [buffer.ctypes.data + index * first.nbytes for index in range(len(arrays))]
        if [array.ctypes.data for array in arrays] == addresses:
            return buffer.reshape(-1, *first.shape[2:])
    return np.concatenate(arrays).reshape(-1, *first.shape[2:])


def pack_stacks(obs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split frame stacks, uint8 [T, N, S, D, D], so that no frame stands twice.

    Returns:
        newest: uint8 [T, N, D, D], the newest frame of every stack.
        fresh: bool [T, N], where a stack does not continue the one before it (always at t = 0).
        fresh_stacks: uint8 [K, S-1, D, D], the older frames of those K stacks.
    """
    fresh = np.ones(obs.shape[:2], dtype=bool)
    for t in range(1, len(obs)):
        fresh[t] = (obs[t, :, :-1] != obs[t - 1, :, 1:]).any(axis=(1, 2, 3))
    return np.ascontiguousarray(obs[:, :, -1]), fresh, obs[:, :, :-1][fresh]


def unpack_stacks(newest: np.ndarray, fresh: np.ndarray, fresh_stacks: np.ndarray) -> np.ndarray:
    """Rebuild what `pack_stacks` split; the result equals its input exactly."""
    steps, env_num, *frame_shape = newest.shape
    obs = np.empty((steps, env_num, fresh_stacks.shape[1] + 1, *frame_shape), newest.dtype)
    obs[:, :, -1] = newest
    obs[:, :, :-1][fresh] = fresh_stacks
    for t in range(1, steps):
        going_on = ~fresh[t]
        obs[t, going_on, :-1] = obs[t - 1, going_on, 1:]
    return obs


def compute_gae(
    rewards: np.ndarray,
    values: np.ndarray,
    dones: np.ndarray,
    bootstrap_values: np.ndarray,
    gamma: float,
    gae_lambda: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Return `advantages` and `target_values`, both float32 [T, N].

    Args:
        rewards, values: float32 [T, N].
        dones: [T, N], true where step t ended an episode: nothing flows back across it.
        bootstrap_values: float32 [N], V of the observation after the last step.
        gamma, gae_lambda: discount and lambda per sample step.

    Schulman et al. 2016, arXiv:1506.02438, eq. 16: A_t = sum_l (gamma lambda)^l delta_{t+l}.
    """
    advantages = np.empty_like(rewards, dtype=np.float32)
    going_on = 1.0 - dones.astype(np.float32)
    next_values, next_advantages = bootstrap_values, np.zeros_like(bootstrap_values)
    for t in reversed(range(len(rewards))):
        deltas = rewards[t] + gamma * going_on[t] * next_values - values[t]
        advantages[t] = next_advantages = deltas + gamma * gae_lambda * going_on[t] * next_advantages
        next_values = values[t]
    return advantages, advantages + values
