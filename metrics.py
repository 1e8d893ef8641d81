"""What a run leaves behind: log.log, VisualDL curves, metrics.jsonl and a progress bar, in one directory."""

import contextlib
import json
import logging
import math
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from tqdm import tqdm
from visualdl import LogWriter

from checkpoint import write_text
from progress import Progress
from run_directory import RunDirectory

logger = logging.getLogger("a2c")

SCORE_WINDOW = 100  # games; the usual window of published Atari curves
LOG_FORMAT = "[%(asctime)s] %(message)s"
DATE_FORMAT = "%m-%d %H:%M:%S"


class Metrics:
    """Collects what happens between two lines of metrics, and writes those lines.

    Every scalar's name stands with its meaning in README.md, "The metrics".

    Args:
        run_directory: where all is written.
        settings: the run's settings, for config.json.
        max_sample_steps: the length of the run.
        interval_s: seconds between two lines.
        state: of a resumed run, from `get_state`: counts, time and curves go on from there, and what was
            written after it is taken back.
    """

    def __init__(
        self,
        run_directory: RunDirectory,
        settings: dict,
        max_sample_steps: int,
        interval_s: float,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.run_directory, self.max_sample_steps, self.interval_s = (
            run_directory,
            max_sample_steps,
            interval_s,
        )
        state = state or {}
        self.sample_steps, self.updates, self.episode_num = (
            state.get(name, 0) for name in ("sample_steps", "updates", "episode_num")
        )
        self.returns: deque[float] = deque(state.get("returns", []), maxlen=SCORE_WINDOW)
        self.lengths: deque[int] = deque(state.get("lengths", []), maxlen=SCORE_WINDOW)
        self._losses: list[dict[str, float]] = state.get("losses", [])  # since the last line
        self._seconds: dict[str, float] = state.get("seconds", {})
        self._last_steps = state.get("last_steps", 0)
        self._progress = Progress(settings)
        self._evaluation: dict[str, float] = {}  # not yet written
        self._earlier_s, self._earlier_interval_s = state.get("elapsed_s", 0.0), state.get("interval_s", 0.0)
        path = run_directory.path
        write_text(path / "config.json", json.dumps(settings, indent=2) + "\n")
        self._log_file = log_to_file(path)
        records = _cut(path / "metrics.jsonl", self.sample_steps)
        self._jsonl = (path / "metrics.jsonl").open("a", encoding="utf-8")
        self._curves = _rewrite_curves(path, records, self._earlier_s)
        # disable=None: a bar on a terminal, none in a pipe.
        self._bar = tqdm(
            total=max_sample_steps,
            initial=self.sample_steps,
            unit=" steps",
            unit_scale=True,
            disable=None,
            leave=False,
        )
        self.start_clock()

    def start_clock(self) -> None:
        """Count time from now on, beginning with what a resumed run has already taken."""
        self._start = time.monotonic() - self._earlier_s
        self._last_time = time.monotonic() - self._earlier_interval_s

    def get_state(self) -> dict[str, Any]:
        """All that a resumed run's metrics need to go on from here, ready for JSON."""
        now = time.monotonic()
        return {
            "sample_steps": self.sample_steps,
            "updates": self.updates,
            "episode_num": self.episode_num,
            "elapsed_s": now - self._start,
            "returns": list(self.returns),
            "lengths": list(self.lengths),
            "losses": self._losses,
            "seconds": self._seconds,
            "last_steps": self._last_steps,
            "interval_s": now - self._last_time,
        }

    def score(self) -> float | None:
        """Mean raw score of the last SCORE_WINDOW games; None before there are as many."""
        return sum(self.returns) / SCORE_WINDOW if len(self.returns) == SCORE_WINDOW else None

    def add(self, sample_steps: int, episodes: list, losses: dict[str, float], seconds: dict[str, float]) -> None:
        """Note one update: its sample steps, finished games, losses, and seconds by activity."""
        self.sample_steps += sample_steps
        self.updates += 1
        self.episode_num += len(episodes)
        self.returns.extend(episode.raw_return for episode in episodes)
        self.lengths.extend(episode.length for episode in episodes)
        self._losses.append({name: float(value) for name, value in losses.items()})
        for activity, value in seconds.items():
            self._seconds[activity] = self._seconds.get(activity, 0.0) + value
        self._bar.update(sample_steps)
        if time.monotonic() - self._last_time >= self.interval_s:
            self.write()

    def add_evaluation(self, report: dict[str, Any]) -> None:
        """Note an evaluation's report, as `evaluate.report_of`; the next line of metrics has it."""
        scores, sample_steps = report["raw_return"], report["sample_steps"]
        self._evaluation = {f"eval/raw_return_{name}": scores[name] for name in ("mean", "std")}
        self._evaluation["eval/sample_steps"] = sample_steps
        logger.info(
            "evaluation after %s sample steps: mean raw score %.1f, standard deviation %.1f, of %d games",
            f"{sample_steps:,}",
            scores["mean"],
            scores["std"],
            report["episodes"],
        )

    def write(self) -> None:
        """Write one line of metrics everywhere, of all that came since the last one."""
        if not self._losses:
            return
        now = time.monotonic()
        scalars = self._scalars(now - self._last_time, now - self._start) | self._evaluation
        self._last_time, self._last_steps = now, self.sample_steps
        self._losses, self._seconds, self._evaluation = [], {}, {}
        progress = self._progress.status(self.sample_steps, scalars)
        logger.info(_readable(scalars, self.sample_steps, self.max_sample_steps, progress))
        for warning in self._progress.warnings(self.sample_steps, scalars):
            logger.warning("warning: %s", warning)
        record = {"sample_steps": self.sample_steps}
        record |= {name: float(f"{value:.6g}") for name, value in scalars.items()}
        self._jsonl.write(json.dumps(record) + "\n")
        self._jsonl.flush()
        for name, value in scalars.items():
            self._curves.add_scalar(tag=name, step=self.sample_steps, value=value)

    def summary(self) -> str:
        """One sentence about the whole run so far."""
        elapsed_s = time.monotonic() - self._start
        score = "no game ended yet"
        if self.returns:
            mean = sum(self.returns) / len(self.returns)
            score = f"mean raw score of the last {len(self.returns)} games {mean:.1f}"
        return (
            f"{self.sample_steps:,} sample steps in {_duration(elapsed_s)} "
            f"({self.sample_steps / elapsed_s:,.0f} per s), {self.updates:,} updates, "
            f"{self.episode_num} games, {score}"
        )

    def close(self) -> None:
        self._bar.close()
        self._jsonl.close()
        self._curves.close()
        self._log_file.close()

    def _scalars(self, interval_s: float, elapsed_s: float) -> dict[str, float]:
        scalars = {}
        if self.returns:  # absent, rather than NaN, before the first game ends
            scalars = {
                "episode/raw_return_mean": sum(self.returns) / len(self.returns),
                "episode/raw_return_max": max(self.returns),
                "episode/raw_return_min": min(self.returns),
                "episode/length_mean": sum(self.lengths) / len(self.lengths),
            }
        scalars["episode/count"] = self.episode_num
        for name, group in LOSS_GROUPS.items():
            scalars[f"{group}/{name}"] = sum(losses[name] for losses in self._losses) / len(self._losses)
        scalars["time/sample_steps_per_s"] = (self.sample_steps - self._last_steps) / interval_s
        for activity, value in self._seconds.items():
            scalars[f"time/{activity}_share"] = value / interval_s
        scalars["time/elapsed_s"] = elapsed_s
        return scalars


LOSS_GROUPS = {
    "policy_loss": "loss",
    "value_loss": "loss",
    "entropy": "policy",
    "grad_norm": "learner",
    "learning_rate": "learner",
    "weights_lag": "learner",
}


class _BarHandler(logging.StreamHandler):
    """Writes above the progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stdout)
        sys.stdout.flush()


def log_to_console() -> None:
    """Send the project's log lines to standard output, each with its time."""
    handler = _BarHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(LOG_FORMAT, DATE_FORMAT))
    handler.setLevel(logging.INFO)
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


