"""The engine contract on a real Ray: the trajectories of `local`, and an actor's death that stops nothing."""

import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest
from cluster_tools import ROOT, free_port, is_alive, seconds_until, with_children
from test_engines import FIELDS, make_agent, make_config, updated_weights

from a2c_config import A2CConfig, ConfigError
from engines import LocalEngine, create_engine

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray: pip install -r requirements-ray.txt"
)


@pytest.fixture
def engine():
    with create_engine(make_config(engine="ray", cluster_wait_s=20.0)) as running:
        yield running


def actor_processes(pid=None):
    """The processes of Ray actors of this class below process `pid`, which start with this one by default."""
    family = psutil.Process(pid or os.getpid()).children(recursive=True)
    return [process for process in family if process.name().startswith("ray::Actor")]


@needs_ray
def test_local_and_ray_give_equal_trajectories_and_equal_weights(engine):
    config = make_config()
    weights = make_agent(config).get_weights()
    with LocalEngine(config) as local:
        for version in range(2):
            for here, there in zip(local.collect(weights, version), engine.collect(weights, version), strict=True):
                assert there.weights_version == version
                for name in FIELDS:
                    np.testing.assert_array_equal(getattr(here, name), getattr(there, name))
        # Both have collected as much: their states are the same, and so is what follows from them.
        here, there = local.get_state(), engine.get_state()
        np.testing.assert_equal(there, here)
        local_weights = updated_weights(local, config, 2)
    assert engine.set_state(here) == []
    remote_weights = updated_weights(engine, config, 2)
    for name in weights:
        np.testing.assert_array_equal(local_weights[name], remote_weights[name])


@needs_ray
def test_the_log_says_on_which_machine_the_actors_run(caplog):
    caplog.set_level(logging.INFO, "a2c")
    with create_engine(make_config(engine="ray", cluster_wait_s=20.0)):
        import ray

        host = ray.util.get_node_ip_address()
    assert f"actors: 2 on {host}" in caplog.messages


@needs_ray
def test_a_killed_actor_is_started_again_and_the_update_goes_on(engine):
    config = make_config()
    weights = make_agent(config).get_weights()
    before = engine.collect(weights, version=0)
    seconds_until(lambda: len(actor_processes()) == 2, at_most=10)
    for process in actor_processes():
        os.kill(process.pid, signal.SIGKILL)
    after = engine.collect(weights, version=1)
    assert [trajectory.weights_version for trajectory in after] == [1, 1]
    # Not the games from the start once more, which were learnt from already.
    with LocalEngine(config) as local:
        first = local.collect(weights, version=0)
    np.testing.assert_array_equal(first[0].obs, before[0].obs)
    assert all((new.obs != old.obs).any() for new, old in zip(after, first, strict=True))


@needs_ray
def test_an_exception_in_a_ray_actor_comes_home_with_its_reason(engine):
    with pytest.raises(ConnectionError, match="actor [01] of 2 on Ray failed.*weights hold"):
        engine.collect({"nothing": np.zeros(1, np.float32)}, version=0)


@needs_ray
def test_training_on_ray_goes_on_after_a_kill_and_ctrl_c_leaves_no_process(tmp_path):
    run_dir = tmp_path / "run"
    settings = {"actor_num": 1, "env_num": 2, "max_episode_frames": 200, "log_metrics_interval_s": 0.5}
    options = [f"--{name}={value}" for name, value in settings.items()]
    command = [sys.executable, str(ROOT / "train.py"), "--engine", "ray", "--run_dir", str(run_dir), *options]
    training = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)

    def sample_steps():
        lines = (run_dir / "metrics.jsonl").read_text().splitlines() if run_dir.exists() else []
        return json.loads(lines[-1])["sample_steps"] if lines else 0

    try:
        seconds_until(lambda: sample_steps() > 0, at_most=90)
        (actor,) = actor_processes(training.pid)
        actor.kill()
        actor.wait(10)
        killed_at = sample_steps()
        seconds_until(lambda: sample_steps() > killed_at + 200, at_most=90)
        family = with_children(training.pid)
        os.killpg(training.pid, signal.SIGINT)  # as a terminal does
        output, _ = training.communicate(timeout=60)
    finally:
        training.kill()
    assert training.returncode == 130 and "was lost" in output and "starting it again" in output
    assert list((run_dir / "checkpoints").glob("step-*.npz"))
    seconds_until(lambda: not any(map(is_alive, family)), at_most=30)


@needs_ray
def test_a_ray_address_given_by_hand_must_answer():
    config = make_config(engine="ray", ray_address=f"127.0.0.1:{free_port()}")
    with pytest.raises(ConnectionError, match="no Ray answers at 127.0.0.1"):
        create_engine(config)


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_error_names_the_command_that_installs_it():
    with pytest.raises(ConnectionError, match="pip install -r requirements-ray.txt"):
        create_engine(make_config(engine="ray"))


def test_auto_never_chooses_ray_not_even_by_an_address():
    with pytest.raises(ConfigError, match="add --engine ray"):
        A2CConfig(ray_address="127.0.0.1:6379")
    with pytest.raises(ConfigError, match="must be HOST:PORT"):
        A2CConfig(engine="ray", ray_address="nowhere")
