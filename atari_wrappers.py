"""Gymnasium wrappers for one Atari game: how it starts, how it ends, what a lost life means.

    env = GameStart(gymnasium.make("ALE/Breakout-v5", frameskip=1), seed=0)

`env_utils.make_env` puts them around gymnasium's own Atari wrappers.
"""

from typing import Any

import gymnasium
import numpy as np

NOOP = 0  # the first action of every game's minimal set

Reset = tuple[Any, dict[str, Any]]
Step = tuple[Any, float, bool, bool, dict[str, Any]]


def emulator_seed(seed: int) -> int:
    """Bring a seed into the range that ALE takes, 0..2**31-1."""
    return seed % 2**31


class GameStart(gymnasium.Wrapper):
    """Starts and ends a game, one emulator frame per step, just as ALE's C++ vector env does.

    A start is a reset, one frame of FIRE where the game has that action, then no-ops: k frames in all, k
    uniform in 0..noop_max-1 (but at least the FIRE). `max_episode_frames` after it the game is truncated.
    """

    def __init__(
        self,
        env: gymnasium.Env,
        seed: int | None = None,
        noop_max: int = 30,
        max_episode_frames: int = 108_000,
    ) -> None:
        super().__init__(env)
        meanings = env.unwrapped.get_action_meanings()
        self._fire = [meanings.index("FIRE")] if "FIRE" in meanings else []
        self._seed, self._rng = seed, np.random.RandomState()
        self._noop_max, self._max_episode_frames = noop_max, max_episode_frames
        self._frames = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Start a game; the first start is seeded by the constructor's seed unless another is given."""
        seed, self._seed = self._seed if seed is None else seed, None
        if seed is not None:
            # Straight to ALE, as the C++ env does it: AtariEnv.reset(seed) would hash the seed first.
            self._rng = np.random.RandomState(emulator_seed(seed))
            self.unwrapped.ale.setInt("random_seed", emulator_seed(seed))
            self.unwrapped.load_game()
        obs, info = self.env.reset(options=options)
        for action in self._fire + [NOOP] * (self._draw_start_frames() - len(self._fire)):
            obs, _, terminated, truncated, info = self.env.step(action)
            if terminated or truncated:
                obs, info = self.env.reset(options=options)
        self._frames = 0
        return obs, info

    def step(self, action: int) -> Step:
        """Play one emulator frame."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._frames += 1
        truncated = not terminated and (truncated or self._frames >= self._max_episode_frames)
        return obs, reward, terminated, truncated, info

    def _draw_start_frames(self) -> int:
        # NumPy's legacy generator is std::mt19937, and libstdc++'s uniform_int_distribution scales its 32
        # bits like this (apart from a retry once in some 2**28 draws).
        bits = int(self._rng.randint(2**32, dtype=np.uint32))
        return bits * max(self._noop_max, 1) >> 32


class EpisodicLife(gymnasium.Wrapper):
    """Reports a lost life as a termination; the reset after it goes on with the same game, by one no-op."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self._lives = 0
        self._game_goes_on = False

    def step(self, action: int) -> Step:
        """Step on; `terminated` is also true where a life was lost, but not the last."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        life_lost = 0 < info["lives"] < self._lives
        self._lives = info["lives"]
        self._game_goes_on = life_lost and not (terminated or truncated)
        return obs, reward, terminated or life_lost, truncated and not life_lost, info

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Go on after a lost life, else start a game.

        Where the no-op itself ended the game, the next one starts, and `info` has the old one's `episode`.
        """
        goes_on, self._game_goes_on = self._game_goes_on and seed is None, False
        ended_game = {}
        if goes_on:
            obs, _, terminated, truncated, info = self.env.step(NOOP)
            if terminated or truncated:
                goes_on = False
                ended_game = {"episode": info["episode"]} if "episode" in info else {}
        if not goes_on:
            obs, info = self.env.reset(seed=seed, options=options)
        self._lives = info["lives"]
        return obs, info | ended_game
