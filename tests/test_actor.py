import numpy as np
import pytest

from a2c_config import A2CConfig
from actor import Actor
from atari_agent import create_agent
from env_utils import action_num

SETTINGS = {"actor_num": 1, "env_num": 3, "sample_batch_steps": 5}


def make_actor(**settings):
    return Actor(A2CConfig(**{**SETTINGS, **settings}), index=0)


def test_a_trajectory_has_the_declared_shapes_and_dtypes():
    actor = make_actor()
    trajectory = actor.collect(actor.agent.get_weights(), version=4)
    assert (trajectory.obs.shape, trajectory.obs.dtype) == ((5, 3, 4, 44, 44), np.uint8)
    assert (trajectory.actions.shape, trajectory.actions.dtype) == ((5, 3), np.int64)
    for name in ("advantages", "target_values", "values"):
        array = getattr(trajectory, name)
        assert (array.shape, array.dtype) == ((5, 3), np.float32)
    assert trajectory.weights_version == 4
    assert set(trajectory.seconds) == {"stepping", "inferring"}


def test_values_are_those_of_the_observations_that_were_acted_on():
    actor = make_actor()
    trajectory = actor.collect(actor.agent.get_weights(), version=0)
    expected = actor.agent.value(trajectory.obs.reshape(-1, 4, 44, 44)).reshape(5, 3)
    np.testing.assert_allclose(trajectory.values, expected, rtol=1e-4, atol=1e-5)


def test_the_next_trajectory_goes_on_where_the_last_one_ended():
    actor = make_actor()
    weights = actor.agent.get_weights()
    actor.collect(weights, version=0)
    next_obs = actor.obs.copy()
    np.testing.assert_array_equal(actor.collect(weights, version=1).obs[0], next_obs)


def test_same_seed_gives_equal_trajectories_and_another_actor_plays_other_games():
    config = A2CConfig(**SETTINGS)
    weights = create_agent(config, action_num(config.env_name), "cpu").get_weights()
    first, second, other = (Actor(config, index).collect(weights, 0) for index in (0, 0, 1))
    for name in ("obs", "actions", "advantages", "target_values"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    assert (first.obs != other.obs).any()


def test_the_number_of_env_threads_does_not_change_a_trajectory():
    config = A2CConfig(**SETTINGS)
    one, two = (Actor(config, 0, env_thread_num=threads) for threads in (1, 2))
    weights = one.agent.get_weights()
    for version in range(3):
        first, second = one.collect(weights, version), two.collect(weights, version)
    np.testing.assert_array_equal(first.obs, second.obs)


def test_a_time_limit_bootstraps_with_the_value_of_the_final_observation():
    # With lambda = 0 the target of a cut-off step is r + gamma * V(final_obs), not r alone.
    actor = make_actor(max_episode_frames=40, gae_lambda=0.0, sample_batch_steps=12)
    weights = actor.agent.get_weights()
    weights["value_head.weight"] = np.zeros_like(weights["value_head.weight"])
    weights["value_head.bias"] = np.float32([3.0])  # V = 3 everywhere
    trajectory = actor.collect(weights, version=0)
    np.testing.assert_allclose(trajectory.target_values, 0.99 * 3.0, rtol=1e-5)  # Pong: no points this early
    assert len(trajectory.episodes) >= 3
    assert all(episode.length == 10 for episode in trajectory.episodes)


def test_a_lost_life_is_terminal_with_episodic_life_and_the_score_stays_the_whole_game():
    actor = make_actor(env_name="BreakoutNoFrameskip-v4", episodic_life=True, gae_lambda=0.0)
    weights = actor.agent.get_weights()
    weights["value_head.weight"] = np.zeros_like(weights["value_head.weight"])
    weights["value_head.bias"] = np.float32([3.0])
    terminal_steps, episodes = 0, []
    for version in range(400):
        trajectory = actor.collect(weights, version)
        terminal_steps += int(np.isclose(trajectory.target_values, 0.0).sum())  # r = 0 and nothing after
        episodes += trajectory.episodes
        if len(episodes) >= 2:
            break
    assert episodes and terminal_steps >= 4 * len(episodes)  # five lives a game
    assert all(episode.raw_return >= 0 and episode.length > 50 for episode in episodes)


def test_a_wrong_game_is_an_error_with_the_nearest_name():
    with pytest.raises(ValueError, match="PongNoFrameskip-v4"):
        make_actor(env_name="PongNoFrameSkip-v4")
