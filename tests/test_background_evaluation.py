"""Evaluations beside a run, each a process of its own: what they report, and that they leave nothing behind."""

import contextlib
import dataclasses
import json
import sys
import time

import numpy as np
import psutil
from cluster_tools import ROOT

import checkpoint
from a2c_config import A2CConfig
from atari_agent import create_agent
from background_evaluation import BackgroundEvaluation, PeriodicEvaluation
from checkpoint import Checkpoint
from engines import LocalEngine
from env_utils import action_num
from metrics import Metrics
from run_directory import RunDirectory
from train import train

SHORT = A2CConfig(max_episode_frames=240)  # games of Pong that end after 60 sample steps


def make_checkpoint(config: A2CConfig) -> Checkpoint:
    agent = create_agent(config, action_num(config.env_name), "cpu")
    return Checkpoint(config.as_dict(), {"sample_steps": 1000}, agent.get_state())


def wait_for_report(evaluation):
    deadline = time.monotonic() + 60
    while (report := evaluation.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return report


def test_an_evaluation_in_the_background_reports_once_and_takes_one_at_a_time(tmp_path):
    evaluation = BackgroundEvaluation(tmp_path / "files", episodes=2)
    weights = make_checkpoint(SHORT)
    assert evaluation.start(weights)
    assert not evaluation.start(weights)
    report = wait_for_report(evaluation)
    assert (report["sample_steps"], report["episodes"]) == (1000, 2)
    assert evaluation.poll() is None
    evaluation.close()
    evaluation.close()


@contextlib.contextmanager
def small_run(run_dir, eval_interval_s):
    """Settings, agent, metrics and evaluation of a run of 20 updates."""
    settings = {"actor_num": 1, "env_num": 2, "sample_batch_steps": 4, "max_sample_steps": 160}
    config = A2CConfig(**settings, eval_interval_s=eval_interval_s, max_episode_frames=40)
    agent = create_agent(config, action_num(config.env_name), "cpu")
    with contextlib.closing(RunDirectory(str(run_dir))) as directory, contextlib.ExitStack() as stack:
        metrics = stack.enter_context(contextlib.closing(Metrics(directory, config.as_dict(), 160, 1000.0)))
        evaluation = stack.enter_context(contextlib.closing(PeriodicEvaluation(config, agent, metrics)))
        yield config, agent, metrics, evaluation


def test_evaluations_beside_a_run_leave_its_weights_as_they_were(tmp_path):
    weights = []
    for name, eval_interval_s in (("without", 0.0), ("with", 0.001)):
        with small_run(tmp_path / name, eval_interval_s) as (config, agent, metrics, evaluation):
            with LocalEngine(config, agent) as engine:
                train(config, engine, agent, metrics, evaluation=evaluation)
            weights.append(agent.get_weights())
    for name, array in weights[0].items():
        np.testing.assert_array_equal(array, weights[1][name])


def test_an_evaluation_of_a_run_stands_in_its_next_line_of_metrics(tmp_path):
    deadline = time.monotonic() + 60
    with small_run(tmp_path / "run", 0.001) as (config, agent, metrics, evaluation):
        while "evaluation after" not in (tmp_path / "run" / "log.log").read_text():
            assert time.monotonic() < deadline
            evaluation.run_if_due()
            time.sleep(0.05)
        with LocalEngine(config, agent) as engine:
            train(config, engine, agent, metrics)
        metrics.write()
    (line,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert line["eval/sample_steps"] == 0
    assert -1 <= line["eval/raw_return_mean"] <= 1  # 10 sample steps of Pong


def test_an_evaluation_ends_with_the_run_even_if_that_is_killed(tmp_path):
    checkpoint.save(make_checkpoint(SHORT), tmp_path / "weights.npz")
    program = (
        "import checkpoint, pathlib, sys, time; from background_evaluation import BackgroundEvaluation;"
        "directory = pathlib.Path(sys.argv[1]);"
        "BackgroundEvaluation(directory / 'files', 100_000).start(checkpoint.load(directory / 'weights.npz'));"
        "time.sleep(300)"
    )
    run = psutil.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT)
    deadline = time.monotonic() + 60
    while not any(child.nice() == 19 for child in run.children()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (evaluation,) = (child for child in run.children() if child.nice() == 19)
    run.kill()
    run.wait()
    evaluation.wait(timeout=10)
    assert not evaluation.is_running()


def test_closing_ends_an_evaluation_that_still_runs_and_removes_its_files(tmp_path):
    evaluation = BackgroundEvaluation(tmp_path / "files", episodes=1000)
    evaluation.start(make_checkpoint(SHORT))
    (process,) = [child for child in psutil.Process().children() if "--in_background" in child.cmdline()]
    assert evaluation.poll() is None
    evaluation.close()
    assert not process.is_running()
    assert not list(tmp_path.iterdir())


def test_a_failed_evaluation_is_a_line_in_the_log_and_no_report(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("background_evaluation.logger.propagate", True)
    evaluation = BackgroundEvaluation(tmp_path / "files", episodes=1)
    broken = make_checkpoint(SHORT)
    caplog.clear()
    evaluation.start(dataclasses.replace(broken, settings=broken.settings | {"no_such_setting": 1}))
    deadline = time.monotonic() + 60
    while not caplog.records and time.monotonic() < deadline:
        assert evaluation.poll() is None
        time.sleep(0.05)
    assert "there is no setting 'no_such_setting'" in caplog.text
    evaluation.close()
