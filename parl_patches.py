"""Which functions of PARL's own modules are replaced, and by what: used by `parl_compat` only.

Each `_patch_...` gets a module right after it was loaded, before another one can import from it.
"""

import atexit
import multiprocessing.connection
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import parl_substitutes

LAUNCHER = Path(__file__).resolve().with_name("parl_compat.py")
HEARTBEAT_INTERVAL_S = 2  # PARL's 10 s make a finished client's CPUs vacant only after up to 30 s

shipped_root: str | None = None  # set by `parl_compat.shipped_from`


def current_client() -> Any:
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
    # Either is missing where connecting failed early.
    to_actors = getattr(client, "job_heartbeat_process", None)
    to_master = getattr(client, "master_heartbeat_thread", None)
    if to_actors is not None:
        to_actors.grpc_server.stop(0)
    if to_master is not None:
        to_master.heartbeat_exit_callback_func = lambda: None  # it would warn of a lost master
        to_master.exit()
        to_master.grpc_server.stop(0)


def disconnect() -> None:
    """Leave the cluster at once, if connected; the actors' CPUs become vacant some seconds later."""
    client = current_client()
    if client is not None:
        sys.modules["parl.remote.client"].GLOBAL_CLIENT = None
        _close_client(client)


def _patch_package(module: Any) -> None:
    if "paddle" in sys.modules:  # its handler prints a C++ stack at each SIGTERM, with which PARL ends jobs
        sys.modules["paddle"].disable_signal_handler()


def _patch_constants(module: Any) -> None:
    module.HEARTBEAT_INTERVAL_S = HEARTBEAT_INTERVAL_S


def _patch_machine_info(module: Any) -> None:
    # PARL asks for the route to 8.8.8.8, and gets None on a machine without one.
    module.get_ip_address = lambda: parl_substitutes.host


def _patch_remote_utils(module: Any) -> None:
    # Not the environment variable of that name, which PARL splits at each space.
    module.XPARL_PYTHON = [sys.executable, str(LAUNCHER)]


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
        self.shipped_root = shipped_root
        try:
            plain_init(self, *args, **kwargs)
        except BaseException:
            _close_client(self)
            raise

    def read_local_files(self: Any, distributed_files: Sequence[str] = ()) -> bytes:
        if shipped_root is not None:
            self.shipped_root = shipped_root
        if self.shipped_root is None:
            return plain_read(self, list(distributed_files))
        if distributed_files:
            raise ValueError("distributed_files cannot be given inside parl_compat.shipped_from")
        sources = {path.name: path.read_bytes() for path in sorted(Path(self.shipped_root).glob("*.py"))}
        files = {"python_files": sources, "other_files": {}, "empty_subfolders": set()}
        return module.cloudpickle.dumps(files)

    module.Client.__init__, module.Client.read_local_files = init, read_local_files
    module.disconnect = disconnect
    atexit.register(disconnect)


def _patch_class_location(module: Any) -> None:
    plain_locate, plain_dump = module.locate_remote_file, module.dump_remote_class
    one_at_a_time = threading.Lock()

    def dump_remote_class(cls: type) -> bytes:
        # Each new actor's thread parses the source; before Python 3.13 two at once fail now and then with
        # "AST constructor recursion depth mismatch" (CPython issue 106905).
        with one_at_a_time:
            return plain_dump(cls)

    def locate_remote_file(module_path: str) -> tuple[str, bool]:
        client = current_client()
        if client is None or client.shipped_root is None:
            return plain_locate(module_path)
        folder, name = os.path.split(os.path.realpath(module_path))
        if folder != client.shipped_root:
            raise FileNotFoundError(
                f"remote class in {module_path}.py, but actors get the files of {client.shipped_root} only; "
                "move the class there, or name its folder in parl_compat.shipped_from"
            )
        return os.path.join(".", name), False

    module.locate_remote_file, module.dump_remote_class = locate_remote_file, dump_remote_class


def _patch_master(module: Any) -> None:
    plain_init = module.Master.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain_init(self, *args, **kwargs)

        def status() -> str:
            # PARL's own answer is as old as the last report of each worker, up to one heartbeat interval.
            cpus = self.worker_manager.cpu_resource
            with self.worker_manager.lock:
                used, vacant = sum(cpus.worker_used_cpus.values()), cpus.cpu_num()
            return f"has {used} used cpus, {vacant} vacant cpus, 0 used_gpus, 0 vacant_gpus."

        self.cluster_monitor.get_status_info = status

    module.Master.__init__ = init


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


PATCHES: dict[str, Callable[[Any], None]] = {
    "parl": _patch_package,
    "parl.utils.machine_info": _patch_machine_info,
    "parl.remote.utils": _patch_remote_utils,
    "parl.remote.remote_constants": _patch_constants,
    "parl.remote.grpc_heartbeat.heartbeat_server": _patch_heartbeat_server,
    "parl.remote.master": _patch_master,
    "parl.remote.client": _patch_client,
    "parl.remote.remote_class_serialization": _patch_class_location,
    "parl.remote.worker": _patch_worker,
}
