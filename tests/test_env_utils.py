import os

import numpy as np
import pytest

from atari_wrappers import NOOP
from env_utils import make_env, make_vector_env, observation_statistics

FIRE = 1  # in Breakout
# Breakout with noop_max=0 and FIRE only: the paddle rests, and each of the 5 balls is lost at these steps.
BREAKOUT_LOST_BALLS = [23, 48, 72, 96, 120]


def vector_rollout(vector_env, all_actions):
    """Reset, take T steps of actions [T, N], close; return the first obs and the steps."""
    first_obs = vector_env.reset()
    steps = [vector_env.step(actions) for actions in all_actions]
    vector_env.close()
    return first_obs, steps


@pytest.mark.parametrize(
    "env_name, max_episode_frames",
    [
        ("BreakoutNoFrameskip-v4", 108_000),  # real game overs
        ("PongNoFrameskip-v4", 302),  # time limits, in the middle of a step
        ("SpaceInvadersNoFrameskip-v4", 300),
        ("ALE/Freeway-v5", 300),  # sticky actions, and no FIRE
    ],
)
def test_vector_and_single_env_agree_for_the_same_seed_and_actions(env_name, max_episode_frames, rng):
    seed, steps = 7, 200
    vector_env = make_vector_env(env_name, 2, seed=seed, max_episode_frames=max_episode_frames)
    all_actions = rng.integers(vector_env.action_num, size=(steps, 2))
    vector_obs, vector_steps = vector_rollout(vector_env, all_actions)
    ended_games = 0
    for i in range(2):
        env = make_env(env_name, seed=seed + i, max_episode_frames=max_episode_frames)
        obs, _ = env.reset()
        np.testing.assert_array_equal(vector_obs[i], obs)
        for actions, vector_step in zip(all_actions, vector_steps, strict=True):
            obs, reward, terminated, truncated, info = env.step(actions[i])
            assert (vector_step.dones[i], vector_step.truncated[i]) == (terminated or truncated, truncated)
            assert vector_step.rewards[i] == np.sign(reward)
            if truncated:
                np.testing.assert_array_equal(vector_step.final_obs[i], obs)
            if terminated or truncated:
                ended_games += 1
                episode = info["episode"]
                assert (episode["r"], episode["l"]) in [(e.raw_return, e.length) for e in vector_step.episodes]
                obs, _ = env.reset()
            np.testing.assert_array_equal(vector_step.obs[i], obs)
    assert ended_games == sum(len(step.episodes) for step in vector_steps) >= 2


def test_observation_statistics_are_those_of_random_play_whatever_the_threads():
    settings = {"env_dim": 44, "env_num": 4, "steps": 60}
    statistics = observation_statistics("PongNoFrameskip-v4", **settings)
    again = observation_statistics("PongNoFrameskip-v4", num_threads=2, **settings)
    np.testing.assert_array_equal(statistics.mean, again.mean)
    assert statistics.std == again.std
    env, rng = make_vector_env("PongNoFrameskip-v4", 4, env_dim=44), np.random.default_rng(0)
    _, steps = vector_rollout(env, rng.integers(env.action_num, size=(60, 4)))
    frames = np.array([step.obs[:, -1] for step in steps], dtype=np.float64)
    np.testing.assert_allclose(statistics.mean, frames.mean(axis=(0, 1)), atol=1e-4)
    assert statistics.std == pytest.approx(np.sqrt(frames.var(axis=(0, 1)).mean()), rel=1e-6)


def test_vector_and_single_env_agree_at_other_sizes():
    vector_env = make_vector_env("PongNoFrameskip-v4", 1, env_dim=36)
    obs, (step,) = vector_rollout(vector_env, np.array([[2]]))
    env = make_env("PongNoFrameskip-v4", seed=0, env_dim=36)
    assert obs.shape == (1, 4, 36, 36) and env.observation_space.shape == (4, 36, 36)
    np.testing.assert_array_equal(obs[0], env.reset()[0])
    np.testing.assert_array_equal(step.obs[0], env.step(2)[0])


def test_a_game_starts_with_one_frame_and_three_of_zeros():
    obs, _ = make_env("BreakoutNoFrameskip-v4", seed=0).reset()
    assert obs.dtype == np.uint8
    assert [bool(frame.any()) for frame in obs] == [False, False, False, True]


def test_a_new_frame_enters_the_stack_at_its_end():
    obs, (step,) = vector_rollout(make_vector_env("PongNoFrameskip-v4", 1), np.array([[NOOP]]))
    np.testing.assert_array_equal(step.obs[0, :3], obs[0, 1:])


