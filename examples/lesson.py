"""What every lesson needs first: the project's modules, `import parl` made safe, a cluster, a local Ray."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))

import parl_compat  # noqa: E402

DEFAULT_ADDRESS = os.environ.get("PARL_MASTER_ADDRESS", "localhost:8010")


@contextlib.contextmanager
def parl_cluster(cpu_num: int) -> Iterator[str]:
    """Give the address of a cluster with `cpu_num` vacant CPUs; at the end, leave it as it was.

    That is the one of `bash scripts/start_cluster.sh` if it has room, else one of the lesson's own. It may
    have more CPUs than the machine has cores: PARL counts actors, it does not bind them.
    """
    with contextlib.ExitStack() as at_end:
        address = DEFAULT_ADDRESS
        if not _has_room(address, cpu_num):
            address = at_end.enter_context(_own_cluster(cpu_num))
        at_end.callback(parl_compat.disconnect)
        yield address


@contextlib.contextmanager
def local_ray(cpu_num: int) -> Iterator[ModuleType]:
    """Give the module `ray`, with a Ray of `cpu_num` CPUs running on this machine for as long as the lesson."""
    import ray_compat  # not above: PARL ships this file to its jobs, without the project's modules

    try:
        ray = ray_compat.connect(None, cpu_num)
    except ConnectionError as error:
        sys.exit(f"error: {error}")
    try:
        yield ray
    finally:
        ray.shutdown()


def _has_room(address: str, cpu_num: int) -> bool:
    try:
        return parl_compat.cluster_cpus(address)[1] >= cpu_num
    except ConnectionError:
        return False


@contextlib.contextmanager
def _own_cluster(cpu_num: int) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as state_dir:
        try:
            _cluster("start", "--cpu_num", cpu_num, "--port", port, "--state_dir", state_dir)
            record = json.loads((Path(state_dir) / f"{port}.json").read_text())
            print(f"(a PARL cluster of this lesson's own at {record['address']})", flush=True)
            yield record["address"]
        finally:
            _cluster("stop", "--state_dir", state_dir)


def _cluster(*arguments: object) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "cluster.py"), *map(str, arguments)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        sys.exit(finished.stderr.strip())
