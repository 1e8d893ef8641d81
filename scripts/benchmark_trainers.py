"""Whole trainers for `benchmark.py`: `train.py` as a user starts it, alone or on a PARL cluster of its own."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from cpu_threads import THREAD_SETTINGS

from benchmark_rows import MEGABYTES, SAMPLE_STEPS, Row, parl_row, trainer_row

ROOT = Path(__file__).resolve().parent.parent
START_S = 180.0  # imports, environments, and remote actors, on a slow machine
STOP_S = 30.0


class MeasurementError(RuntimeError):
    """A measurement that gave no value; the message is one sentence."""


def environment() -> dict[str, str]:
    """The environment of every program that is measured."""
    # Each chooses its own threads; what the shell or this program set would hold for its children.
    return {name: value for name, value in os.environ.items() if name not in THREAD_SETTINGS}


def last_line(output: str) -> str:
    """What a program that failed said last."""
    return next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "it said nothing")


def local(env_name: str, env_dim: int, actor_num: int, env_num: int, steps: int, seconds: float) -> list[Row]:
    """`train.py --engine local` with `actor_num` actors of `env_num` environments each, and its peak memory."""
    name = trainer_row("local", actor_num * env_num, steps)
    rate, peak_mb = _train(
        [
            *("--engine", "local", "--env_name", env_name, "--env_dim", str(env_dim)),
            *("--actor_num", str(actor_num), "--env_num", str(env_num), "--sample_batch_steps", str(steps)),
        ],
        seconds,
    )
    return [Row(name, SAMPLE_STEPS, rate), Row(f"{name}, peak memory", MEGABYTES, peak_mb)]


def parl(
    env_name: str,
    env_dim: int,
    runs: list[tuple[int, bool]],
    env_num: int,
    steps: int,
    cpu_num: int,
    seconds: float,
) -> list[Row]:
    """`train.py --engine parl`, once for each (number of actors, overlap) of `runs`, on one cluster."""
    rows = []
    with cluster(cpu_num) as address:
        for actor_num, overlap in runs:
            options = [
                *("--engine", "parl", "--master_address", address),
                *("--env_name", env_name, "--env_dim", str(env_dim)),
                *("--actor_num", str(actor_num), "--env_num", str(env_num), "--sample_batch_steps", str(steps)),
            ]
            rate, _ = _train(options + ["--overlap"] * overlap, seconds)
            rows.append(Row(parl_row(actor_num, env_num, steps, overlap), SAMPLE_STEPS, rate))
    return rows


def _train(options: list[str], seconds: float) -> tuple[float, float]:
    """Sample steps/s over at least `seconds` after the start, and peak resident memory, MB."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        console, run_dir = Path(folder, "console"), Path(folder, "run")
        command = [sys.executable, str(ROOT / "train.py"), *options, "--run_dir", str(run_dir), "--device", "cpu"]
        command += ["--log_metrics_interval_s", str(min(1.0, seconds / 4))]
        with console.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment())
        try:
            first, last = _window(process, run_dir / "metrics.jsonl", seconds)
            peak_mb = _peak_memory_mb(process.pid)
        except MeasurementError as error:
            raise MeasurementError(f"{error}: {last_line(console.read_text())}") from None
        finally:
            _end(process)
    steps, elapsed_s = (last[name] - first[name] for name in ("sample_steps", "time/elapsed_s"))
    return steps / elapsed_s, peak_mb


def _window(process: subprocess.Popen, metrics: Path, seconds: float) -> tuple[dict, dict]:
    """The second line of metrics, since the first is of the start, and the first that is `seconds` later."""
    deadline = time.monotonic() + START_S + 3 * seconds
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        text = metrics.read_text() if metrics.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        for line in lines[2:]:
            if line["time/elapsed_s"] - lines[1]["time/elapsed_s"] >= seconds:
                return lines[1], line
        if ended:
            raise MeasurementError(f"train.py ended with status {process.returncode}")
        time.sleep(0.1)
    raise MeasurementError(f"train.py was too slow to measure {seconds:g} s within {START_S + 3 * seconds:g} s")


def _peak_memory_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024 / 1e6
    raise MeasurementError("train.py ended before its peak memory was read")


def _end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def cluster(cpu_num: int) -> Iterator[str]:
    """A PARL cluster on this machine, with records of its own: the user's cluster is left alone."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        try:
            _cluster_command(folder, "start", "--cpu_num", str(cpu_num), "--port", str(port))
            yield f"127.0.0.1:{port}"
        finally:
            _cluster_command(folder, "stop")


def _cluster_command(folder: str, *arguments: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "cluster.py"), *arguments, "--state_dir", folder]
    console = Path(folder, f"{arguments[0]}.out")  # not a pipe, which the cluster's processes would hold open
    with console.open("w") as output:
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment()).returncode
    if status:
        raise MeasurementError(f"the cluster did not {arguments[0]}: {last_line(console.read_text())}")
