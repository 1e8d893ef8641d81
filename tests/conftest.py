"""Shared by all tests."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cpu_threads  # noqa: F401  before NumPy and Paddle start their threads

import numpy as np
import pytest

CLUSTER_SCRIPT = Path(__file__).parent.parent / "scripts" / "cluster.py"


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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_cluster_script(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(CLUSTER_SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of 2 CPUs, with records of its own: the user's cluster is left alone."""
    running = Cluster(free_port(), tmp_path_factory.mktemp("cluster"))
    started = run_cluster_script("start", "--cpu_num", 2, "--port", running.port, "--state_dir", running.state_dir)
    assert started.returncode == 0, started.stderr
    yield running
    stopped = run_cluster_script("stop", "--state_dir", running.state_dir)
    assert stopped.returncode == 0, stopped.stderr