@pytest.mark.parametrize("env_name", ["PongNoFrameskip-v4", "Pong-v4", "ALE/Pong-v5"])
def test_a_step_is_four_emulator_frames_under_every_name(env_name):
    env = make_env(env_name, seed=0)
    _, info = env.reset()
    frames = [info["episode_frame_number"]] + [env.step(NOOP)[4]["episode_frame_number"] for _ in range(5)]
    assert np.diff(frames).tolist() == [4] * 5
    _, steps = vector_rollout(make_vector_env(env_name, 1, max_episode_frames=12), np.zeros((6, 1), int))
    assert [step.truncated[0] for step in steps] == [False, False, True] * 2


def test_sticky_actions_repeat_with_the_seed_and_change_the_game(rng):
    all_actions = rng.integers(3, size=(60, 1))

    def all_obs(env_name):
        return np.stack(
            [step.obs for step in vector_rollout(make_vector_env(env_name, 1, noop_max=0), all_actions)[1]]
        )

    sticky_obs = all_obs("ALE/Freeway-v5")
    np.testing.assert_array_equal(sticky_obs, all_obs("ALE/Freeway-v5"))
    assert not np.array_equal(sticky_obs, all_obs("FreewayNoFrameskip-v4"))


def test_a_run_does_not_depend_on_the_number_of_threads(rng):
    all_actions = rng.integers(4, size=(40, 3))
    one, two = (
        vector_rollout(
            make_vector_env("ALE/Breakout-v5", 3, num_threads=num_threads, max_episode_frames=60), all_actions
        )[1]
        for num_threads in (1, 2)
    )
    for step, other in zip(one, two, strict=True):
        np.testing.assert_array_equal(step.obs, other.obs)
        np.testing.assert_array_equal(step.rewards, other.rewards)
        assert step.episodes == other.episodes


def test_environment_i_has_the_seed_plus_i():
    both = make_vector_env("FreewayNoFrameskip-v4", 2, seed=4).reset()
    second = make_vector_env("FreewayNoFrameskip-v4", 1, seed=5).reset()
    np.testing.assert_array_equal(both[1], second[0])
    assert not np.array_equal(both[0], both[1])


def test_a_seed_may_be_of_any_size():
    make_vector_env("FreewayNoFrameskip-v4", 2, seed=2**31 - 1).reset()
    np.testing.assert_array_equal(
        make_vector_env("FreewayNoFrameskip-v4", 1, seed=2**32 + 5).reset()[0],
        make_env("FreewayNoFrameskip-v4", seed=5).reset()[0],
    )


def test_a_second_reset_starts_new_games_and_counts_from_zero():
    vector_env = make_vector_env("PongNoFrameskip-v4", 1, max_episode_frames=12)
    vector_env.reset()
    vector_env.step(np.array([NOOP]))
    vector_env.send(np.array([NOOP]))
    vector_env.reset()
    steps = [vector_env.step(np.array([NOOP])) for _ in range(3)]
    assert [episode.length for step in steps for episode in step.episodes] == [3]


def test_the_score_has_the_last_steps_reward():
    """Pong ends with the 21st point, so a score that the auto-reset robs of its last step would be -20."""
    vector_env = make_vector_env("PongNoFrameskip-v4", 1, noop_max=0)
    vector_env.reset()
    length, step = 1, vector_env.step(np.array([NOOP]))
    while not step.dones[0]:
        length, step = length + 1, vector_env.step(np.array([NOOP]))
    assert step.rewards[0] == -1 and not step.truncated[0] and step.final_obs is None
    assert [(episode.raw_return, episode.length) for episode in step.episodes] == [(-21.0, length)]


def test_rewards_are_clipped_and_scores_are_not(rng):
    actions = rng.integers(6, size=(500, 1))
    _, steps = vector_rollout(make_vector_env("SpaceInvadersNoFrameskip-v4", 1, seed=1), actions)
    end = next(t for t, step in enumerate(steps) if step.episodes)
    clipped_return = sum(step.rewards[0] for step in steps[: end + 1])
    assert {float(step.rewards[0]) for step in steps} == {0.0, 1.0}
    assert steps[0].rewards.dtype == np.float32
    # An invader is worth 5 to 30 points, so at least five times the clipped reward.
    assert steps[end].episodes[0].raw_return >= 5 * clipped_return > 0


def test_episodic_life_reports_every_lost_life_and_goes_on_with_the_game():
    actions = np.full((121, 1), FIRE)
    make = {"env_name": "BreakoutNoFrameskip-v4", "env_num": 1, "noop_max": 0}
    _, whole = vector_rollout(make_vector_env(**make), actions)
    _, lives = vector_rollout(make_vector_env(**make, episodic_life=True), actions)
    assert [t for t, step in enumerate(lives) if step.dones[0]] == BREAKOUT_LOST_BALLS
    assert [t for t, step in enumerate(whole) if step.dones[0]] == BREAKOUT_LOST_BALLS[-1:]
    for step, whole_step in zip(lives, whole, strict=True):
        np.testing.assert_array_equal(step.obs, whole_step.obs)
        assert step.episodes == whole_step.episodes
    assert [episode.length for step in lives for episode in step.episodes] == [121]


