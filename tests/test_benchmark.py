"""The benchmark: its arithmetic by hand, its measurements on real but tiny settings, its errors."""

import contextlib
import json
import os
import subprocess
import sys

import parl_compat

import psutil
import pytest
from cluster_tools import ROOT, is_alive, seconds_until, with_children

sys.path.insert(0, str(ROOT / "scripts"))

import benchmark
import benchmark_plan
import benchmark_simulate
import benchmark_trainers
from benchmark_report import Results, additive_limit, conclusions, growth_sentence, table
from benchmark_rows import Row, parse_rows

SCRIPT = ROOT / "scripts" / "benchmark.py"
GAME = "PongNoFrameskip-v4"
PEER_PYTHON = os.environ.get("BENCHMARK_PEER_PYTHON")


def run_benchmark(*options):
    command = [sys.executable, str(SCRIPT), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=300)


def results_of(*rows):
    results = Results()
    results.add([Row(name, "per s", float(value), who) for name, who, value in rows])
    return results


def test_ratio_is_our_median_over_that_of_the_best_peer():
    results = results_of(
        *(("a row", "ours", value) for value in (90, 300, 100)),
        *(("a row", "slow peer", value) for value in (10, 999, 20)),
        *(("a row", "fast peer", value) for value in (40, 50, 60)),
    )
    assert results.best_peer("a row") == ("fast peer", 50)
    assert results.ratio("a row") == 2.0
    assert " ".join(table(results)[2].split()) == "a row per s 100 (90.00 to 300) 50.00 2.00 fast peer"


def test_a_row_that_only_peers_have_has_no_ratio():
    results = results_of(("a row", "peer", 5))
    assert results.ratio("a row") is None
    assert "-" in table(results)[2].split()


def test_additive_limit_shares_the_cores_out_over_what_the_parts_cost():
    # 1/1000 + 1/4000 + 1/800 = 2.5 core-ms per sample step: 400 per core and second.
    assert additive_limit(2, [1000, 4000, 800]) == pytest.approx(800)


def test_conclusions_leave_out_what_was_not_measured():
    parts = [
        ("env, 16 envs, 1 thread", "ours", 1000),
        ("inference, batch 16, fp32, 1 core", "ours", 4000),
        ("learning after acting, batch 256, fp32, 1 core", "ours", 800),
    ]
    default = {"cores": 2, "precision": "fp32", "actor_num": 2, "env_num": 16, "steps": 8}
    assert conclusions(results_of(*parts[:2]), **default) == {}
    whole = [("local, 32 envs x 8 steps", "ours", 600), ("parl, 2 actors, 32 envs x 8 steps", "ours", 450)]
    found = conclusions(results_of(*parts, *whole), **default)
    assert found["local / additive limit"] == pytest.approx(0.75)
    assert found["parl / local, 2 actors each"] == pytest.approx(0.75)
    assert found["learning, core-ms per sample step"] == pytest.approx(1.25)


def test_growth_ends_where_more_actors_bring_less_than_5_percent():
    def record(actors, rate):
        return {"actors": actors, "sample_steps_per_s": rate, "stage_ms": {"learn": 30.0, "flatten": 10.0}}

    assert growth_sentence([record(1, 100), record(8, 200), record(64, 204)]) == (
        "the intake stops growing at 8 actors and 200 sample steps/s; there 'learn' takes 75%"
    )
    assert "still grows at 8 actors" in growth_sentence([record(8, 200), record(1, 100)])


def test_parts_are_measured_and_every_round_is_saved(tmp_path):
    saved = tmp_path / "benchmark.json"
    done = run_benchmark("--parts", "messages", "--rounds", 1, "--seconds", 0.25, "--json", saved)
    assert done.returncode == 0, done.stderr
    record = json.loads(saved.read_text())
    rows = {row["name"]: row for row in record["rows"]}
    assert all(len(row["rounds"]) == 1 and row["name"] in done.stdout for row in rows.values())
    in_memory, message = (
        rows[f"trajectory, {what}"]["median"] for what in ("its observations in memory", "message")
    )
    assert message < in_memory / 2  # every frame travels once
    assert record["machine"]["packages"]["parl"] == "2.2.1"


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("env", {"env_num": 2, "threads": 1}, 1),
        ("inference", {"batches": [2, 3], "precisions": ["fp32"], "cores": 1}, 2),
        ("learning", {"batches": [2, 3], "precisions": ["fp32"], "cores": 1}, 2),
        ("learning_after_acting", {"env_num": 2, "batch": 6, "precision": "fp32"}, 1),
    ],
)
def test_a_part_gives_a_row_for_each_batch(name, arguments, expected):
    arguments |= {"env_name": GAME, "env_dim": 44, "seconds": 0.05}
    rows = parse_rows(benchmark_plan.run_child(sys.executable, "benchmark_parts.py", name, arguments, cores=1))
    assert len(rows) == expected and all(row.value > 0 for row in rows)


