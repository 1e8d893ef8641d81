"""Makes `import parl` work on today's Python, whatever else is installed: import this module first.

    import parl_compat
    import parl

PARL 2.2.1 is from 2023: it dies of a current pyarrow, protobuf or setuptools, forks while it is imported,
and listens on every network interface although its protocol unpickles what it receives. Here PARL's modules,
and nobody else in the process, get substitutes for what they import, and a few of their functions are replaced.

    python parl_compat.py SCRIPT ARGUMENTS...     # runs one of PARL's own programs, shielded in the same way
"""

import contextlib
import ipaddress
import os
import re
import runpy
import socket
import sys
from collections.abc import Iterator

import parl_patches
import parl_substitutes
from parl_patches import disconnect

__all__ = ["cluster_cpus", "disconnect", "local_address_towards", "set_host", "shipped_from"]

THREAD_LIMITS = {
    "OMP_NUM_THREADS": "1",  # two OpenMP programs that spin against each other are 100 times slower
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "KMP_BLOCKTIME": "0",
}

os.environ["PARL_BACKEND"] = "paddle"  # PARL looks for `paddle.fluid`, gone since Paddle 2.5


def set_host(address: str) -> None:
    """Let the PARL sockets that this process opens from now on bind to, and advertise, an IPv4 `address`."""
    parl_substitutes.host = str(ipaddress.IPv4Address(address))


def local_address_towards(master_address: str) -> str:
    """Return this machine's own IPv4 address as seen from the master at HOST:PORT; sends nothing."""
    host, port = _split(master_address)
    try:
        target = socket.gethostbyname(host)
        if ipaddress.IPv4Address(target).is_loopback:
            return "127.0.0.1"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, port))
            return probe.getsockname()[0]
    except (OSError, UnicodeError) as error:
        raise ConnectionError(
            f"no route to the PARL master at {master_address} ({error}); check the address"
        ) from error


def cluster_cpus(master_address: str, timeout_s: float = 2.0) -> tuple[int, int]:
    """Return the used and the vacant CPUs of the cluster whose master is at HOST:PORT.

    Raises:
        ConnectionError: where no master answers within `timeout_s`.
    """
    host, port = _split(master_address)
    try:
        # A refused connection shows at once here; ZeroMQ would go on trying until the time is up.
        socket.create_connection((socket.gethostbyname(host), port), timeout_s).close()
        match = re.search(
            r"has (\d+) used cpus, (\d+) vacant cpus", _ask_master(host, port, b"[STATUS]", timeout_s)
        )
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that no host can have
        raise ConnectionError(
            f"no PARL master answers at {master_address} ({error}); start one with "
            "`bash scripts/start_cluster.sh`, or train in this process with --engine local"
        ) from error
    if match is None:
        raise ConnectionError(f"what answers at {master_address} is no PARL 2.2.1 master; check the address")
    return int(match[1]), int(match[2])


@contextlib.contextmanager
def shipped_from(root: str | os.PathLike) -> Iterator[None]:
    """Ship the `.py` files of folder `root` to the actors of a `parl.connect` inside this block.

    The client remembers `root`, since remote classes are sent later and by other threads. PARL alone would
    guess from `sys.argv[0]`, which is wrong under pytest, in a notebook, with `-m` or from another folder.
    """
    previous, parl_patches.shipped_root = parl_patches.shipped_root, os.path.realpath(root)
    try:
        client = parl_patches.current_client()
        if client is not None:
            client.pyfiles = client.read_local_files()
        yield
    finally:
        parl_patches.shipped_root = previous


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConnectionError(f"{address!r} is no master address; give HOST:PORT, such as localhost:8010")
    return host, int(port)


def _ask_master(host: str, port: int, tag: bytes, timeout_s: float) -> str:
    import zmq

    with zmq.Context() as context, context.socket(zmq.REQ) as request:
        request.linger = 0
        request.connect(f"tcp://{host}:{port}")
        request.send_multipart([tag])
        if not request.poll(int(timeout_s * 1000)):
            raise TimeoutError(f"a connection, but no answer in {timeout_s:g} s")
        return request.recv_multipart()[-1].decode(errors="replace")


def main(arguments: list[str]) -> None:
    """Run one of PARL's own programs, which must not import Paddle before they get their work."""
    os.environ.update(XPARL="True", XPARL_igonre_core="true")  # PARL's spelling
    for name, value in THREAD_LIMITS.items():
        os.environ.setdefault(name, value)
    sys.argv = arguments
    # A job must see the files shipped to it, never those that lie beside this one.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [
        os.path.dirname(arguments[0]),
        *(folder for folder in sys.path if folder not in ("", here)),
    ]
    runpy.run_path(arguments[0], {"__builtins__": parl_substitutes.PARL_BUILTINS}, "__main__")


if __name__ == "__main__":
    # Under its proper name, so that an actor's `import parl_compat` finds this one.
    import parl_compat

    parl_compat.main(sys.argv[1:])
else:
    parl_substitutes.install(parl_patches.PATCHES)
