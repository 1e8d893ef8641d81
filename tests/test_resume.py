"""A run that was stopped or killed goes on as if nothing had been."""

import contextlib
import json
import logging
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from cluster_tools import ROOT
from visualdl import LogReader

import checkpoint
import resume
from a2c_config import A2CConfig, ConfigError
from atari_agent import create_agent
from checkpoint import CheckpointError
from engines import create_engine
from env_utils import action_num, make_vector_env
from metrics import Metrics
from rollout import EpisodeStats
from run_directory import RunDirectory
from train import main, update

TINY = {"engine": "local", "actor_num": 2, "env_num": 2, "sample_batch_steps": 4}
LOSSES = dict.fromkeys(("policy_loss", "value_loss", "entropy", "grad_norm", "learning_rate", "weights_lag"), 1.0)


@contextlib.contextmanager
def running(config, saved=None):
    """Agent, engine and metrics of a run, new or from its checkpoint."""
    with contextlib.closing(RunDirectory(config.run_dir, resume=saved is not None)) as directory:
        state = resume.metrics_state(saved) if saved else None
        metrics = Metrics(directory, config.as_dict(), config.max_sample_steps, 1000.0, state)
        agent = create_agent(config, action_num(config.env_name), "cpu")
        with contextlib.closing(metrics), create_engine(config, learner=agent) as engine:
            if saved:
                resume.restore(saved, agent, engine)
            yield agent, engine, metrics


def through_a_file(saved, tmp_path):
    checkpoint.save(saved, tmp_path / "checkpoint.npz")
    return checkpoint.load(tmp_path / "checkpoint.npz")


def resumed_equals_uninterrupted(tmp_path, updates=6, **settings):
    """Train with a checkpoint half way, go on from it, and compare; return the final metrics' state."""
    settings = TINY | {"max_sample_steps": 10_000, "run_dir": str(tmp_path / "run"), "seed": 3} | settings
    config = A2CConfig(**settings)
    with running(config) as (agent, engine, metrics):
        for _ in range(updates):
            update(config, engine, agent, metrics)
        saved = through_a_file(resume.capture(config, agent, engine, metrics), tmp_path)
        for _ in range(updates):
            update(config, engine, agent, metrics)
        expected, whole = agent.get_state(), metrics.get_state()
    with running(config, saved) as (agent, engine, metrics):
        for _ in range(updates):
            update(config, engine, agent, metrics)
        actual, resumed = agent.get_state(), metrics.get_state()
    assert expected.keys() == actual.keys()
    for name in expected:
        np.testing.assert_array_equal(expected[name], actual[name], err_msg=name)
    for name in ("sample_steps", "updates", "episode_num", "returns", "lengths"):
        assert whole[name] == resumed[name]
    return resumed


