"""Atari environments: `make_env` for one game, `make_vector_env` for many at once.

    env = make_env("PongNoFrameskip-v4", seed=0)
    vector_env = make_vector_env("ALE/Breakout-v5", env_num=16, seed=0, episodic_life=True)

Both preprocess as Mnih et al. 2015, doi:10.1038/nature14236: a random start, frame skip 4, the maximum of the
last two frames, grey, 84x84, the last 4 frames stacked (zeros before a game's first). The same seed and
actions give the same observations from both. Scores are raw and of whole games.

`atari_games` has the names there are. None of them brings a frame skip of its own: under ours, the emulator
always goes one frame at a time.
"""

import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from ale_py.registration import rom_id_to_name
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, RecordEpisodeStatistics

from atari_games import AtariGame, action_num, resolve_env_name
from atari_wrappers import NOOP, EpisodicLife, GameStart, emulator_seed
from rollout import EpisodeStats

__all__ = [
    "AtariGame",
    "EpisodeStats",
    "VectorEnv",
    "VectorStep",
    "action_num",
    "make_env",
    "make_vector_env",
    "resolve_env_name",
]

FRAME_SKIP = 4
STACK_SIZE = 4


@dataclass
class VectorStep:
    """What one step of N environments gave; every array is new and may be kept.

    Where a game ended, `obs` is already the first of that environment's next game.
    """

    obs: np.ndarray  # uint8 [N, 4, D, D]
    rewards: np.ndarray  # float32 [N], the sign of the raw reward
    dones: np.ndarray  # bool [N]: game over, time limit or, with episodic life, a lost life
    truncated: np.ndarray  # bool [N]: time limit
    final_obs: np.ndarray | None  # uint8 [N, 4, D, D], to be read where truncated; None if nothing was
    episodes: list[EpisodeStats]  # the games that ended in this step


def make_env(
    env_name: str,
    seed: int | None = None,
    env_dim: int = 84,
    episodic_life: bool = False,
    render_mode: str | None = None,
    noop_max: int = 30,
    max_episode_frames: int = 108_000,
) -> gymnasium.Env:
    """Make one environment: `obs` uint8 [4, env_dim, env_dim], newest frame last; RAW rewards.

    The first `reset()` uses `seed`. Where a whole game ends, `info["episode"]` has its raw score `r` and its
    length `l` in sample steps. Observations equal those of `make_vector_env`'s env of the same seed, except
    that with `episodic_life` a reset after a lost life plays one no-op, where the vector env just plays on.

    Raises:
        ValueError, FileNotFoundError: as `resolve_env_name`.
    """
    game = resolve_env_name(env_name)
    env = gymnasium.make(
        f"ALE/{rom_id_to_name(game.rom_id)}-v5",
        disable_env_checker=True,
        obs_type="grayscale",
        frameskip=1,
        repeat_action_probability=game.repeat_action_probability,
        # ALE would count the frames of the start too, and the vector env does not: GameStart counts.
        max_num_frames_per_episode=None,
        render_mode=render_mode,
    )
    env = GameStart(env, seed, noop_max, max_episode_frames)
    env = AtariPreprocessing(env, noop_max=0, frame_skip=FRAME_SKIP, screen_size=env_dim)
    env = FrameStackObservation(env, STACK_SIZE, padding_type="zero")
    env = RecordEpisodeStatistics(env)
    return EpisodicLife(env) if episodic_life else env


