"""Questions that `cluster.py` asks the network: is a port free, who answers there?"""

import contextlib
import errno
import ipaddress
import socket
import sys
import time

import parl_compat

from cluster_record import ClusterError

RELEASE_S = 10.0  # the system closes the ports of a process that ended
POLL_S = 0.1


def free_port(host: str) -> int:
    """A port that nobody uses at the moment."""
    return _bind(host, 0)


def check_port(host: str, port: int) -> None:
    """ClusterError, with the reason, where a master could not listen at `host` and `port`."""
    try:
        _bind(host, port)
    except PermissionError as error:
        raise ClusterError(f"port {port} needs root's rights; choose another with --port") from error
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise ClusterError(
                f"nothing can listen at {host}:{port} ({error.strerror}); check --host and --port"
            ) from error
        found = cpus(f"{host}:{port}")
        taken = "another program" if found is None else f"a PARL cluster of {sum(found)} CPUs from elsewhere"
        raise ClusterError(
            f"port {port} is taken by {taken}; choose another one, such as --port {port % 65000 + 10}"
        ) from error


def wait_until_free(host: str, port: int) -> None:
    """Return once a new master could listen there."""
    deadline = time.monotonic() + RELEASE_S
    while True:
        try:
            _bind(host, port)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"the cluster is stopped, but port {port} is not free ({error.strerror}); start another "
                    "cluster with --port"
                ) from error
        time.sleep(POLL_S)


def accepts(host: str, port: int) -> bool:
    """Whether anything takes a connection there."""
    with contextlib.suppress(OSError):
        socket.create_connection((host, port), timeout=1).close()
        return True
    return False


def cpus(address: str) -> tuple[int, int] | None:
    """Used and vacant CPUs of the cluster at HOST:PORT, or None where no master answers."""
    with contextlib.suppress(ConnectionError):
        return parl_compat.cluster_cpus(address)
    return None


def is_same(address: str, other: str) -> bool:
    """Whether two HOST:PORT, such as localhost:8010 and 127.0.0.1:8010, are one."""
    return _resolved(address) == _resolved(other)


def warn_of_network(host: str) -> None:
    """Say what listening at `host` means, unless it is loopback."""
    if not ipaddress.IPv4Address(host).is_loopback:
        print(
            f"warning: this cluster's processes here listen at {host}; PARL unpickles, and so trusts, whatever "
            "reaches them: anyone on that network can run programs as you; use a trusted, private network only",
            file=sys.stderr,
        )


def _bind(host: str, port: int) -> int:
    with socket.socket() as probe:
        # As the master does it: connections that were closed a moment ago do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return probe.getsockname()[1]


def _resolved(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError, UnicodeError):
        host = socket.gethostbyname(host)
    return host, port
