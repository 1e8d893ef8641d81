"""Grids of real, tiny trainings: each combination once, whoever runs it, and nothing left behind."""

import csv
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import cpu_threads

import pytest
from cluster_tools import ROOT, is_alive, seconds_until, with_children
from visualdl import LogReader

import trials
from a2c_config import ConfigError
from grid import make_trials, read_grid
from trial_report import leaderboard
from trials import Outcome, StopRule, Trial, save_record, share_of_cores

SETTINGS = {"actor_num": 1, "env_num": 2, "max_sample_steps": 400, "max_episode_frames": 200}
TINY = [f"--{name}={value}" for name, value in (SETTINGS | {"log_metrics_interval_s": 0.5}).items()]
ENDLESS = ["--max_sample_steps", "1e7"]
GRID = ["--grid", "start_lr=1e-3,7e-4,1e300"]  # the last one diverges in its first update
MPIRUN = [str(ROOT / ".venv/bin/mpirun"), os.path.join(os.path.dirname(sys.executable), "mpirun"), "mpirun"]
mpirun = next(filter(None, map(shutil.which, MPIRUN)), None)


def tune_command(out_dir, *options):
    return [sys.executable, str(ROOT / "tune.py"), "--out_dir", str(out_dir), *TINY, *options]


def run_tune(out_dir, *options, before=(), env=None):
    return subprocess.run(
        [*before, *tune_command(out_dir, *options)],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=150,
    )


def read_leaderboard(out_dir):
    with (out_dir / "leaderboard.csv").open(newline="") as file:
        return {row["trial"]: row for row in csv.DictReader(file)}


def assert_each_ran_once(result, out_dir):
    """Two finished, one crashed, and no run was moved aside for another one of its name."""
    assert result.returncode == 1, result.stdout + result.stderr
    rows = read_leaderboard(out_dir)
    assert {name: row["status"] for name, row in rows.items()} == {
        "start_lr=0.001,seed=0": "finished",
        "start_lr=0.0007,seed=0": "finished",
        "start_lr=1e+300,seed=0": "crashed",
    }
    directories = {path.name for path in out_dir.glob("start_lr=*") if path.is_dir()}
    assert directories == set(rows)
    for name in rows:
        assert result.stdout.count(f"/3  {name}") == 1
    assert "training has diverged" in result.stdout  # the crashed trial's log


def status_of(out_dir, name):
    path = out_dir / f"{name}.trial.json"
    return json.loads(path.read_text())["status"] if path.exists() else None


def has_metrics(out_dir, name):
    path = out_dir / name / "metrics.jsonl"
    return path.exists() and path.read_text().count("\n") > 1


def test_a_grid_is_the_full_product_with_every_seed(tmp_path):
    grid = read_grid(["start_lr=1e-3,7e-4", "normalize_advantages=true,false"])
    made = make_trials(grid, 3, ["--env_num", "2"], tmp_path)
    assert len({trial.name for trial in made}) == len(made) == 2 * 2 * 3
    options = " ".join(made[0].options)
    assert options == "--engine local --env_num 2 --start_lr 0.001 --normalize_advantages --seed 0"
    assert made[-1].options[-3:] == ["--no-normalize_advantages", "--seed", "2"]


def test_a_grid_can_come_from_a_json_file_and_name_games_and_seeds(tmp_path):
    path = tmp_path / "grid.json"
    path.write_text('{"env_name": ["ALE/Pong-v5"], "seed": [4, 7]}')
    made = make_trials(read_grid([str(path)]), 1, [], tmp_path)
    assert [trial.name for trial in made] == ["env_name=ALE-Pong-v5,seed=4", "env_name=ALE-Pong-v5,seed=7"]


@pytest.mark.parametrize(
    "argument, message",
    [
        ("start_rl=1,2", "start_lr"),
        ("start_lr", "NAME=VALUE"),
        ("start_lr=1e-3,0.001", "a value twice"),
        ("start_lr=fast", "must be float"),
        ("env_num=0", "at least 1"),
        ("run_dir=a,b", "each trial has its own"),
        ("missing.json", "cannot read"),
    ],
)
def test_a_grid_that_cannot_be_used_is_refused_with_the_reason(argument, message):
    with pytest.raises(ConfigError, match=message):
        read_grid([argument])


@pytest.mark.parametrize(
    "options, message",
    [
        (["--grid", "start_lr=1e-3", "--env_nums", "3"], "did you mean"),
        (["--grid", "start_lr=1e-3", "--run_dir", "x"], "each has its own"),
        (["--grid", "start_lr=1e-3", "--jobs", "0"], "1 or more"),
        (["--grid", "start_lr=1e-3", "--stop_below", "19"], "SCORE@STEPS"),
        (["--grid", "seed=1,2", "--seeds", "2"], "leave out --seeds"),
    ],
)
def test_a_bad_option_is_one_sentence_before_anything_starts(tmp_path, options, message):
    result = run_tune(tmp_path / "grid", *options)
    assert result.returncode != 0 and message in result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert not (tmp_path / "grid").exists()


