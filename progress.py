"""Am I on track? A run's score beside the band that measured runs of the same settings kept to.

    python progress.py                      # of the run in train_log/train
    python progress.py train_log/seed1
    python progress.py --from train_log/seed0 train_log/seed1 train_log/seed2 --out progress_pong.json

The last command measures: it makes the band of the runs' scores by sample steps. Every progress_*.json beside
this file is such a band; a run that learns by the same settings, whatever its seed, is compared with it in its
status line. A run of other settings is not.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from a2c_config import Parser
from checkpoint import write_text
from run_curves import SCORE, Run, RunError, read_run, what_it_learns

POINTS = 150  # of a band
STEP_MARGIN = 1.2  # another seed may be this much slower or faster than all that were measured
SCORE_MARGIN = 1.0  # ... and a mean of 100 games is off by about this much
LEFT_PLATEAU = 2.0  # points above where runs begin: no longer random play
COLLAPSED_ENTROPY = 0.02  # nats: another action than the likeliest about once in 400 steps
COLLAPSED_LINES = 3


@dataclass(frozen=True)
class Band:
    """The scores that runs of one setting had, by sample steps; lists of equal length."""

    settings: dict[str, Any]  # as `what_it_learns`
    seeds: list[int]
    goal: float  # the score that counts as solved
    sample_steps: list[int]
    low: list[float]  # the lowest score of any run within STEP_MARGIN
    median: list[float]
    high: list[float]

    @property
    def goal_steps(self) -> float | None:
        """Where the median reaches the goal, sample steps; None where it does not."""
        reached = np.flatnonzero(np.array(self.median) >= self.goal)
        return float(self.sample_steps[reached[0]]) if len(reached) else None

    @property
    def plateau_end(self) -> float | None:
        """Where even the slowest run plays clearly better than at the start, sample steps."""
        left = np.flatnonzero(np.array(self.low) >= self.median[0] + LEFT_PLATEAU)
        return float(self.sample_steps[left[0]]) if len(left) else None

    def expected(self, sample_steps: float) -> tuple[float, float]:
        """The lower and upper edge at `sample_steps`."""
        low, high = (np.interp(sample_steps, self.sample_steps, edge) for edge in (self.low, self.high))
        return float(low), float(high)

    def steps_to_goal(self, sample_steps: float, score: float) -> float | None:
        """Sample steps from here to the goal along the median curve; None where that does not get there.

        A run is where the median has its score, within SCORE_MARGIN, as near to its own sample steps as may be:
        on a plateau that is its sample steps, on a slope it is its score.
        """
        if self.goal_steps is None:
            return None
        rising = np.maximum.accumulate(self.median)
        steps = np.array(self.sample_steps)
        here = steps[(rising >= score - SCORE_MARGIN) & (rising <= score + SCORE_MARGIN)]
        if not len(here):
            here = steps[[np.abs(rising - score).argmin()]]
        return max(0.0, self.goal_steps - float(np.clip(sample_steps, here[0], here[-1])))


class Progress:
    """Judges the lines of metrics of one run, whose settings decide with which band it is compared."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.band = band_for(settings)
        self._entropy_coeff = what_it_learns(settings)["entropy_coeff"]
        self._collapsed_lines = 0
        self._warned: set[str] = set()

    def status(self, sample_steps: int, scalars: dict[str, float]) -> str:
        """Where the run stands, e.g. "on track (expected -19 to -12 here), 18 in about 9 min"; "" if unknown."""
        if self.band is None or SCORE not in scalars:
            return ""
        score, (low, high) = scalars[SCORE], self.band.expected(sample_steps)
        if score >= self.band.goal:
            return f"{self.band.goal:.0f} reached"
        place = "on track"
        if score < low - SCORE_MARGIN:
            place = "below the band"
        elif score > high + SCORE_MARGIN:
            place = "ahead of the band"
        phrase = f"{place} (expected {round(low)} to {round(high)} here)"
        steps, speed = self.band.steps_to_goal(sample_steps, score), scalars["time/sample_steps_per_s"]
        if steps is None or speed <= 0:
            return phrase
        return f"{phrase}, {self.band.goal:.0f} in about {max(1, round(steps / speed / 60))} min"

    def warnings(self, sample_steps: int, scalars: dict[str, float]) -> list[str]:
        """What is newly wrong with the run, and what to change; each is said once."""
        found = {
            "entropy": self._entropy_warning(sample_steps, scalars),
            "flat": self._flat_warning(sample_steps, scalars),
        }
        new = {name: warning for name, warning in found.items() if warning and name not in self._warned}
        self._warned |= new.keys()
        return list(new.values())

    def _entropy_warning(self, sample_steps: int, scalars: dict[str, float]) -> str:
        entropy = scalars["policy/entropy"]
        self._collapsed_lines = self._collapsed_lines + 1 if entropy < COLLAPSED_ENTROPY else 0
        solved = self.band and scalars.get(SCORE, -np.inf) >= self.band.goal
        if self._collapsed_lines < COLLAPSED_LINES or solved:
            return ""
        return (
            f"the policy's entropy has collapsed to {entropy:.3f} nats after {sample_steps:,} sample steps: it "
            "always acts alike and finds nothing new; start again with a larger --entropy_coeff than "
            f"{self._entropy_coeff:g}, or a smaller --start_lr"
        )

    def _flat_warning(self, sample_steps: int, scalars: dict[str, float]) -> str:
        end = self.band and self.band.plateau_end
        if not end or sample_steps <= end or SCORE not in scalars:
            return ""
        left = self.band.median[0] + LEFT_PLATEAU
        if scalars[SCORE] >= left - SCORE_MARGIN:
            return ""
        return (
            f"the score is still {scalars[SCORE]:.1f} after {sample_steps:,} sample steps, where every measured "
            f"run of these settings was above {left:.0f} by {end:,.0f}: it is stuck; start again with another "
            "--seed, and if that is stuck too, with --precision fp32"
        )