def test_a_trainer_is_measured_as_a_user_starts_it():
    speed, memory = benchmark_trainers.local(GAME, env_dim=44, actor_num=1, env_num=2, steps=4, seconds=0.5)
    assert speed.name == "local, 2 envs x 4 steps" and speed.value > 0
    assert 50 < memory.value < 2000


def test_a_trainer_that_fails_says_why():
    with pytest.raises(benchmark_trainers.MeasurementError, match=r"status 1: error: there is no environment"):
        benchmark_trainers.local("Pnog-v4", env_dim=44, actor_num=1, env_num=2, steps=4, seconds=0.5)


def test_the_cluster_of_a_measurement_ends_with_it():
    with benchmark_trainers.cluster(cpu_num=1) as address:
        assert parl_compat.cluster_cpus(address) == (0, 1)
    with pytest.raises(ConnectionError):
        parl_compat.cluster_cpus(address)


def test_stub_actors_feed_a_real_learner():
    arguments = {"env_name": GAME, "env_dim": 44, "actor_num": 2, "seconds": 0.1}
    output = benchmark_plan.run_child(sys.executable, "benchmark_simulate.py", "learn", arguments)
    record = json.loads(output.splitlines()[-1])
    assert record["intake_limit_per_s"] > record["sample_steps_per_s"] > 0
    assert set(record["stage_ms"]) == set(benchmark_simulate.STAGES)
    sent, received = (record[f"{way}_mb_per_s"] for way in ("sent", "received"))
    assert sent > received > 0  # weights are larger than a trajectory of 8 steps


def test_more_actors_than_memory_are_skipped_with_the_reason():
    arguments = {"env_name": GAME, "env_dim": 44, "actor_num": 10**7, "seconds": 0.1}
    output = benchmark_plan.run_child(sys.executable, "benchmark_simulate.py", "learn", arguments)
    assert "GB are free" in json.loads(output.splitlines()[-1])["skipped"]


def test_a_stopped_benchmark_leaves_no_process_behind():
    command = [sys.executable, str(SCRIPT), "--parts", "local"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def trainers():
        with contextlib.suppress(psutil.NoSuchProcess):  # one may end meanwhile
            return [child for child in with_children(process.pid) if "train.py" in " ".join(child.cmdline())]

    seconds_until(trainers, at_most=60)
    family = with_children(process.pid)
    process.terminate()
    assert "interrupted" in process.communicate(timeout=60)[1]
    assert process.returncode == 130
    seconds_until(lambda: not any(map(is_alive, family)), at_most=10)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--parts", "env,lcoal"], "there is no part 'lcoal'"),
        (["--rounds", "0"], "'0'"),
        (["--seconds", "nan"], "'nan'"),
        (["--simulate_actors", "1,x"], "'1,x'"),
        (["--json", "/no/such/folder/x.json"], "no folder /no/such/folder"),
        (["--peer_python", "/no/python"], "/no/python"),
        (["--peer_python", "/bin/true"], "is no Python that runs here"),
        (["--peer_python", sys.executable], "-m pip install torch stable-baselines3"),
        (["--peer_python", sys.executable, "--env_name", "ALE/Pong-v5"], "PongNoFrameskip-v4"),
        (["--env_name", "Pnog-v4"], "did you mean PongNoFrameskip-v4"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_is_one_sentence(options, words):
    done = run_benchmark(*options)
    assert done.returncode in (1, 2)
    assert words in done.stderr and len(done.stderr.splitlines()) == 1


def test_help_explains_every_part(capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["--help"])
    text = capsys.readouterr().out
    assert all(part in text for part in ("env", "inference", "messages", "additive limit", "simulate", "peers"))


def test_no_program_inherits_thread_settings(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    names = benchmark_trainers.environment()
    assert not any(name.startswith(("OMP_", "KMP_")) or name.endswith("_NUM_THREADS") for name in names)


@pytest.mark.slow
def test_the_whole_benchmark_runs(tmp_path):
    saved = tmp_path / "benchmark.json"
    peers = ["--peer_python", PEER_PYTHON] if PEER_PYTHON else []
    done = run_benchmark("--quick", "--seconds", 1, "--json", saved, *peers)
    assert done.returncode == 0, done.stderr
    record = json.loads(saved.read_text())
    assert {"local / additive limit", "parl / local, 2 actors each"} <= record["conclusions"].keys()
    makers = {row["who"].split(",")[0] for row in record["rows"]}
    assert makers == ({"ours", "PyTorch", "Stable-Baselines3"} if PEER_PYTHON else {"ours"})
