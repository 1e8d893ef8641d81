"""The processes that one `cluster.py start` or `join` began, and the record by which to find them again.

PARL's own `xparl stop` kills by name, every cluster on the machine. Here a process is ours only if its pid
and its time of birth are those on record, or if it descends from such a one.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = str(ROOT / "parl_compat.py")
START_S = 60.0  # plus 1 s per CPU: each starts two jobs, of about 1 s of a core together
POLL_S = 0.1
GRACE_S = 5.0  # from SIGTERM to SIGKILL
KILL_S = 10.0  # from SIGKILL to giving up
LOG_TAIL_LINES = 8


class ClusterError(Exception):
    """What went wrong with a cluster, and what to do next, in one sentence."""


@dataclass
class Started:
    """One process: a pid alone may name another program by the time that we look again."""

    name: str
    pid: int
    create_time: float

    def process(self) -> psutil.Process | None:
        """The process, or None where it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            return process if self._is_born_as(process) and is_alive(process) else None
        return None

    def leads_session(self) -> bool:
        """Whether processes in the session of this number are ours: the pid was not given to another program."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return self._is_born_as(psutil.Process(self.pid))
        return True  # it has ended; the system does not reuse the number while others are in its session

    def _is_born_as(self, process: psutil.Process) -> bool:
        # Linux derives the time from the clock, which may be corrected by a fraction of a second.
        return abs(process.create_time() - self.create_time) < 1


@dataclass
class Record:
    """A cluster or a joined worker, kept in a JSON file `path` with its logs beside it."""

    path: Path
    address: str  # of the master, HOST:PORT
    host: str  # where our processes listen
    cpu_num: int
    monitor_url: str = ""
    processes: list[Started] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> "Record":
        """Read a record; ClusterError where the file is damaged."""
        try:
            fields = json.loads(path.read_text())
            fields["processes"] = [Started(**started) for started in fields["processes"]]
            return cls(path, **fields)
        except (ValueError, TypeError, KeyError) as error:
            raise ClusterError(f"{path} is no cluster record ({error}); delete it and run this again") from error

    def save(self) -> None:
        """Write the record: all or nothing."""
        fields = dataclasses.asdict(self)
        del fields["path"]
        unfinished = self.path.with_suffix(".unfinished")
        try:
            unfinished.write_text(json.dumps(fields, indent=1) + "\n")
            unfinished.replace(self.path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise

    def log(self, name: str) -> Path:
        """Where the process `name` writes."""
        return self.path.with_name(f"{self.path.stem}-{name}.log")

    def launch(self, name: str, program: str, *arguments: str) -> None:
        """Start one of PARL's programs, detached from this terminal, and put it on record."""
        self.log(name).unlink(missing_ok=True)  # an error message must not quote the log of an earlier start
        with self.log(name).open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, LAUNCHER, str(_parl_folder() / program), *arguments],
                cwd=ROOT,
                env={**os.environ, "XPARL_HOST": self.host},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.processes.append(Started(name, process.pid, psutil.Process(process.pid).create_time()))
        self.save()

    def launch_worker(self, log_server_port: int) -> None:
        """Start the program that lends `cpu_num` CPUs to the master."""
        where = ("--address", self.address, "--log_server_port", str(log_server_port))
        self.launch("worker", "start.py", "--name", "worker", "--cpu_num", str(self.cpu_num), *where)

    @contextlib.contextmanager
    def removed_on_failure(self) -> Iterator[None]:
        """Leave nothing behind where the block fails or is interrupted."""
        try:
            self.save()  # a folder that cannot be written shows before anything runs
            yield
        except BaseException:
            self.remove()
            raise

    def wait_until(self, is_ready: Callable[[], bool], what: str) -> None:
        """Return once `is_ready()`; ClusterError where one of our processes ends or the time is up."""
        wait_s = START_S + self.cpu_num
        deadline = time.monotonic() + wait_s
        while not is_ready():
            for name in self.ended():
                raise ClusterError(
                    f"the {name} ended while it started; the end of its log {self.log(name)} is\n"
                    f"{self.log_tail(name)}"
                )
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"{what} was not ready after {wait_s:g} s (logs in {self.path.parent}); run this again, "
                    f"with fewer CPUs than --cpu_num {self.cpu_num} if the machine is busy"
                )
            time.sleep(POLL_S)

    def ended(self) -> list[str]:
        """The names of the processes that no longer run."""
        return [started.name for started in self.processes if started.process() is None]

    def log_tail(self, name: str) -> str:
        """The last lines that the process `name` wrote."""
        lines = self.log(name).read_text(errors="replace").strip().splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:]) or "(nothing)"

    def remove(self) -> None:
        """End every process that descends from this record, then delete it; its logs stay."""
        force_at = time.monotonic() + GRACE_S
        victims: set[psutil.Process] = set()
        while True:
            # Looked up again each time: a worker that is still alive may have started another job.
            victims = {process for process in victims | self._family() if is_alive(process)}
            if not victims:
                break
            overtime = time.monotonic() - force_at
            if overtime > KILL_S:
                pids = ", ".join(str(process.pid) for process in victims)
                raise ClusterError(f"the processes {pids} of {self.address} do not end; run this again later")
            for process in victims:
                _signal(process, force=overtime > 0)
            time.sleep(POLL_S)
        self.path.unlink(missing_ok=True)

    def _family(self) -> set[psutil.Process]:
        """Our processes with all their descendants, also those whose parents are gone."""
        family = {process for started in self.processes if (process := started.process())}
        sessions = {started.pid for started in self.processes if started.leads_session()}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if os.getsid(process.pid) in sessions and LAUNCHER in process.cmdline():
                    family.add(process)
        for process in list(family):
            with contextlib.suppress(psutil.NoSuchProcess):
                family.update(process.children(recursive=True))
        return family


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; a zombie does not, though nobody may collect it in a container."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def records(state_dir: Path) -> list[Record]:
    """All records in a folder, which need not exist."""
    return [Record.load(path) for path in sorted(state_dir.glob("*.json"))]


def _signal(process: psutil.Process, force: bool) -> None:
    try:
        if force:
            process.kill()
        else:
            process.terminate()
    except psutil.NoSuchProcess:
        pass
    except psutil.AccessDenied as error:
        owner = process.username()
        raise ClusterError(f"process {process.pid} belongs to {owner}; stop the cluster as {owner}") from error


def _parl_folder() -> Path:
    spec = importlib.util.find_spec("parl")
    if spec is None or spec.origin is None:
        raise ClusterError(f"PARL is not installed for {sys.executable}; run `bash scripts/setup.sh`")
    return Path(spec.origin).parent / "remote"