def band_for(settings: dict[str, Any]) -> Band | None:
    """The band measured with these settings, whatever the seed; None where there is none.

    Raises:
        RunError: where a file beside this one is damaged.
    """
    wanted = what_it_learns(settings)
    for path in sorted(Path(__file__).parent.glob("progress_*.json")):
        try:
            band = Band(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise RunError(
                f"{path} is no band of scores ({error}); make it anew with `progress.py --from`"
            ) from error
        if what_it_learns(band.settings) == wanted:
            return band
    return None


def measure(runs: list[Run], goal: float) -> Band:
    """Make the band of several runs that differ in nothing but their seed.

    Raises:
        RunError: where they do differ, or two have one seed, or there are fewer than two.
    """
    settings = what_it_learns(runs[0].settings)
    for run in runs[1:]:
        other = what_it_learns(run.settings)
        names = [name for name in settings if settings[name] != other[name]]
        if names:
            raise RunError(f"{runs[0].path} and {run.path} differ in {', '.join(names)}; a band is of one setting")
    seeds = [run.settings["seed"] for run in runs]
    if len(set(seeds)) < max(len(seeds), 2):
        raise RunError(f"the runs' seeds are {seeds}; a band needs two runs or more, each with a seed of its own")
    first = max(run.sample_steps[0] for run in runs)
    last = min(run.sample_steps[-1] for run in runs)
    if first >= last:
        raise RunError("the runs have no sample steps in common; train them for longer")
    steps = np.linspace(first, last, POINTS)
    scores = np.stack([np.interp(steps, run.sample_steps, run.scores) for run in runs])  # [runs, POINTS]
    slower = [(steps >= at / STEP_MARGIN) & (steps <= at) for at in steps]
    faster = [(steps >= at) & (steps <= at * STEP_MARGIN) for at in steps]
    return Band(
        settings,
        sorted(seeds),
        goal,
        [round(at) for at in steps],
        *(
            [round(float(score), 2) for score in edge]
            for edge in (
                [scores[:, near].min() for near in slower],
                np.median(scores, axis=0),
                [scores[:, near].max() for near in faster],
            )
        ),
    )


def write_band(band: Band, path: str) -> None:
    """Write `band` as JSON, one line per field."""
    fields = [f'"{name}": {json.dumps(value)}' for name, value in asdict(band).items()]
    write_text(path, "{\n" + ",\n".join(fields) + "\n}\n")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("run_dir", nargs="?", default="train_log/train", help="the run to judge [train_log/train]")
    parser.add_argument("--from", dest="runs", nargs="+", metavar="RUN_DIR", help="measure a band of these runs")
    parser.add_argument(
        "--out", default="progress_pong.json", metavar="FILE", help="its file [progress_pong.json]"
    )
    parser.add_argument("--goal", type=float, default=18.0, metavar="SCORE", help="the score to reach [18]")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = _parse(argv)
    try:
        if options.runs:
            band = measure([read_run(path) for path in options.runs], options.goal)
            write_band(band, options.out)
            print(f"written: {options.out}, a band of {len(band.seeds)} seeds")
            reached = f"at {band.goal_steps:,.0f} sample steps" if band.goal_steps else "never"
            print(f"its median reaches {band.goal:g} {reached}")
            return 0
        run = read_run(options.run_dir)
        judge, steps = Progress(run.settings), int(run.last["sample_steps"])
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{steps:,} sample steps, score {run.scores[-1]:.1f}")
    print(judge.status(steps, run.last) or "no band was measured with this run's settings")
    for warning in judge.warnings(steps, run.last):
        print(f"warning: {warning}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