@pytest.mark.parametrize(
    "settings",
    [
        {"max_episode_frames": 40},  # new games before and after the checkpoint
        {"env_name": "BreakoutNoFrameskip-v4", "episodic_life": True, "updates": 12},
        {"overlap": True},  # the batch that was sampled already is saved as well
        {"optimizer": "rmsprop"},
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one_weight_for_weight(tmp_path, settings):
    resumed_equals_uninterrupted(tmp_path, **settings)


def test_a_resumed_run_on_a_cluster_equals_an_uninterrupted_one(tmp_path, cluster):
    resumed_equals_uninterrupted(tmp_path, engine="parl", master_address=cluster.address, max_episode_frames=40)


def test_environments_come_back_to_the_same_game_whatever_happened_before(rng):
    make = {"env_name": "BreakoutNoFrameskip-v4", "env_num": 3, "seed": 5, "episodic_life": True}
    env = make_vector_env(**make)
    obs = env.reset()
    for _ in range(400):
        obs = env.step(rng.integers(4, size=3)).obs
    state = env.get_state(obs)
    assert state["games"].min() > 1 and len(set(state["lengths"])) > 1
    other = make_vector_env(**make)
    restored, reason = other.set_state(state)
    assert reason == ""
    np.testing.assert_array_equal(restored, obs)
    ended = 0
    for _ in range(300):
        actions = rng.integers(4, size=3)
        step, other_step = env.step(actions), other.step(actions)
        np.testing.assert_array_equal(step.obs, other_step.obs)
        np.testing.assert_array_equal(step.dones, other_step.dones)
        assert step.episodes == other_step.episodes
        ended += len(step.episodes)
    assert ended >= 3


@pytest.mark.parametrize("env_name", ["ALE/Pong-v5", "PongNoFrameskip-v4"])
def test_environments_that_cannot_come_back_say_why_and_begin_other_games(env_name):
    env = make_vector_env(env_name, 2, seed=5)
    first_obs = env.reset()
    obs = env.step(np.array([2, 3])).obs
    state = env.get_state(obs)
    state["obs_sha256"] = state["obs_sha256"][::-1]  # as if the emulator had changed
    other = make_vector_env(env_name, 2, seed=5)
    new_obs, reason = other.set_state(state)
    assert ("sticky actions" in reason) == env_name.startswith("ALE")
    assert reason and new_obs.shape == first_obs.shape
    assert other.step(np.array([2, 3])).episodes == []
    restored = other.get_state(new_obs)
    assert restored["games"].tolist() == [1, 1] and (restored["seeds"] != state["seeds"]).all()


def test_a_state_of_other_environments_is_an_error():
    env = make_vector_env("PongNoFrameskip-v4", 2)
    state = env.get_state(env.reset())
    with pytest.raises(ValueError, match="of 2 environments, not of 1"):
        make_vector_env("PongNoFrameskip-v4", 1).set_state(state)


def curve(run_dir, tag):
    (path,) = run_dir.glob("vdlrecords.*.log")
    return [(p.id, p.value, p.timestamp) for p in LogReader(file_path=str(path)).get_data("scalar", tag)]


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_curves_go_on_without_a_gap_and_without_a_step_counted_twice(tmp_path):
    run_dir = tmp_path / "run"
    directory = RunDirectory(str(run_dir))
    metrics = Metrics(directory, {}, 10**7, 1000.0)
    for _ in range(2):
        metrics.add(1_000_003, [EpisodeStats(-21.0, 800)], LOSSES, {"learning": 0.1})
        metrics.write()
    metrics.add(8, [], LOSSES | {"entropy": 3.0}, {"learning": 0.1})
    state = json.loads(json.dumps(metrics.get_state()))
    metrics.add(8, [EpisodeStats(-5.0, 900)], LOSSES, {"learning": 0.1})
    metrics.write()  # after the checkpoint: this must not count
    metrics.close()
    directory.close()
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"sample_st')  # killed here

    directory = RunDirectory(str(run_dir), resume=True)
    metrics = Metrics(directory, {}, 10**7, 1000.0, state)
    metrics.add(8, [EpisodeStats(-19.0, 800)], LOSSES, {"learning": 0.1})
    metrics.write()
    metrics.close()
    directory.close()
    steps = [1_000_003, 2_000_006, 2_000_022]
    assert [line["sample_steps"] for line in lines(run_dir)] == steps
    assert lines(run_dir)[-1]["policy/entropy"] == 2.0  # the update before the checkpoint is in the mean
    assert lines(run_dir)[-1]["episode/raw_return_mean"] == pytest.approx(-61 / 3, rel=1e-5)
    elapsed = [line["time/elapsed_s"] for line in lines(run_dir)]
    assert elapsed == sorted(elapsed)
    points = curve(run_dir, "episode/raw_return_mean")
    assert [step for step, _, _ in points] == steps
    assert [time for _, _, time in points] == sorted(time for _, _, time in points)
    assert [value for _, value, _ in points] == pytest.approx([-21, -21, -61 / 3], rel=1e-5)


def test_what_may_change_is_logged_and_what_may_not_is_refused(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("a2c"), "propagate", True)
    saved = A2CConfig(max_sample_steps=1000, env_num=16, env_dim=84).as_dict()
    with caplog.at_level(logging.INFO, "a2c"):
        config = resume.resumed_config(saved, {"max_sample_steps": 2000, "env_num": 16}, "elsewhere")
    assert (config.max_sample_steps, config.run_dir) == (2000, "elsewhere")
    assert "max_sample_steps from 1000 to 2000" in caplog.text and "env_num" not in caplog.text
    changes = {"env_name": "ALE/Pong-v5", "env_num": 8, "seed": 1, "optimizer": "rmsprop", "env_dim": 44}
    for name, value in changes.items():
        with pytest.raises(ConfigError, match=f"^{name} is .* cannot become .*--{name}"):
            resume.resumed_config(saved, {name: value}, "run")
    assert resume.FIXED.keys() <= saved.keys()


def options_of(run_dir, *options):
    return [*(f"--{name}={value}" for name, value in TINY.items()), "--run_dir", str(run_dir), *map(str, options)]


def launch(arguments, **streams):
    return subprocess.Popen([sys.executable, str(ROOT / "train.py"), *arguments], text=True, **streams)


@pytest.fixture
def run_main(capsys, monkeypatch):
    """Run train.py in this process with the given arguments; return status, standard output and error."""
    logger, sigterm = logging.getLogger("a2c"), signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", False)

    def run(*arguments):
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as error:
            status = error.code
        return status, *capsys.readouterr()

    yield run
    logger.setLevel(logging.NOTSET)
    signal.signal(signal.SIGTERM, sigterm)


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory):
    """A run that was killed by SIGKILL after its first checkpoints."""
    run_dir = tmp_path_factory.mktemp("killed") / "run"
    options = ["--max_sample_steps", 10_000_000, "--checkpoint_interval_s", 0.2, "--log_metrics_interval_s", 0.1]
    process = launch(options_of(run_dir, *options), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(list((run_dir / "checkpoints").glob("step-*.npz"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return run_dir


def test_a_killed_run_goes_on_in_its_directory_with_its_settings(killed_run, tmp_path, run_main):
    run_dir = tmp_path / "moved"
    shutil.copytree(killed_run, run_dir)
    log = (run_dir / "log.log").read_text()
    sample_steps = checkpoint.resolve(run_dir)[1].counters["sample_steps"]
    status, output, errors = run_main("--resume", run_dir, "--max_sample_steps", sample_steps + 160)
    assert (status, errors) == (0, "")
    assert f"{sample_steps:,} sample steps" in output and "the run goes on exactly" in output
    assert (run_dir / "log.log").read_text().startswith(log)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["moved"]
    steps = [line["sample_steps"] for line in lines(run_dir)]
    assert steps == sorted(set(steps)) and steps[-1] == sample_steps + 160
    assert [step for step, _, _ in curve(run_dir, "loss/policy_loss")] == steps
    assert json.loads((run_dir / "config.json").read_text())["env_num"] == TINY["env_num"]
    assert len(list((run_dir / "checkpoints").iterdir())) == 3

    status, output, _ = run_main("--resume", run_dir)
    assert status == 0 and "has finished" in output
    new = options_of(tmp_path / "new", "--init_from", run_dir, "--max_sample_steps", 16)
    status, output, _ = run_main(*new)
    assert status == 0 and "weights from" in output and "16 sample steps" in output


def test_a_new_run_begins_with_the_weights_it_was_given(tmp_path, run_main):
    first, second = tmp_path / "first", tmp_path / "second"
    run_main(*options_of(first, "--max_sample_steps", 16))
    run_main(*options_of(second, "--max_sample_steps", 16, "--init_from", first, "--start_lr", 1e-30))
    for name, weights in checkpoint.model_weights(checkpoint.resolve(first)[1]).items():
        begun = checkpoint.resolve(second)[1].arrays[f"model/{name}"]
        np.testing.assert_allclose(begun, weights, atol=1e-20, rtol=0)


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_serves(killed_run, tmp_path, run_main):
    run_dir = tmp_path / "run"
    shutil.copytree(killed_run, run_dir)
    *_, before, damaged = sorted((run_dir / "checkpoints").glob("step-*.npz"))
    damaged.write_bytes(damaged.read_bytes()[:-100])
    sample_steps = checkpoint.load(before).counters["sample_steps"]
    status, output, _ = run_main("--resume", run_dir, "--max_sample_steps", sample_steps + 16)
    assert status == 0 and f"{damaged.name} is damaged" in output
    assert f"{damaged.name} is damaged" in (run_dir / "log.log").read_text()
    assert f"{sample_steps + 16:,} sample steps" in output
    assert damaged.with_suffix(".damaged").exists()


def test_a_run_killed_before_its_first_checkpoint_begins_again(killed_run, tmp_path, run_main):
    run_dir = tmp_path / "run"
    shutil.copytree(killed_run, run_dir)
    shutil.rmtree(run_dir / "checkpoints")
    status, output, _ = run_main("--resume", run_dir, "--max_sample_steps", 32)
    assert status == 0 and "it begins again" in output
    assert [line["sample_steps"] for line in lines(run_dir)] == [32]


def test_ctrl_c_saves_where_the_run_stands(tmp_path):
    run_dir = tmp_path / "run"
    options = options_of(run_dir, "--max_sample_steps", 10_000_000, "--log_metrics_interval_s", 0.1)
    process = launch(options, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    for line in process.stdout:
        if "steps/s" in line:
            break
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=30)[0]
    assert process.returncode == 130 and f"python train.py --resume {run_dir}" in output
    assert checkpoint.resolve(run_dir)[1].counters["sample_steps"] == lines(run_dir)[-1]["sample_steps"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--env_num", 3], "env_num is 2 in the run to resume and cannot become 3"),
        (["--run_dir", "elsewhere"], "leave out --run_dir"),
        (["--keep_checkpoints", 0], "keep_checkpoints is 0"),
        (["--preset", "parl"], "env_dim is 44 in the run to resume and cannot become 84"),
    ],
)
def test_a_mistake_on_resume_is_one_sentence(killed_run, run_main, options, sentence):
    status, _, errors = run_main("--resume", killed_run, *options)
    assert status != 0 and sentence in errors and len(errors.splitlines()) == 1


def test_a_directory_without_a_run_or_with_damaged_checkpoints_is_one_sentence(killed_run, tmp_path, run_main):
    status, _, errors = run_main("--resume", tmp_path)
    assert status == 1 and "there is no run to resume" in errors
    shutil.copytree(killed_run, tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        path.write_bytes(b"")
    status, _, errors = run_main("--resume", tmp_path / "run")
    assert status == 1 and "no sound checkpoint" in errors
    status, _, errors = run_main(*options_of(tmp_path / "new", "--init_from", tmp_path / "none"))
    assert status == 1 and "there is no checkpoint" in errors
    assert not (tmp_path / "new").exists()


def test_weights_of_another_game_are_refused(tmp_path):
    settings = A2CConfig(env_name="BreakoutNoFrameskip-v4").as_dict()
    checkpoint.save(checkpoint.Checkpoint(settings, {}, {}), tmp_path / "a.npz")
    with pytest.raises(ConfigError, match="BreakoutNoFrameskip-v4"):
        resume.initial_weights(A2CConfig(init_from=str(tmp_path / "a.npz")))
    with pytest.raises(CheckpointError):
        resume.initial_weights(A2CConfig(init_from=str(tmp_path / "b.npz")))


def test_the_best_by_the_score_of_100_games_is_kept(tmp_path):
    config = A2CConfig(**TINY, run_dir=str(tmp_path / "run"), keep_checkpoints=1)
    directory = tmp_path / "run" / "checkpoints"
    with running(config) as (agent, engine, metrics):
        saver = resume.CheckpointSaver(config, directory, agent, engine, metrics)
        for games, score in ((99, -20.0), (100, -10.0), (100, -15.0)):
            metrics.add(16, [EpisodeStats(score, 800)] * games, LOSSES, {})
            saver.save()
            assert (directory / checkpoint.BEST).exists() == (games == 100)
    best = checkpoint.load(directory / checkpoint.BEST).counters
    assert (best["best_score"], best["sample_steps"]) == (-10.0, 32)
    assert checkpoint.resolve(tmp_path / "run")[1].counters["sample_steps"] == 48


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_never_was():
    script = [sys.executable, str(ROOT / "scripts" / "kill_and_resume.py"), "--kills", "3"]
    ran = subprocess.run([*script, "--max_sample_steps", "4000"], capture_output=True, text=True, timeout=600)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "3 kills: the same sample steps, weights, optimizer, games and scores" in ran.stdout