class VectorEnv:
    """N environments of one game, stepped in C++ threads: `step`, or `send`, other work, `recv`.

    With episodic life a lost life is a done, but the game and its frame stack go on.
    """

    def __init__(self, env: AtariVectorEnv, seed: int, sticky: bool = False) -> None:
        self.num_envs = env.num_envs
        self.action_num = int(env.single_action_space.n)
        self._env: AtariVectorEnv | None = env
        self._sticky = sticky
        self._seeds = np.array([emulator_seed(seed + index) for index in range(self.num_envs)])
        self._started = self._waiting = False
        self._games = np.zeros(self.num_envs, dtype=np.int64)  # begun since the seeding
        self._sent: list[np.ndarray] = []  # uint8 [N] per step, at least since the oldest running game began
        self._raw_returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, dtype=np.int64)
        self._earlier_frames = np.zeros(self.num_envs, dtype=np.int64)  # emulator frames of earlier games

    def reset(self) -> np.ndarray:
        """Start N games and return `obs`, uint8 [N, 4, D, D]; only the first call seeds them."""
        if self._waiting:
            self.recv()
        obs, info = self._env.reset(seed=None if self._started else self._seeds)
        self._started = True
        self._games += 1
        self._raw_returns[:], self._lengths[:] = 0, 0
        self._earlier_frames = info["frame_number"] - info["episode_frame_number"]
        return obs

    def send(self, actions: np.ndarray) -> None:
        """Start stepping with `actions`, int64 [N]; `recv` has the result.

        Raises:
            ValueError: where there are not N actions, each in 0..action_num-1.
        """
        actions = np.asarray(actions)
        # ALE's worker would drop an action out of range, and recv wait for it for ever.
        if (
            actions.shape != (self.num_envs,)
            or not np.issubdtype(actions.dtype, np.integer)
            or not set(actions.tolist()) <= set(range(self.action_num))
        ):
            raise ValueError(f"actions must be {self.num_envs} integers in 0..{self.action_num - 1}: {actions}")
        assert self._started and not self._waiting, "send() comes after reset(), and once before each recv()"
        self._env.send(actions.astype(np.int64, copy=False))
        self._sent.append(actions.astype(np.uint8))
        self._waiting = True

    def recv(self) -> VectorStep:
        """Wait for the step that `send` started."""
        assert self._waiting, "recv() comes after send(); without it there is nothing to wait for"
        obs, raw_rewards, terminated, truncated, info = self._env.recv()
        self._waiting = False
        self._raw_returns += raw_rewards
        self._lengths += 1
        return VectorStep(
            obs=obs,
            rewards=np.sign(raw_rewards).astype(np.float32),
            dones=terminated | truncated,
            truncated=truncated,
            final_obs=info["final_obs"] if truncated.any() else None,
            episodes=self._finish_games(info),
        )

    def step(self, actions: np.ndarray) -> VectorStep:
        """`send` and `recv` in one."""
        self.send(actions)
        return self.recv()

    def close(self) -> None:
        """Stop the threads; closing twice does no harm."""
        self._env = None

    def _finish_games(self, info: dict[str, Any]) -> list[EpisodeStats]:
        """Take the scores of the games that ended in this step and begin new ones."""
        # Lives and dones cannot tell a game's end from a lost life; this difference moves only at an end.
        earlier_frames = info["frame_number"] - info["episode_frame_number"]
        ended = earlier_frames != self._earlier_frames
        self._earlier_frames = earlier_frames
        episodes = [
            EpisodeStats(float(self._raw_returns[i]), int(self._lengths[i])) for i in np.flatnonzero(ended)
        ]
        self._raw_returns[ended], self._lengths[ended] = 0, 0
        self._games[ended] += 1
        needed = self._lengths.max()
        if len(self._sent) >= 2 * needed + 1000:
            del self._sent[: len(self._sent) - needed]
        return episodes

    def get_state(self, obs: np.ndarray) -> dict[str, np.ndarray]:
        """What `set_state` needs to come back to this point, where `obs` was the last to be seen.

        The emulators' own state cannot be read, but seeds, numbers of games and actions lead to it again.
        """
        assert not self._waiting, "get_state() comes after recv()"
        sent = np.array(self._sent, dtype=np.uint8).reshape(-1, self.num_envs)
        return {
            "seeds": self._seeds.copy(),
            "games": self._games.copy(),
            "lengths": self._lengths.copy(),
            "raw_returns": self._raw_returns.copy(),
            # of the running games, one environment's after the other's
            "actions": np.concatenate([sent[len(sent) - length :, i] for i, length in enumerate(self._lengths)]),
            "obs_sha256": _sha256(obs),
        }

    def set_state(self, state: dict[str, np.ndarray]) -> tuple[np.ndarray, str]:
        """Come back to where `get_state` was called: begin as many games, and play the running ones again.

        Returns:
            obs: uint8 [N, 4, D, D].
            reason: why new games were begun instead; empty where all is as it was.

        Raises:
            ValueError: where the state is of another number of environments.
        """
        if state["seeds"].shape != self._seeds.shape:
            raise ValueError(f"the state is of {len(state['seeds'])} environments, not of {self.num_envs}")
        if self._sticky:
            reason = "sticky actions draw from the emulator's own random numbers, whose state cannot be read"
        else:
            obs = self._replay(state)
            if (_sha256(obs) == state["obs_sha256"]).all():
                return obs, ""
            reason = "played again, they show other pictures (another version of ale-py, or other settings?)"
        # Seeds of their own, or the run's first games would all be seen once more.
        seeds = np.random.SeedSequence([*map(int, state["seeds"]), *map(int, state["games"])])
        self._seeds = seeds.generate_state(self.num_envs).astype(np.int64) >> 1
        self._started, self._games[:], self._sent = False, 0, []
        return self.reset(), reason

    def _replay(self, state: dict[str, np.ndarray]) -> np.ndarray:
        if not self._started:
            self._env.reset()  # only then does ALE reset single environments
            self._started = True
        lengths = state["lengths"]
        steps = int(lengths.max())
        played = np.full((steps, self.num_envs), NOOP, dtype=np.int64)  # right-aligned: all arrive together
        ends = np.cumsum(lengths)
        for i, (length, end) in enumerate(zip(lengths, ends, strict=True)):
            played[steps - length :, i] = state["actions"][end - length : end]
        for t in range(steps + 1):
            for i in np.flatnonzero(lengths == steps - t):
                obs, info = self._begin_game(i, state["seeds"][i], state["games"][i])
            if t < steps:
                obs, _, _, _, info = self._env.step(played[t])
        self._seeds, self._games, self._lengths = (state[name].copy() for name in ("seeds", "games", "lengths"))
        self._raw_returns = state["raw_returns"].copy()
        self._earlier_frames = info["frame_number"] - info["episode_frame_number"]
        self._sent = list(played.astype(np.uint8))
        return obs

    def _begin_game(self, index: int, seed: int, number: int) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin game `number`, from 1, after the seeding of one environment; return the `obs` and info of all."""
        chosen = {"reset_mask": np.arange(self.num_envs) == index}
        obs, info = self._env.reset(seed=np.array([seed]), options=chosen)
        # Each start draws its no-ops from the generator that the seed began.
        for _ in range(number - 1):
            obs, info = self._env.reset(options=chosen)
        return obs, info


class ObservationStatistics(NamedTuple):
    """What random play shows: `mean` float32 [D, D] of each pixel, and one `std` of all; in grey levels."""

    mean: np.ndarray
    std: float


def observation_statistics(
    env_name: str, env_dim: int = 84, env_num: int = 8, steps: int = 250, num_threads: int = 1
) -> ObservationStatistics:
    """Play `env_num` games at random for `steps` steps: the same result each time, whatever `num_threads`.

    Raises:
        ValueError, FileNotFoundError: as `resolve_env_name`.
    """
    env = make_vector_env(env_name, env_num, env_dim=env_dim, num_threads=num_threads)
    rng = np.random.default_rng(0)
    env.reset()
    total, total_squares = np.zeros((2, env_dim, env_dim), np.int64)
    for _ in range(steps):
        frames = env.step(rng.integers(env.action_num, size=env_num)).obs[:, -1].astype(np.int64)
        total += frames.sum(axis=0)
        total_squares += np.square(frames).sum(axis=0)
    env.close()
    mean = total / (steps * env_num)
    variance = total_squares / (steps * env_num) - mean**2
    return ObservationStatistics(mean.astype(np.float32), max(1.0, float(np.sqrt(variance.mean()))))


def _sha256(obs: np.ndarray) -> np.ndarray:
    return np.frombuffer(hashlib.sha256(np.ascontiguousarray(obs)).digest(), dtype=np.uint8)


def make_vector_env(
    env_name: str,
    env_num: int,
    seed: int = 0,
    env_dim: int = 84,
    episodic_life: bool = False,
    num_threads: int = 1,
    noop_max: int = 30,
    max_episode_frames: int = 108_000,
) -> VectorEnv:
    """Make `env_num` environments of one game in C++; env i has the seed `seed + i`.

    A run depends on seeds and actions alone, not on `num_threads`.

    Raises:
        ValueError, FileNotFoundError: as `resolve_env_name`.
    """
    game = resolve_env_name(env_name)
    env = AtariVectorEnv(
        game.rom_id,
        env_num,
        num_threads=num_threads,
        max_num_frames_per_episode=max_episode_frames,
        repeat_action_probability=game.repeat_action_probability,
        autoreset_mode=AutoresetMode.SAME_STEP,
        img_height=env_dim,
        img_width=env_dim,
        stack_num=STACK_SIZE,
        frameskip=FRAME_SKIP,
        noop_max=noop_max,
        # ale-py's own `episodic_life` would end the whole game with a life.
        life_loss_info=episodic_life,
        reward_clipping=False,
    )
    return VectorEnv(env, seed, sticky=game.repeat_action_probability > 0)
