"""Read back what a run of train.py left: its settings and its curve of scores. For plot.py and progress.py.

run = read_run("train_log/train")
run.sample_steps, run.minutes, run.scores
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from a2c_config import A2CConfig

SCORE = "episode/raw_return_mean"

# Settings that say where and how a run is carried out, not what it learns.
BOOKKEEPING = frozenset(
    (
        "seed",
        "engine",
        "master_address",
        "ray_address",
        "actor_timeout_s",
        "cluster_wait_s",
        "device",
        "precision",
        "run_dir",
        "log_metrics_interval_s",
        "checkpoint_interval_s",
        "keep_checkpoints",
        "eval_interval_s",
    )
)


class RunError(ValueError):
    """A directory that holds no run, or a run that cannot be used; the message names it and what to do."""


@dataclass(frozen=True)
class Run:
    """One run's settings and its lines of metrics from the first finished game on."""

    path: Path
    settings: dict[str, Any]
    sample_steps: np.ndarray  # int64 [P]
    minutes: np.ndarray  # float64 [P], wall clock since the start, over all resumed parts
    scores: np.ndarray  # float64 [P], mean raw score of the last 100 games
    last: dict[str, float]  # the newest line of metrics, by name


def what_it_learns(settings: dict[str, Any]) -> dict[str, Any]:
    """The part of `settings` on which a curve by sample steps depends, the seed left out."""
    settings = A2CConfig().as_dict() | settings  # an older run lacks newer settings: it ran as by default
    return {name: value for name, value in settings.items() if name not in BOOKKEEPING}


def read_run(run_dir: str | Path) -> Run:
    """Read a run directory, also while the run is still writing to it.

    Raises:
        RunError: where there is no run, or none of its games has ended yet.
    """
    path = Path(run_dir)
    for name in ("config.json", "metrics.jsonl"):
        if not (path / name).is_file():
            raise RunError(
                f"{str(run_dir)!r} is no run of train.py (it has no {name}); name a directory such as "
                "train_log/train, made by `python train.py`"
            )
    try:
        settings = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{path / 'config.json'} is not JSON ({error}); the run is damaged") from error
    lines = _lines(path / "metrics.jsonl")
    scored = [line for line in lines if SCORE in line]
    if not scored:
        raise RunError(f"no game of the run in {str(run_dir)!r} has ended yet; wait a minute and try again")
    return Run(
        path,
        settings,
        np.array([line["sample_steps"] for line in scored], dtype=np.int64),
        np.array([line["minutes"] for line in scored]),
        np.array([line[SCORE] for line in scored]),
        lines[-1],
    )


def _lines(path: Path) -> list[dict[str, float]]:
    """The lines of metrics in ascending sample steps, each with its `minutes` since the start."""
    lines: list[dict[str, float]] = []
    texts = path.read_text(encoding="utf-8").splitlines()
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            if number == len(texts):
                break  # a killed run may leave half a line at the end
            raise RunError(f"line {number} of {path} is not JSON; the run is damaged") from error
        # A run that was killed and resumed repeats the steps after its checkpoint: the repeat counts.
        while lines and lines[-1]["sample_steps"] >= line["sample_steps"]:
            lines.pop()
        earlier_s = lines[-1]["time/elapsed_s"] if lines else 0.0
        offset_s = lines[-1]["minutes"] * 60 - earlier_s if lines else 0.0
        if line["time/elapsed_s"] < earlier_s:  # a clock that began anew when the run was resumed
            offset_s += earlier_s
        lines.append(line | {"minutes": (line["time/elapsed_s"] + offset_s) / 60})
    return lines
