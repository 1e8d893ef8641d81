"""What a run leaves behind: log.log, VisualDL curves, metrics.jsonl and a progress bar, in one directory."""

import fcntl
import json
import logging
import shutil
import sys
import time
from collections import deque
from datetime import datetime
from pathlib import Path

from tqdm import tqdm
from visualdl import LogWriter

logger = logging.getLogger("a2c")

SCORE_WINDOW = 100  # games; the usual window of published Atari curves
LOG_FORMAT = "[%(asctime)s] %(message)s"
DATE_FORMAT = "%m-%d %H:%M:%S"


class RunDirectory:
    """A run's own directory: created, locked against a second run, an older run's content moved aside.

    Raises:
        FileExistsError: where another run writes there now, or where it holds something that is no run.
        OSError: where it cannot be written.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        if self._has_content() and not (self.path / "config.json").is_file():
            raise FileExistsError(
                f"run_dir is {path!r}, which exists and is no run of train.py (it has no config.json); choose "
                "another --run_dir"
            )
        lock_path = self.path.with_name(self.path.name + ".lock")
        lock_path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = lock_path.open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileExistsError(
                f"another run is writing to {path} now; wait for it, or choose another --run_dir"
            ) from None
        self.moved_to = self._move_old_run_aside()
        self.path.mkdir()

    def close(self) -> None:
        self._lock.close()

    def _has_content(self) -> bool:
        return self.path.exists() and not (self.path.is_dir() and not any(self.path.iterdir()))

    def _move_old_run_aside(self) -> Path | None:
        if not self._has_content():
            shutil.rmtree(self.path, ignore_errors=True)
            return None
        started = datetime.fromtimestamp((self.path / "config.json").stat().st_mtime)
        aside = self.path.with_name(f"{self.path.name}-{started:%Y%m%d-%H%M%S}")
        for count in range(1, 1000):
            if not aside.exists():
                break
            aside = self.path.with_name(f"{self.path.name}-{started:%Y%m%d-%H%M%S}-{count}")
        self.path.rename(aside)
        return aside


class Metrics:
    """Collects what happens between two lines of metrics, and writes those lines.

    Every scalar's name stands with its meaning in README.md, "The metrics".
    """

    def __init__(self, run_directory: RunDirectory, settings: dict, max_sample_steps: int, interval_s: float):
        self.run_directory, self.max_sample_steps, self.interval_s = (
            run_directory,
            max_sample_steps,
            interval_s,
        )
        self.sample_steps = self.updates = self.episode_num = 0
        self.returns: deque[float] = deque(maxlen=SCORE_WINDOW)
        self.lengths: deque[int] = deque(maxlen=SCORE_WINDOW)
        path = run_directory.path
        (path / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        self._log_file = logging.FileHandler(path / "log.log", encoding="utf-8")
        self._log_file.setFormatter(logging.Formatter(LOG_FORMAT, DATE_FORMAT))
        logger.addHandler(self._log_file)
        logger.setLevel(logging.DEBUG)  # the file keeps what would be too much for the console
        self._jsonl = (path / "metrics.jsonl").open("a", encoding="utf-8")
        self._curves = LogWriter(logdir=str(path), display_name=path.name)
        # disable=None: a bar on a terminal, none in a pipe.
        self._bar = tqdm(total=max_sample_steps, unit=" steps", unit_scale=True, disable=None, leave=False)
        self._losses: list[dict[str, float]] = []
        self._seconds: dict[str, float] = {}
        self._last_steps = 0
        self.start_clock()

    def start_clock(self) -> None:
        """Count time from now on."""
        self._start = self._last_time = time.monotonic()

    def add(self, sample_steps: int, episodes: list, losses: dict[str, float], seconds: dict[str, float]) -> None:
        """Note one update: its sample steps, finished games, losses, and seconds by activity."""
        self.sample_steps += sample_steps
        self.updates += 1
        self.episode_num += len(episodes)
        self.returns.extend(episode.raw_return for episode in episodes)
        self.lengths.extend(episode.length for episode in episodes)
        self._losses.append(losses)
        for activity, value in seconds.items():
            self._seconds[activity] = self._seconds.get(activity, 0.0) + value
        self._bar.update(sample_steps)
        if time.monotonic() - self._last_time >= self.interval_s:
            self.write()

    def write(self) -> None:
        """Write one line of metrics everywhere, of all that came since the last one."""
        if not self._losses:
            return
        now = time.monotonic()
        scalars = self._scalars(now - self._last_time, now - self._start)
        self._last_time, self._last_steps = now, self.sample_steps
        self._losses, self._seconds = [], {}
        logger.info(_readable(scalars, self.sample_steps, self.max_sample_steps))
        record = {"sample_steps": self.sample_steps, **scalars}
        self._jsonl.write(json.dumps({name: float(f"{value:.6g}") for name, value in record.items()}) + "\n")
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
        logger.removeHandler(self._log_file)
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


def _readable(scalars: dict[str, float], sample_steps: int, max_sample_steps: int) -> str:
    speed = scalars["time/sample_steps_per_s"]
    score = "no game ended yet"
    if "episode/raw_return_mean" in scalars:
        score = "score {:.1f} ({:.0f} to {:.0f}), length {:.0f}".format(
            *(
                scalars[f"episode/{name}"]
                for name in ("raw_return_mean", "raw_return_min", "raw_return_max", "length_mean")
            )
        )
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