def test_a_game_over_at_the_time_limit_is_no_truncation():
    def last_step(limit):
        env = make_env("BreakoutNoFrameskip-v4", noop_max=0, max_episode_frames=limit)
        env.reset()
        for _ in range(BREAKOUT_LOST_BALLS[-1] + 1):
            *_, terminated, truncated, info = env.step(FIRE)
        return terminated, truncated, info["episode_frame_number"] - 1  # less the FIRE at the start

    game_over_frame = last_step(108_000)[2]
    assert last_step(game_over_frame)[:2] == (True, False)
    assert last_step(game_over_frame - 1)[:2] == (False, True)
    make = {"noop_max": 0, "max_episode_frames": game_over_frame}
    _, steps = vector_rollout(make_vector_env("BreakoutNoFrameskip-v4", 1, **make), np.full((121, 1), FIRE))
    assert steps[-1].dones[0] and not steps[-1].truncated[0]


def test_a_life_lost_at_the_time_limit_is_a_death_and_ends_the_game():
    """Both at once: a terminal state, not to be bootstrapped, but the score must be counted."""
    limit = 4 * (BREAKOUT_LOST_BALLS[0] + 1)
    actions = np.full((limit // 4, 1), FIRE)
    make = {"episodic_life": True, "noop_max": 0, "max_episode_frames": limit}
    _, steps = vector_rollout(make_vector_env("BreakoutNoFrameskip-v4", 1, **make), actions)
    assert steps[-1].dones[0] and not steps[-1].truncated[0]
    assert [episode.length for episode in steps[-1].episodes] == [limit // 4]
    env = make_env("BreakoutNoFrameskip-v4", **make)
    env.reset()
    for action in actions:
        *_, terminated, truncated, info = env.step(action[0])
    assert (terminated, truncated, info["episode"]["l"]) == (True, False, limit // 4)


def test_a_time_limit_is_a_truncation_and_keeps_its_final_observation():
    _, whole = vector_rollout(make_vector_env("PongNoFrameskip-v4", 1), np.zeros((10, 1), int))
    first_obs, steps = vector_rollout(
        make_vector_env("PongNoFrameskip-v4", 1, max_episode_frames=40), np.zeros((10, 1), int)
    )
    assert [bool(step.truncated[0]) for step in steps] == [False] * 9 + [True]
    assert [step.final_obs is None for step in steps] == [True] * 9 + [False]
    np.testing.assert_array_equal(steps[-1].final_obs, whole[-1].obs)
    assert not steps[-1].obs[0, :3].any()  # the next game's first


def test_every_array_may_be_kept(rng):
    vector_env = make_vector_env("PongNoFrameskip-v4", 2, max_episode_frames=20)
    obs, steps = vector_rollout(vector_env, rng.integers(6, size=(20, 2)))
    _, again = vector_rollout(
        make_vector_env("PongNoFrameskip-v4", 2, max_episode_frames=20),
        np.random.default_rng(0).integers(6, size=(20, 2)),
    )
    arrays = [obs] + [step.obs for step in steps] + [s.final_obs for s in steps if s.final_obs is not None]
    assert not any(np.shares_memory(array, other) for i, array in enumerate(arrays) for other in arrays[:i])
    assert all(np.array_equal(step.obs, other.obs) for step, other in zip(steps, again, strict=True))


@pytest.mark.parametrize("actions", [[0, 6], [0, -1], [0], [[0, 0]], [0.0, 1.0]])
def test_wrong_actions_are_refused_before_they_block_the_threads(actions):
    vector_env = make_vector_env("PongNoFrameskip-v4", 2)
    vector_env.reset()
    with pytest.raises(ValueError, match=r"2 integers in 0\.\.5"):
        vector_env.send(np.array(actions))
    vector_env.step(np.array([0, 5]))


def test_close_needs_no_pending_step_and_may_come_twice():
    vector_env = make_vector_env("PongNoFrameskip-v4", 2, num_threads=os.cpu_count())
    vector_env.reset()
    vector_env.send(np.array([0, 0]))
    vector_env.close()
    vector_env.close()


def test_a_video_frame_is_the_games_own_picture():
    env = make_env("PongNoFrameskip-v4", seed=0, render_mode="rgb_array")
    env.reset()
    assert env.render().shape == (210, 160, 3)