def test_three_trials_two_at_once_and_what_they_leave(tmp_path):
    result = run_tune(tmp_path, *GRID, "--jobs", "2")
    assert_each_ran_once(result, tmp_path)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    cores = {tuple(json.loads(path.read_text())["cores"]) for path in tmp_path.glob("*.trial.json")}
    assert all(len(share) == max(1, cpu_threads.usable_cores() // 2) for share in cores)
    (log,) = (tmp_path / "hparams" / "start_lr=0.001,seed=0").glob("vdlrecords.*")
    assert "hyper_parameters" in LogReader(file_path=str(log)).get_tags()

    refused = run_tune(tmp_path, *GRID)
    assert refused.returncode == 1 and "--resume" in refused.stderr
    finished = (tmp_path / "start_lr=0.001,seed=0" / "log.log").read_text()
    again = run_tune(tmp_path, *GRID, "--resume")
    assert "2 of them done already" in again.stdout
    assert "1/1  start_lr=1e+300,seed=0" in again.stdout
    assert (tmp_path / "start_lr=0.001,seed=0" / "log.log").read_text() == finished


def test_a_hopeless_trial_is_stopped_early(tmp_path):
    result = run_tune(tmp_path, "--grid", "start_lr=1e-3", *ENDLESS, "--stop_below", "100@100")
    assert result.returncode == 0, result.stdout + result.stderr
    assert status_of(tmp_path, "start_lr=0.001,seed=0") == "stopped early"


def test_ctrl_c_stops_the_trials_and_resume_goes_on_with_them(tmp_path):
    grid = ["--grid", "start_lr=1e-3", "--jobs", "1", "--checkpoint_interval_s", "0"]
    name = "start_lr=0.001,seed=0"
    tune = subprocess.Popen(tune_command(tmp_path, *grid, *ENDLESS), stdout=subprocess.PIPE, text=True)
    seconds_until(lambda: has_metrics(tmp_path, name), at_most=60)
    family = with_children(tune.pid)
    assert len(family) >= 2
    tune.send_signal(signal.SIGINT)
    output, _ = tune.communicate(timeout=60)
    assert tune.returncode == 130 and "--resume" in output
    assert [process for process in family if is_alive(process)] == []
    assert status_of(tmp_path, name) == "interrupted"
    log = (tmp_path / f"{name}.log").read_text()
    assert list((tmp_path / name / "checkpoints").glob("step-*.npz")), log

    resumed = subprocess.Popen(tune_command(tmp_path, *grid, *ENDLESS, "--resume"), stdout=subprocess.PIPE)
    seconds_until(lambda: "resuming" in (tmp_path / f"{name}.log").read_text(), at_most=60)
    family = with_children(resumed.pid)
    resumed.kill()  # and the trial ends all the same
    resumed.communicate()
    seconds_until(lambda: not any(map(is_alive, family)), at_most=40)


@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray: pip install -r requirements-ray.txt"
)
def test_trials_with_ray(tmp_path):
    assert_each_ran_once(run_tune(tmp_path, *GRID, "--executor", "ray", "--jobs", "2"), tmp_path)


@pytest.mark.skipif(mpirun is None, reason="needs mpirun: pip install -r requirements-mpi.txt")
@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py")
def test_trials_with_mpi(tmp_path):
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    options = ["--oversubscribe", "--bind-to", "none"]
    result = run_tune(tmp_path, *GRID, "--executor", "mpi", before=[mpirun, "-n", "3", *options], env=as_root)
    assert_each_ran_once(result, tmp_path)


def test_shares_of_the_cores_are_disjoint_and_given_back():
    all_cores = os.sched_getaffinity(0)
    everyone_has_one = threading.Barrier(len(all_cores))

    def hold(_):
        with share_of_cores(len(all_cores)) as cores:
            everyone_has_one.wait(timeout=20)
            assert os.sched_getaffinity(0) == cores
            everyone_has_one.wait(timeout=20)
        assert os.sched_getaffinity(0) == all_cores
        return cores

    with ThreadPoolExecutor(len(all_cores)) as pool:
        shares = list(pool.map(hold, all_cores))
    assert set().union(*shares) == all_cores and sum(map(len, shares)) == len(all_cores)


def test_only_a_known_score_makes_a_trial_hopeless():
    rule = StopRule(score=-19.0, sample_steps=1000)
    assert rule.is_hopeless({"sample_steps": 1000, trials.SCORE: -19.5})
    assert not rule.is_hopeless({"sample_steps": 999, trials.SCORE: -21.0})
    assert not rule.is_hopeless({"sample_steps": 1000, trials.SCORE: -19.0})
    assert not rule.is_hopeless({"sample_steps": 1000})


def test_the_leaderboard_ranks_by_the_mean_over_seeds(tmp_path):
    scores = {(0.001, 0): 5.0, (0.001, 1): -15.0, (0.002, 0): 1.0, (0.002, 1): 2.0, (0.003, 0): None}
    for (start_lr, seed), score in scores.items():
        settings = {"start_lr": start_lr, "seed": seed}
        trial = Trial(f"{start_lr}-{seed}", settings, [], tmp_path)
        save_record(trial, Outcome(trials.FINISHED))
        trial.run_dir.mkdir()
        line = {"sample_steps": 10} | ({trials.SCORE: score} if score is not None else {})
        (trial.run_dir / "metrics.jsonl").write_text(json.dumps(line) + '\n{"half a li')
    all_trials = [
        Trial(f"{start_lr}-{seed}", {"start_lr": start_lr, "seed": seed}, [], tmp_path)
        for start_lr, seed in scores
    ]
    rows = leaderboard(all_trials)
    assert [row.trial.name for row in rows] == ["0.002-1", "0.002-0", "0.001-0", "0.001-1", "0.003-0"]
    assert [row.combination_score for row in rows] == [1.5, 1.5, -5.0, -5.0, None]
