"""The doctor: what it says of a healthy project, and of one cause at a time."""

import os
import socket
import subprocess
import sys

import pytest
from cluster_tools import ROOT, Cluster, free_port

from scripts.check_env import main

SCRIPT = ROOT / "scripts" / "check_env.py"


def diagnose(capsys, **options):
    """Run the doctor in this process; return its exit status and its lines by the check's name."""
    options = {"master_address": f"127.0.0.1:{free_port()}", **options}
    status = main([word for name, value in options.items() for word in (f"--{name}", str(value))])
    lines = capsys.readouterr().out.splitlines()
    return status, {line.split()[1]: line for line in lines}


def run_script(*interpreter_options, **environment):
    """Run the doctor as a user does, from another folder."""
    return subprocess.run(
        [sys.executable, *interpreter_options, str(SCRIPT)],
        env={**os.environ, **environment},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )


def failures(output):
    return [line for line in output.splitlines() if line.startswith("FAIL")]


def test_a_healthy_project_passes_and_a_cluster_that_is_not_running_is_no_failure(capsys, tmp_path):
    status, lines = diagnose(capsys, run_dir=tmp_path / "train_log" / "train")
    assert status == 0
    assert lines["env"].startswith("ok   env       PongNoFrameskip-v4 reset and stepped: obs uint8 [4, 84, 84]")
    assert lines["cluster"].startswith("note") and "start_cluster.sh" in lines["cluster"]
    assert "paddlepaddle" in lines["packages"] and lines["parl"] == "ok   parl      2.2.1"
    assert not (tmp_path / "train_log").exists()


def test_a_running_cluster_is_counted(capsys, cluster: Cluster):
    assert "CPUs used, " in diagnose(capsys, master_address=cluster.address)[1]["cluster"]


def test_a_wrong_env_name_is_one_sentence_and_stops_only_what_needs_it(capsys):
    status, lines = diagnose(capsys, env_name="Pnog-v4")
    assert status == 1
    assert lines["rom"] == (
        "FAIL rom       there is no environment 'Pnog-v4' -> did you mean PongNoFrameskip-v4 or ALE/Pong-v5?"
    )
    assert "skip env: to be looked at once rom is mended" in lines.values()
    assert lines["cluster"].startswith("note")


def test_another_program_at_the_masters_port_is_named(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        status, lines = diagnose(capsys, master_address=f"127.0.0.1:{port}")
    assert status == 1
    assert (
        f"FAIL cluster   port {port} of 127.0.0.1 is taken by something that is no PARL master" in lines["cluster"]
    )
    assert "start_cluster.sh --port" in lines["cluster"]


@pytest.mark.parametrize("address", ["nonsense", "localhost:0", "localhost:port"])
def test_a_malformed_address_is_a_failure(capsys, address):
    status, lines = diagnose(capsys, master_address=address)
    assert status == 1 and "-> give HOST:PORT, such as localhost:8010" in lines["cluster"]


def test_a_run_dir_that_cannot_be_written_is_a_failure(capsys, tmp_path):
    (tmp_path / "file").touch()
    status, lines = diagnose(capsys, run_dir=tmp_path / "file" / "train")
    assert status == 1 and "cannot be written" in lines["disk"] and "--run_dir" in lines["disk"]


def test_without_the_packages_it_says_what_to_run():
    result = run_script("-I", "-S")  # -S: without site-packages
    assert result.returncode == 1 and result.stderr == ""
    assert len(failures(result.stdout)) == 1
    assert "lacks paddlepaddle, numpy, ale-py" in result.stdout
    assert failures(result.stdout)[0].endswith(("bash scripts/setup.sh", ".venv/bin/python scripts/check_env.py"))


def test_an_unsupported_python_is_the_only_failure():
    pretend = "import runpy, sys; sys.version_info = (3, 8, 18); del sys.argv[0]; "
    pretend += "runpy.run_path(sys.argv[0], {}, '__main__')"
    result = run_script("-c", pretend)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert len(failures(result.stdout)) == 1 and "3.10, 3.11 or 3.12 is needed" in result.stdout


def test_a_missing_library_of_the_system_names_the_command(tmp_path):
    (tmp_path / "six.py").write_text("raise ImportError('libx.so.1: cannot open shared object file')")
    result = run_script(PYTHONPATH=str(tmp_path))
    assert result.returncode == 1 and "Traceback" not in result.stdout + result.stderr
    assert [line.split(" -> ")[1] for line in failures(result.stdout)] == [
        "apt-get install libgomp1 libstdc++6 zlib1g"
    ]


def test_the_wrong_version_of_a_package_is_named(tmp_path):
    (tmp_path / "six.py").touch()
    metadata = tmp_path / "six-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: six\nVersion: 1.0\n")
    result = run_script(PYTHONPATH=str(tmp_path))
    assert result.returncode == 1 and "FAIL packages  six is 1.0, not >=1.16 -> " in result.stdout


def test_help_shows_the_defaults():
    result = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True, timeout=30)
    assert (
        result.returncode == 0 and "[PongNoFrameskip-v4]" in result.stdout and "[localhost:8010]" in result.stdout
    )
