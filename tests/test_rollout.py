import pickle

import numpy as np
import pytest

from rollout import EpisodeStats, Trajectory, compute_gae, join, pack_stacks, unpack_stacks


def column(*values):
    return np.float32(values)[:, None]


def test_one_step_advantage_is_the_temporal_difference():
    advantages, targets = compute_gae(column(1), column(3), column(0), np.float32([10]), 0.5, 0.9)
    assert advantages.item() == 1 + 0.5 * 10 - 3
    assert targets.item() == 1 + 0.5 * 10


def test_lambda_one_gives_discounted_returns_minus_values():
    advantages, targets = compute_gae(column(1, 2, 4), column(5, 6, 7), column(0, 0, 0), np.float32([8]), 0.5, 1.0)
    returns = [1 + 0.5 * 2 + 0.25 * 4 + 0.125 * 8, 2 + 0.5 * 4 + 0.25 * 8, 4 + 0.5 * 8]
    assert targets.ravel().tolist() == returns
    assert advantages.ravel().tolist() == [returns[0] - 5, returns[1] - 6, returns[2] - 7]


def test_reward_after_a_done_does_not_leak_backwards():
    advantages, _ = compute_gae(column(1, 0, 2), column(0, 0, 0), column(0, 1, 0), np.float32([10]), 0.5, 1.0)
    assert advantages.ravel().tolist() == [1.0, 0.0, 7.0]


def test_gae_equals_the_sum_of_equation_16(rng):
    steps, env_num, gamma, gae_lambda = 9, 5, 0.9, 0.8
    rewards, values = rng.normal(size=(2, steps, env_num)).astype(np.float32)
    dones, bootstrap = rng.random((steps, env_num)) < 0.2, rng.normal(size=env_num).astype(np.float32)
    advantages, targets = compute_gae(rewards, values, dones, bootstrap, gamma, gae_lambda)
    next_values = np.concatenate([values[1:], bootstrap[None]])
    deltas = rewards + gamma * np.where(dones, 0, next_values) - values
    for env in range(env_num):
        for t in range(steps):
            expected, weight = 0.0, 1.0
            for later in range(t, steps):
                expected += weight * deltas[later, env]
                weight *= gamma * gae_lambda
                if dones[later, env]:
                    break
            assert advantages[t, env] == pytest.approx(expected, abs=1e-5)
    np.testing.assert_allclose(targets, advantages + values)


def test_value_of_a_constant_reward_approaches_r_over_one_minus_gamma():
    gamma, value = 0.9, np.zeros(1, np.float32)
    for _ in range(40):  # each pass bootstraps five steps on: the error shrinks by gamma^5
        rewards, values = np.ones((5, 1), np.float32), np.repeat(value[None], 5, axis=0)
        _, targets = compute_gae(rewards, values, np.zeros((5, 1), bool), value, gamma, 1.0)
        value = targets[0]
    assert value.item() == pytest.approx(1 / (1 - gamma), rel=1e-4)


def frame_stacks(rng, steps=6, env_num=3, side=8):
    """Stacks as an env makes them: they roll on, but env 1 starts anew at t = 2."""
    frames = rng.integers(1, 256, (steps + 3, env_num, side, side), dtype=np.uint8)
    obs = np.stack([frames[t : t + 4].swapaxes(0, 1) for t in range(steps)])
    obs[2, 1] = rng.integers(1, 256, (4, side, side), dtype=np.uint8)
    return obs


def test_packing_ships_each_frame_once_and_rebuilds_exactly(rng):
    obs = frame_stacks(rng)
    newest, fresh, fresh_stacks = pack_stacks(obs)
    np.testing.assert_array_equal(unpack_stacks(newest, fresh, fresh_stacks), obs)
    expected = np.zeros((6, 3), bool)
    expected[0] = expected[2, 1] = expected[3, 1] = (
        True  # 3: the stack after the overwritten one rolls from frames
    )
    np.testing.assert_array_equal(fresh, expected)


def test_unrelated_observations_survive_packing_too(rng):
    obs = rng.integers(0, 256, (4, 2, 4, 8, 8), dtype=np.uint8)
    np.testing.assert_array_equal(unpack_stacks(*pack_stacks(obs)), obs)


def test_a_pickled_trajectory_is_equal_and_a_third_of_the_size(rng):
    obs = frame_stacks(rng, steps=20, env_num=4, side=84)
    arrays = [rng.normal(size=(20, 4)).astype(np.float32) for _ in range(3)]
    trajectory = Trajectory(
        obs, rng.integers(0, 6, (20, 4)), *arrays, 7, [EpisodeStats(-21.0, 900)], {"stepping": 0.5}
    )
    message = pickle.dumps(trajectory)
    copy = pickle.loads(message)
    for name in ("obs", "actions", "advantages", "target_values", "values"):
        np.testing.assert_array_equal(getattr(copy, name), getattr(trajectory, name))
    assert (copy.weights_version, copy.episodes, copy.seconds) == (
        7,
        [EpisodeStats(-21.0, 900)],
        {"stepping": 0.5},
    )
    assert len(message) < obs.nbytes / 3


def test_arrays_side_by_side_are_joined_without_a_copy_and_others_with_one(rng):
    buffer = rng.integers(1, 256, (2, 3, 4, 5), dtype=np.uint8)
    views = list(buffer)
    assert np.shares_memory(join(views), buffer)
    np.testing.assert_array_equal(join(views), buffer.reshape(24, 5))
    swapped = join(views[::-1])
    assert not np.shares_memory(swapped, buffer)
    np.testing.assert_array_equal(swapped, np.concatenate(views[::-1]).reshape(-1, 5))