class _LogFile(logging.FileHandler):
    """A log file that is written until it is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")
        self.setFormatter(logging.Formatter(LOG_FORMAT, DATE_FORMAT))
        logger.addHandler(self)
        logger.setLevel(logging.DEBUG)  # the file keeps what would be too much for the console

    def close(self) -> None:
        logger.removeHandler(self)
        super().close()


def log_to_file(run_dir: Path) -> logging.Handler:
    """Append the project's log lines to the run's log.log until the handler is closed."""
    return _LogFile(run_dir / "log.log")


def _cut(path: Path, sample_steps: int) -> list[dict[str, float]]:
    """Take back the lines of metrics after `sample_steps`, and a last one that a kill cut off; return the rest."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    records = [record for record in records if record.get("sample_steps", math.inf) <= sample_steps]
    write_text(path, "".join(json.dumps(record) + "\n" for record in records))
    return records


def _rewrite_curves(path: Path, records: list[dict[str, float]], elapsed_s: float) -> LogWriter:
    """Begin a VisualDL file with `records`: VisualDL shows the newest file of a directory only.

    Their times of day are as if the run had never paused, so that the curve over time is unbroken too.
    """
    for older in path.glob("vdlrecords.*.log"):
        older.unlink()
    curves = LogWriter(logdir=str(path), display_name=path.name)
    start = time.time() - elapsed_s
    for record in records:
        milliseconds = round(1000 * (start + record.get("time/elapsed_s", elapsed_s)))
        for name, value in record.items():
            if name != "sample_steps":
                curves.add_scalar(tag=name, step=record["sample_steps"], value=value, walltime=milliseconds)
    return curves


def _readable(scalars: dict[str, float], sample_steps: int, max_sample_steps: int, progress: str) -> str:
    speed = scalars["time/sample_steps_per_s"]
    score = "no game ended yet"
    if "episode/raw_return_mean" in scalars:
        score = "score {:.1f} ({:.0f} to {:.0f}), length {:.0f}".format(
            *(
                scalars[f"episode/{name}"]
                for name in ("raw_return_mean", "raw_return_min", "raw_return_max", "length_mean")
            )
        )
    if progress:
        score += f", {progress}"
    shares = " ".join(
        f"{name.removeprefix('time/').removesuffix('_share')} {value:.0%}"
        for name, value in scalars.items()
        if name.endswith("_share")
    )
    return (
        f"steps {sample_steps:,}/{max_sample_steps:,} | {speed:,.0f} steps/s, "
        f"{_duration(max(0, max_sample_steps - sample_steps) / max(speed, 1e-9))} left | {score} | "
        f"entropy {scalars['policy/entropy']:.3f}, policy loss {scalars['loss/policy_loss']:.4f}, "
        f"value loss {scalars['loss/value_loss']:.4f}, lr {scalars['learner/learning_rate']:.2e} | {shares}"
    )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"
    )
