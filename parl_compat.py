"""Makes `import parl` work on today's Python, whatever else is installed: import this module first.

    import parl_compat
    import parl

PARL 2.2.1 is from 2023: it dies of a current pyarrow, protobuf or setuptools, forks while it is imported,
and listens on every network interface although its protocol unpickles what it receives. Here PARL's modules,
and nobody else in the process, get substitutes for what they import, and a few of their functions are replaced.

    python parl_compat.py SCRIPT ARGUMENTS...     # runs one of PARL's own programs, shielded in the same way
"""

import atexit
import contextlib
import ipaddress
import multiprocessing.connection
import os
import re
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import parl_substitutes

HEARTBEAT_INTERVAL_S = 2  # PARL's 10 s make a finished client's CPUs vacant only after up to 30 s
THREAD_LIMITS = {
    "OMP_NUM_THREADS": "1",  # two OpenMP programs that spin against each other are 100 times slower
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "KMP_BLOCKTIME": "0",
}

_shipped_root: str | None = None
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
    global _shipped_root
    previous, _shipped_root = _shipped_root, os.path.realpath(root)
    try:
        client = _current_client()
        if client is not None:
            client.pyfiles = client.read_local_files()
        yield
    finally:
        _shipped_root = previous


def disconnect() -> None:
    """Leave the cluster at once, if connected; the actors' CPUs become vacant some seconds later."""
    client = _current_client()
    if client is not None:
        sys.modules["parl.remote.client"].GLOBAL_CLIENT = None
        _close_client(client)


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


def _current_client() -> Any:
    """Return PARL's client of this process, or None; a fork inherits its parent's, which is not its own."""
    client = getattr(sys.modules.get("parl.remote.client"), "GLOBAL_CLIENT", None)
    return client if client is not None and client.process_id == os.getpid() else None


def _close_client(client: Any) -> None:
    """End a client's threads and close its ports. PARL's own `destroy` waits for threads that sleep."""
    client.connected_to_master = False
    client.client_is_alive.value = False
    client.dead_job_queue.put("exit")
    for actor_is_alive in getattr(client, "instance_id_to_job", {}).values():
        actor_is_alive.value = False  # who still waits for an answer gets an error instead of waiting for ever
    client.job_heartbeat_process.grpc_server.stop(0)
    heartbeats = getattr(client, "master_heartbeat_thread", None)
    if heartbeats is not None:
        heartbeats.heartbeat_exit_callback_func = lambda: None  # it would warn of a lost master
        heartbeats.exit()
        heartbeats.grpc_server.stop(0)


def _patch_package(module: Any) -> None:
    if "paddle" in sys.modules:  # its handler prints a C++ stack at each SIGTERM, with which PARL ends jobs
        sys.modules["paddle"].disable_signal_handler()


def _patch_constants(module: Any) -> None:
    module.HEARTBEAT_INTERVAL_S = HEARTBEAT_INTERVAL_S


def _patch_machine_info(module: Any) -> None:
    # PARL asks for the route to 8.8.8.8, and gets None on a machine without one.
    module.get_ip_address = lambda: parl_substitutes.host


def _patch_remote_utils(module: Any) -> None:
    module.XPARL_PYTHON = [sys.executable, os.path.abspath(__file__)]


def _patch_heartbeat_server(module: Any) -> None:
    class ActorHeartbeats(module.threading.Thread):
        """Answers the heartbeats of this client's actors.

        PARL forks a process for it, which outlives a killed client, gets the user's Ctrl-C, and is a fork
        of a program full of threads. A thread ends with the client, however that ends.
        """

        def __init__(self, port: Any, client_count: Any, host_is_alive: Any, dead_job_queue: Any) -> None:
            super().__init__(daemon=True)
            self.servicer = module.GrpcHeartbeatServer(client_count, host_is_alive, dead_job_queue)
            self.grpc_server = module.grpc.server(ThreadPoolExecutor(max_workers=8))
            module.heartbeat_pb2_grpc.add_GrpcHeartbeatServicer_to_server(self.servicer, self.grpc_server)
            port.value = self.grpc_server.add_insecure_port("[::]:0")

        def run(self) -> None:
            self.grpc_server.start()
            last_beats = self.servicer.last_heartbeat_table
            while self.servicer.host_is_alive.value:
                time.sleep(HEARTBEAT_INTERVAL_S)
                oldest = time.time() - module.remote_constants.HEARTBEAT_RCVTIMEO_S
                for actor in [actor for actor, beat in list(last_beats.items()) if beat < oldest]:
                    del last_beats[actor]
                    self.servicer.dead_job_queue.put(actor)
                self.servicer.client_count.value = len(last_beats)

    module.HeartbeatServerProcess = ActorHeartbeats


def _patch_client(module: Any) -> None:
    plain_init, plain_read = module.Client.__init__, module.Client.read_local_files

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        self.shipped_root = _shipped_root
        try:
            plain_init(self, *args, **kwargs)
        except BaseException:
            _close_client(self)
            raise

    def read_local_files(self: Any, distributed_files: list[str] = []) -> bytes:  # noqa: B006
        if _shipped_root is not None:
            self.shipped_root = _shipped_root
        if self.shipped_root is None:
            return plain_read(self, distributed_files)
        if distributed_files:
            raise ValueError("distributed_files cannot be given inside parl_compat.shipped_from")
        sources = {path.name: path.read_bytes() for path in sorted(Path(self.shipped_root).glob("*.py"))}
        files = {"python_files": sources, "other_files": {}, "empty_subfolders": set()}
        return module.cloudpickle.dumps(files)

    module.Client.__init__, module.Client.read_local_files = init, read_local_files
    module.disconnect = disconnect
    atexit.register(disconnect)


def _patch_class_location(module: Any) -> None:
    plain_locate = module.locate_remote_file

    def locate_remote_file(module_path: str) -> tuple[str, bool]:
        client = _current_client()
        if client is None or client.shipped_root is None:
            return plain_locate(module_path)
        folder, name = os.path.split(os.path.realpath(module_path))
        if folder != client.shipped_root:
            raise FileNotFoundError(
                f"remote class in {module_path}.py, but actors get the files of {client.shipped_root} only; "
                "move the class there, or name its folder in parl_compat.shipped_from"
            )
        return os.path.join(".", name), False

    module.locate_remote_file = locate_remote_file


def _patch_worker(module: Any) -> None:
    def launch_jobs(self: Any, commands: Any) -> None:
        # PARL's loop waits for the next command for ever, also after its worker was killed, and leaves
        # every job that ends as a zombie until the next one starts.
        worker_ended = multiprocessing.parent_process().sentinel
        jobs: list[subprocess.Popen] = []
        while worker_ended not in (ready := multiprocessing.connection.wait([commands._reader, worker_ended], 1)):
            jobs = [job for job in jobs if job.poll() is None]
            if ready:
                jobs.append(subprocess.Popen(commands.get(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))

    module.Worker._launch_cmd = launch_jobs


_PATCHES: dict[str, Callable[[Any], None]] = {
    "parl": _patch_package,
    "parl.utils.machine_info": _patch_machine_info,
    "parl.remote.utils": _patch_remote_utils,
    "parl.remote.remote_constants": _patch_constants,
    "parl.remote.grpc_heartbeat.heartbeat_server": _patch_heartbeat_server,
    "parl.remote.client": _patch_client,
    "parl.remote.remote_class_serialization": _patch_class_location,
    "parl.remote.worker": _patch_worker,
}


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
    parl_substitutes.install(_PATCHES)
