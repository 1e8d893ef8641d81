"""One trial of a grid: a `train.py` of its own, on its share of the cores. Used by `tune.py`, on any executor.

Files in the grid's directory, for a trial named NAME:

    NAME/               the run directory of its train.py
    NAME.log            what it printed
    NAME.trial.json     its `Outcome` and its options; what `--resume` and the live table go by
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpu_threads import usable_cores

PROJECT_ROOT = Path(__file__).resolve().parent
SCORE = "episode/raw_return_mean"
POLL_S = 0.5
GRACE_S = 30.0  # train.py ends its update and saves a checkpoint when told to stop
LOG_TAIL_LINES = 5

STATUSES = RUNNING, FINISHED, STOPPED, CRASHED, INTERRUPTED = (
    "running",
    "finished",
    "stopped early",
    "crashed",
    "interrupted",
)

# A trial must end with whoever waits for it, however that ends: PR_SET_PDEATHSIG is 1, SIGTERM 15 (man prctl).
LAUNCHER = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""

stopping = threading.Event()  # set: trials that threads of this process wait for are told to stop


@dataclass(frozen=True)
class Trial:
    """One combination of the grid's values."""

    name: str
    settings: dict[str, Any]  # the grid's, by name, with `seed`
    options: list[str]  # of train.py, without the run directory
    out_dir: Path

    @property
    def run_dir(self) -> Path:
        return self.out_dir / self.name

    @property
    def log(self) -> Path:
        return self.out_dir / f"{self.name}.log"

    @property
    def record(self) -> Path:
        return self.out_dir / f"{self.name}.trial.json"


@dataclass(frozen=True)
class Outcome:
    """How far a trial is, or how it ended."""

    status: str
    exit_status: int | None = None
    seconds: float = 0.0
    host: str = ""
    cores: tuple[int, ...] = ()


@dataclass(frozen=True)
class StopRule:
    """Stops a trial whose score is below `score` once it has made `sample_steps`."""

    score: float
    sample_steps: int

    def is_hopeless(self, metrics: dict[str, float]) -> bool:
        """Whether a line of metrics says so; before the first game ended it cannot."""
        return metrics["sample_steps"] >= self.sample_steps and metrics.get(SCORE, self.score) < self.score


def run_trial(trial: Trial, jobs: int, stop_rule: StopRule | None = None) -> Outcome:
    """Run one `train.py` to its end on one of `jobs` shares of this machine's cores; keep its record.

    A run that was broken off in the trial's directory goes on from its newest checkpoint.
    """
    start = time.monotonic()
    with share_of_cores(jobs) as cores:
        before = Outcome(RUNNING, host=socket.gethostname(), cores=tuple(sorted(cores)))
        save_record(trial, before)
        with _started(trial, len(cores)) as process:
            status = _wait(trial, process, stop_rule)
    outcome = dataclasses.replace(
        before, status=status, exit_status=process.returncode, seconds=round(time.monotonic() - start, 1)
    )
    save_record(trial, outcome)
    return outcome


@contextlib.contextmanager
def share_of_cores(jobs: int) -> Iterator[set[int]]:
    """Bind the calling thread, and what it starts, to one of `jobs` shares of the cores that nobody else has.

    A lock file per share tells threads and processes apart, whoever started them. Where all are taken, as by
    another grid on this machine, the cores are shared with it.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(usable_cores()))
    shares = [set(cores[index::jobs]) or {cores[index % len(cores)]} for index in range(jobs)]
    folder = Path(tempfile.gettempdir()) / f"a2c-tune-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with contextlib.ExitStack() as at_end:
        chosen = shares[0]
        for index, share in enumerate(shares):
            lock = at_end.enter_context((folder / f"share-{index}-of-{jobs}.lock").open("w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            chosen = share
            break
        if hasattr(os, "sched_setaffinity"):  # on Linux, of this thread alone
            os.sched_setaffinity(0, chosen)
            at_end.callback(os.sched_setaffinity, 0, cores)
        yield chosen


@contextlib.contextmanager
def _started(trial: Trial, core_num: int) -> Iterator[subprocess.Popen]:
    where = "--resume" if (trial.run_dir / "config.json").is_file() else "--run_dir"
    command = [sys.executable, "-c", LAUNCHER, str(PROJECT_ROOT / "train.py"), *trial.options]
    with trial.log.open("a") as log:
        process = subprocess.Popen(
            [*command, where, str(trial.run_dir)],
            env={**os.environ, "OMP_NUM_THREADS": str(core_num), "KMP_BLOCKTIME": "0"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C goes to tune.py alone, which tells its trials
        )
    try:
        yield process
    finally:
        _end(process)


def _wait(trial: Trial, process: subprocess.Popen, stop_rule: StopRule | None) -> str:
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=POLL_S)
            return FINISHED if process.returncode == 0 else CRASHED
        if stopping.is_set():
            return INTERRUPTED
        if stop_rule and stop_rule.is_hopeless(last_metrics(trial)):
            return STOPPED


def _end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def save_record(trial: Trial, outcome: Outcome) -> None:
    """Write the trial's record in one step, so that a reader never sees half of it."""
    unfinished = trial.record.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
    unfinished.write_text(json.dumps(dataclasses.asdict(outcome) | {"options": trial.options}) + "\n")
    unfinished.replace(trial.record)


def load_record(trial: Trial) -> tuple[Outcome | None, list[str]]:
    """The trial's outcome so far, None before it began, and the options that it ran with."""
    try:
        fields = json.loads(trial.record.read_text())
    except FileNotFoundError:
        return None, trial.options
    options = fields.pop("options")
    return Outcome(**fields | {"cores": tuple(fields["cores"])}), options


def last_metrics(trial: Trial) -> dict[str, float]:
    """The newest whole line of the trial's metrics; before the first one, {"sample_steps": 0}."""
    with contextlib.suppress(FileNotFoundError), (trial.run_dir / "metrics.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
        for line in reversed(file.read().splitlines()):
            with contextlib.suppress(ValueError):
                return json.loads(line)
    return {"sample_steps": 0}


def log_tail(trial: Trial) -> list[str]:
    """The last lines that the trial printed."""
    with contextlib.suppress(FileNotFoundError):
        return trial.log.read_text(errors="replace").rstrip().splitlines()[-LOG_TAIL_LINES:]
    return []
