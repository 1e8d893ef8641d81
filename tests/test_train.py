"""train.py as a user meets it: real runs of the real emulator, in processes of their own."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from cluster_tools import ROOT
from visualdl import LogReader

from a2c_config import A2CConfig
from atari_agent import create_agent
from engines import LocalEngine
from env_utils import action_num, observation_statistics
from evaluate import load_agent
from metrics import Metrics, RunDirectory
from train import OBSERVATION_STD, interrupts_deferred, train

TINY = ["--engine", "local", "--actor_num", "1", "--env_num", "2", "--sample_batch_steps", "4"]


def command(run_dir, *options):
    return [
        sys.executable,
        "-X",
        "faulthandler",
        str(ROOT / "train.py"),
        *TINY,
        "--run_dir",
        str(run_dir),
        *map(str, options),
    ]


def run_train(run_dir, *options):
    return subprocess.run(command(run_dir, *options), capture_output=True, text=True, timeout=120)


def weights_after(updates, tmp_path, name, **settings):
    """Train in this process; return the weights."""
    config = A2CConfig(
        **{"actor_num": 2, "env_num": 2, "sample_batch_steps": 2, "max_sample_steps": 8 * updates, **settings}
    )
    agent = create_agent(config, action_num(config.env_name), "cpu")
    directory = RunDirectory(str(tmp_path / name))
    metrics = Metrics(directory, config.as_dict(), config.max_sample_steps, config.log_metrics_interval_s)
    with contextlib.closing(directory), contextlib.closing(metrics), LocalEngine(config, agent) as engine:
        train(config, engine, agent, metrics)
    assert metrics.updates == updates
    return agent.get_weights()


def test_a_run_leaves_log_curves_and_numbers_and_a_second_one_moves_them_aside(tmp_path):
    run_dir = tmp_path / "train_log" / "train"
    ran = run_train(run_dir, "--max_sample_steps", 800, "--log_metrics_interval_s", 0.3)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "\r" not in ran.stdout  # no progress bar in a pipe
    log = (run_dir / "log.log").read_text()
    assert "engine: local" in log and "steps 800/800" in log and "800 sample steps in" in log
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["sample_steps"] == 800
    assert 0.5 < sum(value for name, value in lines[-1].items() if name.endswith("_share")) < 1.05
    (curves,) = run_dir.glob("vdlrecords.*.log")
    tags = LogReader(file_path=str(curves)).get_tags()["scalar"]
    assert {"loss/policy_loss", "policy/entropy", "time/sample_steps_per_s"} <= set(tags)
    assert json.loads((run_dir / "config.json").read_text())["env_num"] == 2

    ran = run_train(run_dir, "--max_sample_steps", 80)
    assert ran.returncode == 0 and "an older run was moved to" in ran.stdout
    (older,) = run_dir.parent.glob("train-2*")
    assert (older / "log.log").read_text() == log


def test_the_same_seed_gives_the_same_weights_after_20_updates_and_another_does_not(tmp_path):
    first, second, other = (
        weights_after(20, tmp_path, name, seed=seed) for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])
    assert any((first[name] != other[name]).any() for name in first)


@pytest.mark.parametrize("normalize", [True, False])
def test_the_saved_weights_hold_how_pixels_are_scaled(tmp_path, normalize):
    option = "--normalize_observations" if normalize else "--no-normalize_observations"
    assert run_train(tmp_path, "--max_sample_steps", 80, "--env_dim", 44, option).returncode == 0
    weights = load_agent(tmp_path)[0].get_weights()
    if not normalize:
        assert not weights["obs_mean"].any() and weights["obs_std"] == 255
    else:
        expected = observation_statistics("PongNoFrameskip-v4", 44)
        np.testing.assert_array_equal(weights["obs_mean"], expected.mean.round())
        assert weights["obs_std"] == pytest.approx(expected.std / OBSERVATION_STD)


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_with_a_summary_and_leaves_no_process(tmp_path, signal_number):
    process = subprocess.Popen(
        command(tmp_path / "run", "--max_sample_steps", "1e7", "--log_metrics_interval_s", 0.2),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "steps/s" in line:
            break
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal_number)
    rest = process.communicate(timeout=30)[0]
    assert process.returncode == 130, rest
    assert "stopped by Ctrl-C" in rest and "sample steps in" in rest and "Traceback" not in rest
    assert not [child for child in children if child.is_running()]


def test_an_interrupt_during_an_update_comes_after_it():
    finished = False
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        signal.raise_signal(signal.SIGINT)
        finished = True
    assert finished
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_terminal_gets_a_progress_bar(tmp_path):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command(tmp_path / "run", "--max_sample_steps", 400), stdout=theirs, stderr=theirs, close_fds=True
    )
    os.close(theirs)
    shown = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            shown += os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    assert process.wait(timeout=30) == 0
    assert b"\r" in shown and b"400/400" in shown


@pytest.mark.parametrize(
    ("options", "status", "sentence"),
    [
        (["--env_name", "PongNoFrameSkip-v4"], 1, "did you mean PongNoFrameskip-v4"),
        (["--actor_nun", "3"], 2, "did you mean '--actor_num'?"),
        (["--run_dir", str(ROOT / "tests")], 1, "is no run of train.py"),
        (["--run_dir", "/dev/null/run"], 1, "/dev/null"),
        (["--engine", "parl", "--master_address", "127.0.0.1:1", "--cluster_wait_s", "0"], 1, "start_cluster.sh"),
    ],
)
def test_a_mistake_is_one_sentence_and_a_status(tmp_path, options, status, sentence):
    ran = run_train(tmp_path / "run", *options)
    output = ran.stdout + ran.stderr
    assert ran.returncode == status
    assert sentence in output and "Traceback" not in output


def test_two_runs_in_one_directory_are_refused(tmp_path):
    directory = RunDirectory(str(tmp_path / "run"))
    with contextlib.closing(directory):
        ran = run_train(tmp_path / "run", "--max_sample_steps", 80)
    assert ran.returncode == 1 and "another run is writing" in ran.stderr
