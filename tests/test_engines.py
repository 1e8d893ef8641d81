"""The contract of every engine: same seed and settings, equal trajectories. On a real PARL cluster."""

import contextlib
import logging
import os
import signal
import socket
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest

from a2c_config import A2CConfig
from atari_agent import create_agent
from cpu_kernels import unavailable_reason
from engines import LocalEngine, ParlEngine, create_engine, wait_for_cpus
from env_utils import action_num
from train import flatten

SETTINGS = {"actor_num": 2, "env_num": 2, "sample_batch_steps": 4, "seed": 5}
FIELDS = ("obs", "actions", "advantages", "target_values", "values")


def make_config(**settings):
    return A2CConfig(**{**SETTINGS, **settings})


def make_agent(config):
    agent = create_agent(config, action_num(config.env_name), "cpu")
    # Remote actors get it along with the weights.
    agent.alg.model.normalize_observations(np.full((config.env_dim, config.env_dim), 87.0), std=16.0)
    return agent


def updated_weights(engine, config, updates, agent=None):
    """Train for some updates as `train.py` does; return the weights."""
    agent = agent or make_agent(config)
    for version in range(updates):
        trajectories = engine.collect(agent.get_weights(), version)
        batch = [flatten(trajectories, name) for name in ("obs", "actions", "advantages", "target_values")]
        agent.learn(*batch, sample_steps=version * config.batch_size)
    return agent.get_weights()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def jobs_of(cluster):
    """The cluster's job processes that serve an actor: those that have loaded Paddle are the largest."""
    tree = [child for pid in cluster.pids for child in psutil.Process(pid).children(recursive=True)]
    jobs = []
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end meanwhile
            if "job.py" in " ".join(process.cmdline()):
                jobs.append(process)
    return jobs


def test_local_trajectories_are_in_actor_order_and_carry_the_version():
    config = make_config()
    with LocalEngine(config) as engine:
        trajectories = engine.collect(make_agent(config).get_weights(), version=3)
    assert [trajectory.weights_version for trajectory in trajectories] == [3, 3]
    assert (trajectories[0].obs != trajectories[1].obs).any()


# Largest difference, as a share of what was learned (Euclidean norm): bf16 keeps 8 bits of each product.
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-3), ("bf16", 0.1)])
def test_actors_that_share_the_learners_agent_lead_to_the_same_weights(precision, tolerance):
    # Shared, the forward pass of acting is kept for learning; not shared, the learner computes its own.
    if unavailable_reason(precision) is not None:
        pytest.skip(unavailable_reason(precision))
    config = make_config(env_num=4, precision=precision)
    learner = make_agent(config)
    first = learner.get_weights()
    with LocalEngine(config, learner) as shared, LocalEngine(config) as apart:
        shared_weights = updated_weights(shared, config, 4, learner)
        weights = updated_weights(apart, config, 4)
    for name in weights:
        learned = np.linalg.norm(weights[name] - first[name])
        assert np.linalg.norm(shared_weights[name] - weights[name]) <= tolerance * learned, name


def test_overlapped_sampling_is_one_update_behind_and_repeats(tmp_path):
    config = make_config(overlap=True)
    lags, weights = [], []
    for _ in range(2):
        agent = make_agent(config)
        with create_engine(replace(config, engine="local"), agent) as engine:
            for version in range(4):
                trajectories = engine.collect(agent.get_weights(), version)
                lags.append(version - trajectories[0].weights_version)
                batch = [flatten(trajectories, name) for name in FIELDS[:4]]
                agent.learn(*batch, sample_steps=version * config.batch_size)
        weights.append(agent.get_weights())
    assert lags == [0, 1, 1, 1] * 2
    for name in weights[0]:
        np.testing.assert_array_equal(weights[0][name], weights[1][name])


def test_local_and_parl_give_equal_trajectories_and_equal_weights(cluster, caplog):
    caplog.set_level(logging.INFO, "a2c")
    config = make_config(master_address=cluster.address)
    weights = make_agent(config).get_weights()
    with LocalEngine(config) as local, ParlEngine(config) as remote:
        for version in range(2):
            for here, there in zip(local.collect(weights, version), remote.collect(weights, version), strict=True):
                for name in FIELDS:
                    np.testing.assert_array_equal(getattr(here, name), getattr(there, name))
    with LocalEngine(config) as local:
        local_weights = updated_weights(local, config, 3)
    with ParlEngine(config) as remote:
        remote_weights = updated_weights(remote, config, 3)
    assert "actors: 2 on 127.0.0.1" in caplog.text
    for name in weights:
        np.testing.assert_array_equal(local_weights[name], remote_weights[name])
        assert name in ("value_head.bias", "obs_mean", "obs_std") or (local_weights[name] != weights[name]).any()


def test_a_killed_job_is_an_error_that_names_the_actor_and_comes_at_once(cluster):
    config = make_config(master_address=cluster.address, actor_num=1)
    weights = make_agent(config).get_weights()
    with ParlEngine(config) as engine:
        engine.collect(weights, version=0)
        victim = max(jobs_of(cluster), key=lambda process: process.memory_info().rss)
        os.kill(victim.pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(ConnectionError, match="actor 0 of 1"):
            engine.collect(weights, version=1)
        assert time.monotonic() - start < 10
    wait_for_cpus(cluster.address, 2, wait_s=60)  # leave the cluster whole for the next test


def test_an_exception_in_a_remote_actor_comes_home_with_its_reason(cluster):
    config = make_config(master_address=cluster.address, actor_num=1)
    with ParlEngine(config) as engine, pytest.raises(ConnectionError, match="weights hold"):
        engine.collect({"nothing": np.zeros(1, np.float32)}, version=0)


def test_too_few_vacant_cpus_end_in_the_fix_after_a_bounded_wait(cluster):
    config = make_config(master_address=cluster.address, actor_num=9, cluster_wait_s=1.0)
    with pytest.raises(TimeoutError, match=r"actor_num is 9.*--cpu_num 9"):
        ParlEngine(config)


def test_an_address_given_by_hand_must_answer():
    config = make_config(master_address=f"127.0.0.1:{free_port()}", cluster_wait_s=0.5)
    with pytest.raises(ConnectionError, match=r"start_cluster.sh"):
        create_engine(config)
