"""Ray as this project starts it: optional, silent, and closed to strangers."""

import logging
import os
import signal
import socket
import threading
from types import ModuleType

INSTALL_COMMAND = "pip install -r requirements-ray.txt"

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else Ray reports its use over the network
# Ray's processes listen on every interface and run what they are sent: only who has the token may send.
os.environ.setdefault("RAY_AUTH_MODE", "token")


def connect(address: str | None, cpu_num: int, runtime_env: dict | None = None) -> ModuleType:
    """Join the Ray cluster at HOST:PORT, or start a Ray of `cpu_num` CPUs on this machine; return the module.

    `runtime_env` is that of every task and actor, in Ray's terms.

    Raises:
        ConnectionError: where Ray is not installed, or none answers at `address`.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ConnectionError(f"Ray is not installed; run `{INSTALL_COMMAND}`") from error
    if address:
        _check_answers(address)
    local = {} if address else {"num_cpus": cpu_num, "include_dashboard": False}
    on_sigterm = signal.getsignal(signal.SIGTERM)  # Ray puts its own there
    try:
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        ray.init(address=address or "local", runtime_env=runtime_env, **quiet, **local)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = f"no Ray answers at {address}" if address else "Ray does not start here"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConnectionError(
            f"{where} ({reason}); start one with `ray start --head`, or train in this process with --engine local"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)
    return ray


def _check_answers(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError) as error:
        raise ConnectionError(
            f"no Ray answers at {address} ({error}); start one there with `ray start --head --node-ip-address "
            f"{host} --port {port}`, or leave out --ray_address"
        ) from error
