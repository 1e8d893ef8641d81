"""PARL on today's Python: among packages that break it, on loopback only, and leaving nothing behind."""

import json
import os
import signal
import subprocess
import sys

import parl_compat

import psutil
import pytest
from cluster_tools import ROOT, free_port, is_alive, listening_hosts, running_cluster, seconds_until, with_children

import parl_substitutes

REMOTE_CLASS = """
import os, sys
import parl

@parl.remote_class
class Counter:
    def __init__(self, start):
        self.total = start

    def add(self, number):
        self.total += number
        return self.total

    def sees_pyarrow(self):
        import parl.remote.communication as communication
        return "pyarrow" in vars(communication)

    def threads(self):
        return os.environ["OMP_NUM_THREADS"]
"""
CONNECTED = """
import json, multiprocessing, os, sys
import parl_compat
import parl
import psutil
for stream in (sys.stdout, sys.stderr):
    print("first line", file=stream, flush=True)
imported = [multiprocessing.get_start_method(allow_none=True), len(psutil.Process().children())]
from counter import Counter
folder, address = sys.argv[1:]
with parl_compat.shipped_from(folder):
    parl.connect(address)
counter = Counter(5)
"""
REPORT = """
import pyarrow
report = {"sums": [counter.add(3), counter.add(4)], "pyarrow": pyarrow.__version__}
report["job"] = [counter.sees_pyarrow(), counter.threads()]
report["imported"] = [*imported, multiprocessing.get_start_method(allow_none=True)]
print("report", json.dumps(report))
"""
# For PARL only: an old setuptools, which Paddle imports, needs its pkg_resources itself.
NO_PKG_RESOURCES = """
import builtins
plain_import = builtins.__import__

def import_without_pkg_resources(name, globals=None, *rest, **options):
    if name == "pkg_resources" and (globals or {}).get("__name__", "").startswith("parl."):
        raise ModuleNotFoundError("gone", name=name)
    return plain_import(name, globals, *rest, **options)

builtins.__import__ = import_without_pkg_resources
"""
WAIT = """
print("connected", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def hostile_packages(tmp_path_factory):
    """A folder with what breaks PARL: a current pyarrow, and no pkg_resources, as with setuptools 82."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "pyarrow.py").write_text("__version__ = '22.0.0'\n")
    (folder / "sitecustomize.py").write_text(NO_PKG_RESOURCES)
    return folder


@pytest.fixture(scope="module")
def hostile_cluster(hostile_packages, tmp_path_factory):
    env = {"PYTHONPATH": str(hostile_packages)}
    with running_cluster(tmp_path_factory.mktemp("hostile_cluster"), cpu_num=1, env=env) as running:
        yield running


@pytest.fixture
def start_client(tmp_path, hostile_packages, hostile_cluster):
    """Start a client of the hostile cluster with an actor, which goes on with `code`."""
    (tmp_path / "counter.py").write_text(REMOTE_CLASS)
    started = []

    def start(code):
        (tmp_path / "client.py").write_text(CONNECTED + code)
        path = os.pathsep.join([str(ROOT), str(hostile_packages)])
        command = [sys.executable, str(tmp_path / "client.py"), str(tmp_path), hostile_cluster.address]
        started.append(
            subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": path},
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield start
    for client in started:
        if client.poll() is None:
            client.kill()
        client.communicate()


def wait_until_vacant(cluster):
    return seconds_until(lambda: parl_compat.cluster_cpus(cluster.address) == (0, 1), at_most=20)


def wait_for_line(client, wanted):
    for line in client.stdout:
        if line.strip() == wanted:
            return
    raise AssertionError(client.stderr.read())


def processes_of_session(number):
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == number and is_alive(process):
                found.append(process)
        except ProcessLookupError:
            pass
    return found


def test_remote_calls_work_beside_a_new_pyarrow_and_without_pkg_resources(start_client, hostile_cluster):
    client = start_client(REPORT)
    output, errors = client.communicate(timeout=60)
    assert client.returncode == 0, errors
    report = json.loads(output.partition("report ")[2])
    assert report["sums"] == [8, 12]
    assert report["job"] == [False, "1"]
    assert report["pyarrow"] == "22.0.0"  # the user's own program still has it
    assert report["imported"] == [None, 0, None]  # no start method is settled, and nothing was forked
    assert output.startswith("first line") and errors.startswith("first line")  # imported in silence
    assert not processes_of_session(client.pid)
    wait_until_vacant(hostile_cluster)


def test_cluster_and_client_listen_on_loopback_only(start_client, hostile_cluster):
    client = start_client(WAIT)
    wait_for_line(client, "connected")
    processes = [*hostile_cluster.family(), *with_children(client.pid)]
    names = {os.path.basename(part) for process in processes for part in process.cmdline()}
    assert {"start.py", "monitor.py", "job.py", "log_server.py", "client.py"} <= names
    assert listening_hosts(processes) <= {"127.0.0.1", "::ffff:127.0.0.1"}
    client.communicate("\n", timeout=20)
    wait_until_vacant(hostile_cluster)


def test_a_killed_client_leaves_no_process_and_its_cpu_becomes_vacant(start_client, hostile_cluster):
    client = start_client(WAIT)
    wait_for_line(client, "connected")
    os.kill(client.pid, signal.SIGKILL)
    client.wait()
    assert not processes_of_session(client.pid)
    wait_until_vacant(hostile_cluster)


def test_heartbeat_messages_are_those_of_parls_own_proto():
    request = parl_substitutes.heartbeat_messages()["Request"]
    message = request(client_id="a", tag=b"b", extra_message="c")
    assert message.SerializeToString() == b"\x0a\x01a\x12\x01b\x42\x01c"
    assert request.FromString(message.SerializeToString()).tag == b"b"


def test_a_missing_master_is_named_with_the_command_that_starts_one():
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ConnectionError, match=rf"{address} .*start_cluster\.sh.*--engine local"):
        parl_compat.cluster_cpus(address)


@pytest.mark.parametrize("address", ["8010", "localhost:", "localhost:0", "localhost:port", ":8010"])
def test_an_address_without_host_or_port_is_refused(address):
    with pytest.raises(ConnectionError, match="is no master address; give HOST:PORT"):
        parl_compat.cluster_cpus(address)


def test_a_host_that_no_machine_can_have_is_no_master():
    with pytest.raises(ConnectionError, match="no PARL master answers"):
        parl_compat.cluster_cpus("a" * 70 + ":8010")
