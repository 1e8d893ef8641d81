"""`scripts/cluster.py` and its shell wrappers, on real clusters."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import parl_compat

import psutil
import pytest
from cluster_tools import (
    CLUSTER_SCRIPT,
    ROOT,
    Cluster,
    free_port,
    is_alive,
    run_cluster_script,
    seconds_until,
    with_children,
)

WRAPPERS = ("start_cluster.sh", "join_cluster.sh", "cluster_status.sh", "stop_cluster.sh")


def run_wrapper(project, name, *arguments):
    """Run a wrapper from another working directory, with the `python3` on PATH."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    return subprocess.run(
        ["bash", str(project / "scripts" / name), *map(str, arguments)],
        env={**os.environ, "PATH": path},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def assert_one_sentence(ran, *parts):
    assert ran.returncode == 1
    assert ran.stderr.startswith("error: ") and ran.stderr.count("\n") == 1, ran.stderr
    for part in parts:
        assert part in ran.stderr


@pytest.fixture
def project_copy(tmp_path):
    """What a cluster needs of this project, in a folder with a space in its name."""
    copy = tmp_path / "a project"
    (copy / "scripts").mkdir(parents=True)
    for source in [*ROOT.glob("scripts/cluster*.py"), *(ROOT / "scripts" / name for name in WRAPPERS)]:
        shutil.copy(source, copy / "scripts")
    shutil.copy(ROOT / "scripts" / "common.sh", copy / "scripts")
    for source in [*ROOT.glob("parl_*.py"), ROOT / "cpu_threads.py"]:
        shutil.copy(source, copy)
    return copy


def test_a_cluster_starts_and_stops_whole_though_its_worker_was_killed(project_copy):
    cluster = Cluster(free_port(), project_copy / ".cluster")
    started = run_wrapper(project_copy, "start_cluster.sh", "--cpu_num", 1, "--port", cluster.port)
    assert started.returncode == 0, started.stderr
    try:
        for part in (cluster.address, "http://127.0.0.1:", "python train.py", "stop_cluster.sh"):
            assert part in started.stdout
        family = cluster.family()
        os.kill(cluster.pids[-1], signal.SIGKILL)
        shown = run_wrapper(project_copy, "cluster_status.sh")
        assert f"worker   pid {cluster.pids[-1]}: ended" in shown.stdout
        again = run_wrapper(project_copy, "start_cluster.sh", "--port", cluster.port)
        assert_one_sentence(again, "its worker ended", "stop_cluster.sh")
    finally:
        stopped = run_wrapper(project_copy, "stop_cluster.sh")
    assert stopped.returncode == 0, stopped.stderr
    assert len(family) >= 6 and not any(is_alive(process) for process in family)
    with socket.create_server(("127.0.0.1", cluster.port)):
        pass
    nothing = run_wrapper(project_copy, "stop_cluster.sh")
    assert nothing.returncode == 0 and nothing.stdout.startswith("nothing to stop")


def test_a_second_start_tells_that_the_cluster_runs_already(cluster):
    again = run_cluster_script("start", "--port", cluster.port, "--state_dir", cluster.state_dir)
    assert again.returncode == 0
    assert f"{cluster.address} runs already: 0 used and 2 vacant CPUs" in again.stdout


def test_status_shows_cpus_and_processes(cluster):
    shown = run_cluster_script("status", "--state_dir", cluster.state_dir)
    assert shown.returncode == 0
    assert f"PARL cluster at {cluster.address}: 0 used and 2 vacant CPUs" in shown.stdout
    assert shown.stdout.count(": runs") == 3


def test_a_joined_worker_adds_its_cpus_and_stops_alone(cluster, tmp_path):
    joined = run_cluster_script("join", cluster.address, "--cpu_num", 1, "--state_dir", tmp_path)
    assert joined.returncode == 0, joined.stderr
    assert sum(parl_compat.cluster_cpus(cluster.address)) == 3
    stopped = run_cluster_script("stop", "--state_dir", tmp_path)
    assert f"stopped the worker that had joined {cluster.address}" in stopped.stdout
    seconds_until(lambda: sum(parl_compat.cluster_cpus(cluster.address)) == 2, at_most=20)
    assert all(psutil.pid_exists(pid) for pid in cluster.pids)


