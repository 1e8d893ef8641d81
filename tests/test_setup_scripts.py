"""The shell scripts: set-up's error sentences, and VisualDL for real. Nothing here is downloaded."""

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import psutil
import pytest
from cluster_tools import ROOT, free_port
from visualdl import LogWriter

UNREACHABLE_INDEX = {  # port 9 of loopback: nothing listens there
    "PIP_INDEX_URL": "http://user:secret@127.0.0.1:9/simple",
    "PIP_EXTRA_INDEX_URL": "",
    "PIP_FIND_LINKS": "",
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_RETRIES": "0",
    "PIP_NO_CACHE_DIR": "1",
}
CAN_MOUNT = (
    subprocess.run("unshare --mount mount -t tmpfs tmpfs /mnt", shell=True, capture_output=True).returncode == 0
)


@pytest.fixture
def project(tmp_path):
    """A copy of the project's scripts without .venv, in a path with a space."""
    copy = tmp_path / "a project"
    shutil.copytree(ROOT / "scripts", copy / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    for requirements in ROOT.glob("requirements*.txt"):
        shutil.copy(requirements, copy)
    return copy


def run_setup(project, *options, **environment):
    """Run setup.sh from another folder."""
    return subprocess.run(
        ["bash", str(project / "scripts" / "setup.sh"), *options],
        env={**os.environ, "PYTHON": sys.executable, **environment},
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def assert_one_sentence(result, *parts):
    """The script gave up with one line that has all the parts, the next command among them."""
    assert result.returncode == 1
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    for part in parts:
        assert part in result.stderr


@pytest.mark.parametrize("version", ["3.9", "3.13", "2.7"])
def test_an_unsupported_python_is_named(project, tmp_path, version):
    python = tmp_path / "some python"
    python.write_text(f"#!/bin/sh\necho {version}\n")
    python.chmod(0o755)
    result = run_setup(project, PYTHON=str(python))
    assert_one_sentence(result, f"({python} is {version})", "3.10, 3.11 or 3.12", "PYTHON=/path/to/python3.11")
    assert not (project / ".venv").exists()


def test_a_python_that_does_not_run_is_named(project):
    assert_one_sentence(run_setup(project, PYTHON="/no/such/python"), "(PYTHON=/no/such/python does not run)")


def test_a_path_without_any_python_is_said(project, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "dirname", "cat", "cksum", "cut", "flock"):
        (tools / tool).symlink_to(shutil.which(tool))
    # As pyenv leaves one for each version that any project uses: it is there, but only prints an error.
    (tools / "python3.12").write_text("#!/bin/sh\nexit 127\n")
    (tools / "python3.12").chmod(0o755)
    result = run_setup(project, PYTHON="", PATH=str(tools))
    assert_one_sentence(result, "there is no Python on PATH", "PYTHON=/path/to/python3.11 bash scripts/setup.sh")


def test_an_unknown_option_is_named(project):
    assert_one_sentence(run_setup(project, "--cuda"), "--cuda", "--cpu and --gpu")


@pytest.mark.skipif(not CAN_MOUNT, reason="needs the right to mount a small file system")
def test_a_disk_that_is_too_small_is_said_before_anything_is_downloaded(project, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    commands = 'mount -t tmpfs -o size=20m tmpfs "$1" && cp -r "$0"/. "$1" && exec bash "$1/scripts/setup.sh"'
    result = subprocess.run(
        ["unshare", "--mount", "bash", "-c", commands, str(project), str(disk)],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert_one_sentence(
        result, f"MB are free on the disk of {disk}", "about 3000 MB are needed", "setup.sh` again"
    )


def test_an_unreachable_index_is_said(project):
    result = run_setup(project, PIP_USER="1", PYTHONPATH="/no/such", **UNREACHABLE_INDEX)
    assert_one_sentence(result, "index http://127.0.0.1:9/simple", "check the network", "setup.sh` again")
    assert "secret" not in result.stderr
    assert "installing requirements.txt" in result.stdout


def test_an_unfinished_venv_is_made_anew_by_one_setup_while_another_waits(project):
    (project / ".venv").mkdir()
    (project / ".venv" / "setup.stamp").write_text("gpu unfinished\n")
    with (project / ".setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with subprocess.Popen(
            ["bash", project / "scripts" / "setup.sh"],
            env={**os.environ, "PYTHON": sys.executable, **UNREACHABLE_INDEX},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            assert "another setup is at work here, waiting" in process.stdout.readline()
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert "as its set-up did not finish" in process.stdout.readline()
            assert "installing requirements-gpu.txt" in process.stdout.readline()
            process.communicate(timeout=120)


@pytest.mark.skipif(sys.prefix != str(ROOT / ".venv"), reason="runs in the .venv of scripts/test.sh")
def test_setup_is_quick_and_silent_where_all_is_there():
    start = time.monotonic()
    result = run_setup(ROOT, PYTHON="")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert time.monotonic() - start < 1


@pytest.mark.parametrize("name", ["setup.sh", "visualdl.sh"])
def test_help_shows_how_to_call_a_script(name):
    result = subprocess.run(
        ["bash", ROOT / "scripts" / name, "--help"], capture_output=True, text=True, timeout=10
    )
    assert result.returncode == 0 and f"bash scripts/{name} [--" in result.stdout and "#!" not in result.stdout


@contextlib.contextmanager
def running_visualdl(*options, cwd):
    """Run visualdl.sh with the `python3` on PATH; yield the process and its output up to the page's address."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    process = subprocess.Popen(
        ["bash", ROOT / "scripts" / "visualdl.sh", *options],
        env={**os.environ, "PATH": path},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output = ""
    try:
        while "http://" not in output and process.poll() is None:
            output += process.stdout.readline()
        yield process, output
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=20)
        process.stdout.close()


def get(url, headers):
    """The page's status and text, once the server is up."""
    deadline = time.monotonic() + 20
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as page:
                return page.status, page.read().decode()
        except ConnectionRefusedError:
            raise
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError) or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def test_visualdl_shows_the_curves_on_loopback_at_the_next_free_port(tmp_path):
    with LogWriter(str(tmp_path / "my runs" / "train")) as writer:
        writer.add_scalar("episode/raw_return_mean", 1.0, 1)
    with socket.create_server(("127.0.0.1", free_port())) as other:
        port = other.getsockname()[1]
        with running_visualdl("--logdir", "my runs", "--port", str(port), cwd=tmp_path) as (process, output):
            url = next(word for word in output.split() if word.startswith("http://"))
            assert f"port {port} is taken, trying the next one" in output
            assert url.startswith("http://127.0.0.1:") and f":{port}/" not in url
            for headers in ({"Accept-Language": "en"}, {}):
                status, page = get(url, headers)
                assert status == 200 and "<html" in page.lower()
            tags = get(url.replace("/app/scalar", "/app/api/scalar/tags"), {})[1]
            assert "episode/raw_return_mean" in tags
            listening = [c.laddr.ip for c in psutil.Process(process.pid).net_connections() if c.status == "LISTEN"]
            assert listening == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--logdir", "no such run"), "there is no directory no such run; make curves with `python train.py`"),
        (("--port", "99999"), "port is 99999; it must be 1 to 65535"),
        (("--port",), "--port needs a value"),
        (("--host", "0.0.0.0"), "there is no option --host"),
    ],
)
def test_visualdl_says_what_is_wrong_with_its_options(tmp_path, options, sentence):
    with running_visualdl(*options, cwd=tmp_path) as (process, output):
        assert sentence in output and process.wait(timeout=10) == 1


def test_the_gpu_and_the_cpu_requirements_share_everything_but_paddle():
    def lines(name):
        stripped = (line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
        return [line for line in stripped if line]

    assert lines("requirements.txt") == ["-r requirements-common.txt", "paddlepaddle==3.3.1"]
    gpu = lines("requirements-gpu.txt")
    assert gpu[0] == "-r requirements-common.txt"
    assert all(line.startswith(("paddlepaddle-gpu", "nvidia-")) for line in gpu[1:])
