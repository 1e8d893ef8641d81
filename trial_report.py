"""What `tune.py` shows: its trials while they run; at the end the leaderboard, curves and hyper-parameters."""

import csv
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from visualdl import LogWriter

import trials
from trials import SCORE, Outcome, Trial


class Table:
    """A line for each trial that ends and, on a terminal, one for each that runs, renewed in place."""

    def __init__(self, shown: list[Trial]) -> None:
        self._trials, self._ended, self._lines = shown, set(), 0
        self._width = max((len(trial.name) for trial in shown), default=0)

    def show_end(self, trial: Trial, outcome: Outcome) -> None:
        """Print how a trial ended; of one that crashed, the end of its log as well."""
        self.clear()
        self._ended.add(trial.name)
        minutes = f"{outcome.seconds / 60:.1f} min"
        print(f"{len(self._ended):3}/{len(self._trials)}  {self._line(trial, outcome.status)}  {minutes}")
        if outcome.status == trials.CRASHED:
            print(f"     exit status {outcome.exit_status}, the end of {trial.log}:")
            for line in trials.log_tail(trial):
                print(f"     | {line}")
        sys.stdout.flush()

    def refresh(self) -> None:
        """Renew the lines of the running trials, where standard output is a terminal."""
        if not sys.stdout.isatty():
            return
        self.clear()
        for trial in self._trials:
            outcome, _ = trials.load_record(trial)
            if trial.name not in self._ended and outcome and outcome.status == trials.RUNNING:
                print(f"         {self._line(trial, outcome.status)}"[: shutil.get_terminal_size().columns - 1])
                self._lines += 1
        sys.stdout.flush()

    def clear(self) -> None:
        """Take the running trials' lines away."""
        if self._lines:
            print(f"\033[{self._lines}A\033[J", end="")
        self._lines = 0

    def _line(self, trial: Trial, status: str) -> str:
        metrics = trials.last_metrics(trial)
        score = f"{metrics[SCORE]:8.1f}" if SCORE in metrics else "       -"
        speed = f"{metrics.get('time/sample_steps_per_s', 0):6,.0f} steps/s"
        steps = f"{metrics['sample_steps']:11,.0f} steps"
        return f"{trial.name:{self._width}}  {status:13} score {score}  {steps}  {speed}"


@dataclass(frozen=True)
class Row:
    """A trial's place on the leaderboard."""

    trial: Trial
    outcome: Outcome
    score: float | None  # mean raw score of its last 100 games
    combination_score: float | None  # mean over the seeds of this combination that have a score
    metrics: dict[str, float]


def leaderboard(all_trials: list[Trial]) -> list[Row]:
    """The trials that have run: best combination first, within it best seed first; without a score last."""
    found = []
    for trial in all_trials:
        outcome, _ = trials.load_record(trial)
        if outcome is not None:
            metrics = trials.last_metrics(trial)
            found.append((trial, outcome, metrics.get(SCORE), metrics))
    scores: dict[str, list[float]] = {}
    for trial, _, score, _ in found:
        if score is not None:
            scores.setdefault(_combination(trial), []).append(score)
    means = {name: sum(values) / len(values) for name, values in scores.items()}
    rows = [
        Row(trial, outcome, score, means.get(_combination(trial)), line) for trial, outcome, score, line in found
    ]
    return sorted(
        rows, key=lambda row: (_ascending(row.combination_score), _combination(row.trial), _ascending(row.score))
    )


def write_report(all_trials: list[Trial], out_dir: Path) -> int:
    """Write leaderboard.csv, curves.png and hparams/, print the ranked table; return how many trials crashed."""
    rows = leaderboard(all_trials)
    if not rows:
        return 0
    _write_csv(rows, out_dir / "leaderboard.csv")
    _write_hyper_parameters(rows, out_dir / "hparams")
    print(f"\n{'rank':>4}  {'mean':>8}  {'seeds':13}  combination")
    combinations: dict[str, list[Row]] = {}
    for row in rows:
        combinations.setdefault(_combination(row.trial), []).append(row)
    for rank, (combination, same) in enumerate(combinations.items(), start=1):
        seeds = " ".join(_readable(row.score) for row in same)
        print(f"{rank:4}  {_readable(same[0].combination_score):>8}  {seeds:13}  {combination or 'all'}")
    crashed = sum(row.outcome.status == trials.CRASHED for row in rows)
    counts = {status: sum(row.outcome.status == status for row in rows) for status in trials.STATUSES}
    print(", ".join(f"{number} {status}" for status, number in counts.items() if number))
    print(f"written: {out_dir / 'leaderboard.csv'}{_draw_curves(rows, out_dir / 'curves.png')}")
    print(f"next: bash scripts/visualdl.sh --logdir {out_dir}   (its view of hyper-parameters)")
    return crashed


def _ascending(score: float | None) -> float:
    return float("inf") if score is None else -score


def _combination(trial: Trial) -> str:
    return ",".join(f"{name}={value}" for name, value in trial.settings.items() if name != "seed")


def _readable(score: float | None) -> str:
    return "-" if score is None else f"{score:.1f}"


def _write_csv(rows: list[Row], path: Path) -> None:
    settings = list(rows[0].trial.settings)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["rank", "trial", "status", "score", "combination_score", "sample_steps", "minutes", *settings]
        )
        for rank, row in enumerate(rows, start=1):
            writer.writerow(
                [
                    rank,
                    row.trial.name,
                    row.outcome.status,
                    row.score,
                    row.combination_score,
                    int(row.metrics["sample_steps"]),
                    round(row.metrics.get("time/elapsed_s", row.outcome.seconds) / 60, 2),
                    *row.trial.settings.values(),
                ]
            )


def _write_hyper_parameters(rows: list[Row], folder: Path) -> None:
    """One VisualDL log per trial: its settings, and the score by which the view ranks them."""
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier report on the same grid
    for row in rows:
        if row.score is None:
            continue
        settings = {
            name: value if type(value) in (int, float) else str(value)
            for name, value in row.trial.settings.items()
        }
        with LogWriter(logdir=str(folder / row.trial.name)) as writer:
            writer.add_hparams(hparams_dict=settings, metrics_list=["score"])
            writer.add_scalar(tag="score", step=int(row.metrics["sample_steps"]), value=row.score)


def _draw_curves(rows: list[Row], path: Path) -> str:
    from plot import curves_of, draw
    from run_curves import read_run

    runs = [read_run(row.trial.run_dir) for row in rows if row.score is not None]
    if not runs:
        return " (no game ended, so there are no curves)"
    draw(curves_of(runs, group=True), "both", str(path))
    return f", {path}"