def test_a_taken_port_is_named_with_the_option_that_changes_it(cluster, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ran = run_cluster_script("start", "--port", port, "--state_dir", tmp_path)
    assert_one_sentence(ran, f"port {port} is taken by another program", "--port")
    ran = run_cluster_script("start", "--port", cluster.port, "--state_dir", tmp_path)
    assert_one_sentence(ran, "a PARL cluster of 2 CPUs from elsewhere", "--port")


def test_a_process_that_dies_shows_its_log_and_takes_the_others_with_it(tmp_path):
    port = free_port()
    env = {"HOME": "/proc/nowhere"}  # where PARL wants to write its own logs
    ran = run_cluster_script("start", "--port", port, "--state_dir", tmp_path, env=env)
    assert ran.returncode == 1
    assert "the master ended while it started" in ran.stderr and "'/proc/nowhere'" in ran.stderr
    assert "cluster.py" not in ran.stderr  # no traceback of ours
    assert not list(tmp_path.glob("*.json"))
    assert not [each for each in psutil.process_iter(["cmdline"]) if f":{port}" in str(each.info["cmdline"])]


def test_an_interrupted_start_leaves_nothing(tmp_path):
    command = [sys.executable, str(CLUSTER_SCRIPT), "start", "--port", str(free_port())]
    starting = subprocess.Popen(
        [*command, "--state_dir", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    seconds_until(lambda: len(with_children(starting.pid)) > 2, at_most=20)
    children = with_children(starting.pid)[1:]
    time.sleep(0.5)
    starting.send_signal(signal.SIGTERM)
    _, errors = starting.communicate(timeout=20)
    assert starting.returncode == 143 and not errors
    assert not any(is_alive(child) for child in children)
    assert not list(tmp_path.glob("*.json"))


def test_stop_spares_a_program_that_got_a_recorded_pid(tmp_path):
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as innocent:
        birth = psutil.Process(innocent.pid).create_time()
        recorded = {"name": "master", "pid": innocent.pid, "create_time": birth - 5}
        fields = {"address": f"127.0.0.1:{free_port()}", "host": "127.0.0.1", "cpu_num": 1}
        record = tmp_path / "8010.json"
        record.write_text(json.dumps({**fields, "processes": [recorded]}))
        stopped = run_cluster_script("stop", "--state_dir", tmp_path)
        assert stopped.returncode == 0 and not record.exists()
        assert innocent.poll() is None
        innocent.kill()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["start", "--cpu_num", "0"], ["--cpu_num", "0 is no number of CPUs"]),
        (["start", "--port", "70000"], ["--port", "70000"]),
        (["start", "--host", "0.0.0.0"], ["--host", "0.0.0.0"]),
        (["start", "--host", "192.0.2.77"], ["192.0.2.77", "--host"]),
        (["join", ":8010"], ["':8010'"]),
        (["join", "127.0.0.1:1"], ["127.0.0.1:1", "start_cluster.sh --host"]),
        (["status"], ["start_cluster.sh"]),
        (["status", "--master_address", "localhost:1"], ["localhost:1", "start_cluster.sh"]),
        (["begin"], ["begin", "start"]),
    ],
)
def test_a_mistake_ends_in_one_sentence(arguments, parts, tmp_path):
    where = ["--state_dir", str(tmp_path)] if arguments != ["begin"] else []
    assert_one_sentence(run_cluster_script(*arguments, *where), *parts)


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").touch()
    ran = run_cluster_script("start", "--port", free_port(), "--state_dir", tmp_path / "file" / "state")
    assert_one_sentence(ran, str(tmp_path / "file"), "--state_dir")
    (tmp_path / "8010.json").write_text("{")
    assert_one_sentence(run_cluster_script("stop", "--state_dir", tmp_path), "8010.json", "delete it")


@pytest.mark.parametrize("name", WRAPPERS)
def test_every_wrapper_has_help(name):
    ran = run_wrapper(Path(ROOT), name, "--help")
    assert ran.returncode == 0 and "--state_dir" in ran.stdout
