import gymnasium
import numpy as np

from atari_wrappers import NOOP, GameStart
from env_utils import make_env

FIRE = 1  # in Breakout
# Breakout with noop_max=0 and FIRE only: the paddle rests, and the first of the 5 balls is lost at this step.
FIRST_LOST_BALL = 23


def test_no_op_starts_vary_and_repeat_with_the_seed():
    def start_frames(seed):
        env = make_env("PongNoFrameskip-v4", seed=seed)
        return [env.reset()[1]["episode_frame_number"] for _ in range(20)]

    starts = start_frames(0)
    # floor(30 u) of std::mt19937(0)'s first draw u = 0.549, here the FIRE and 15 no-ops.
    assert starts[0] == 16
    assert min(starts) >= 1 and max(starts) <= 29 and len(set(starts)) > 8
    assert starts == start_frames(0) != start_frames(1)


def single_env_after_a_lost_ball(**settings):
    """Breakout with episodic life, at the end of its first life."""
    env = make_env("BreakoutNoFrameskip-v4", seed=0, episodic_life=True, noop_max=0, **settings)
    env.reset()
    for _ in range(FIRST_LOST_BALL + 1):
        obs, _, terminated, truncated, info = env.step(FIRE)
    assert terminated and not truncated and info["lives"] == 4 and "episode" not in info
    return env, obs


def test_reset_after_a_lost_life_goes_on_by_one_no_op():
    env, last_obs = single_env_after_a_lost_ball()
    obs, info = env.reset()
    assert info["lives"] == 4 and info["episode_frame_number"] == 1 + 4 * (FIRST_LOST_BALL + 1) + 4
    np.testing.assert_array_equal(obs[:3], last_obs[1:])


def test_reset_whose_no_op_ends_the_game_starts_a_new_one():
    limit = 4 * (FIRST_LOST_BALL + 2)  # the no-op is the game's last step
    env, _ = single_env_after_a_lost_ball(max_episode_frames=limit)
    obs, info = env.reset()
    assert info["lives"] == 5 and info["episode_frame_number"] == 1
    assert info["episode"]["l"] == limit // 4  # the old game's score is not lost
    np.testing.assert_array_equal(obs, make_env("BreakoutNoFrameskip-v4", noop_max=0).reset()[0])
    assert not env.step(FIRE)[2]


def test_reset_in_the_middle_of_a_life_or_with_a_seed_starts_a_new_game():
    env, _ = single_env_after_a_lost_ball()
    assert env.reset(seed=3)[1]["lives"] == 5
    env, _ = single_env_after_a_lost_ball()
    env.reset()
    env.step(NOOP)
    assert env.reset()[1]["lives"] == 5


def test_fire_reset_returns_what_fire_led_to():
    env = GameStart(gymnasium.make("ALE/Breakout-v5", frameskip=1), noop_max=0)
    obs, info = env.reset(seed=0)
    assert info["episode_frame_number"] == 1
    np.testing.assert_array_equal(obs, env.unwrapped.ale.getScreenRGB())


def test_fire_reset_whose_fire_ends_the_game_starts_over():
    one_frame_game = gymnasium.make("ALE/Breakout-v5", frameskip=1, max_num_frames_per_episode=1)
    obs, info = GameStart(one_frame_game, noop_max=0).reset(seed=0)
    assert info["episode_frame_number"] == 0 and not one_frame_game.unwrapped.ale.game_over()
    np.testing.assert_array_equal(obs, one_frame_game.reset()[0])
