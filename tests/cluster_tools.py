"""Real clusters and real clients for the tests; each a process of its own."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
CLUSTER_SCRIPT = ROOT / "scripts" / "cluster.py"


@dataclass
class Cluster:
    """A running PARL cluster on the loopback interface."""

    port: int
    state_dir: Path

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pids(self) -> list[int]:
        """Master, monitor and worker."""
        record = json.loads((self.state_dir / f"{self.port}.json").read_text())
        return [process["pid"] for process in record["processes"]]

    def family(self) -> list[psutil.Process]:
        """All its processes: jobs, log server and launcher too."""
        return [process for pid in self.pids for process in with_children(pid)]


def with_children(pid: int) -> list[psutil.Process]:
    """A process and all its descendants."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs; a zombie that nobody collects does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def listening_hosts(processes: list[psutil.Process]) -> set[str]:
    """The addresses at which these processes accept connections."""
    hosts = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end meanwhile
            connections = process.net_connections("inet")
            hosts |= {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
    return hosts


def free_port() -> int:
    """A port of the loopback interface that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def seconds_until(condition: Callable[[], bool], at_most: float) -> float:
    """Wait until `condition()`; return the seconds that took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < at_most, f"not within {at_most} s"
        time.sleep(0.1)
    return time.monotonic() - start


def run_cluster_script(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """Run `scripts/cluster.py` with `arguments`, and with `env` added to the environment."""
    return subprocess.run(
        [sys.executable, str(CLUSTER_SCRIPT), *map(str, arguments)],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


@contextlib.contextmanager
def running_cluster(state_dir: Path, cpu_num: int, env: dict[str, str] | None = None) -> Iterator[Cluster]:
    """A cluster with records of its own: the user's cluster is left alone."""
    running = Cluster(free_port(), state_dir)
    where = ("--port", running.port, "--state_dir", state_dir)
    started = run_cluster_script("start", "--cpu_num", cpu_num, *where, env=env)
    assert started.returncode == 0, started.stderr
    try:
        yield running
    finally:
        stopped = run_cluster_script("stop", "--state_dir", state_dir)
        assert stopped.returncode == 0, stopped.stderr
