"""Draw learning curves of one or more runs: the score by sample steps and by minutes.

    python plot.py train_log/train
    python plot.py train_log/seed0 train_log/seed1 train_log/seed2 --out docs/pong.png
    python plot.py train_log/*/ --by minutes --no-group
    python plot.py train_log/train --reference "18 solved" --reference "19.5 PARL after 10 M"

Runs that differ only in their seed become one line, their mean, in a band from the lowest to the highest.
"""

import argparse
import contextlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("agg")  # draws into files, also where there is no display

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from a2c_config import Parser
from run_curves import Run, read_run, what_it_learns

# Okabe and Ito 2008: eight colours that colour-blind readers tell apart (without the yellow, too pale for a line).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":", "-.")
POINTS = 400
AXES = {"steps": "sample steps (1 = 4 frames)", "minutes": "minutes"}


@dataclass(frozen=True)
class Curve:
    """One line of the picture, of one run or of several that differ only in their seed."""

    label: str
    runs: list[Run]

    def points(self, by: str) -> tuple[np.ndarray, np.ndarray]:
        """The x values [P] ("steps" or "minutes") that all runs share, and their scores [runs, P] there."""
        axes = [run.sample_steps if by == "steps" else run.minutes for run in self.runs]
        at = np.linspace(max(axis[0] for axis in axes), min(axis[-1] for axis in axes), POINTS)
        return at, np.stack([np.interp(at, axis, run.scores) for axis, run in zip(axes, self.runs, strict=True)])


@dataclass(frozen=True)
class Reference:
    """A score to compare with, drawn as a line of its own."""

    score: float
    name: str = ""


def curves_of(runs: list[Run], group: bool) -> list[Curve]:
    """Put runs that differ only in their seed together if `group`, and name every curve by what sets it apart."""
    groups: list[list[Run]] = []
    for run in runs:
        same = (one for one in groups if group and _settings(one[0]) == _settings(run))
        if (found := next(same, None)) is not None:
            found.append(run)
        else:
            groups.append([run])
    settings = [_settings(one[0]) for one in groups]
    differing = [name for name in settings[0] if any(other[name] != settings[0][name] for other in settings)]
    labels = [_label(one, differing) for one in groups]
    if len(set(labels)) < len(labels):  # repeated runs: only their directories tell them apart
        labels = [f"{label}, {one[0].path.name}" for label, one in zip(labels, groups, strict=True)]
    return [Curve(label, one) for label, one in zip(labels, groups, strict=True)]


def _settings(run: Run) -> dict[str, object]:
    # Where a run is carried out changes its minutes.
    where = {name: run.settings.get(name) for name in ("engine", "device", "precision")}
    return what_it_learns(run.settings) | where


def _label(runs: list[Run], differing: list[str]) -> str:
    parts = [_readable(name, _settings(runs[0])[name]) for name in differing]
    seeds = [str(run.settings["seed"]) for run in runs]
    parts.append(f"mean of {len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}")
    return ", ".join(parts)


def _readable(name: str, value: object) -> str:
    if name == "env_name":
        return _game(str(value))
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"


def _game(env_name: str) -> str:
    return env_name.removeprefix("ALE/").partition("NoFrameskip")[0].partition("-v")[0]


def draw(curves: list[Curve], by: str, path: str, references: Sequence[Reference] = ()) -> None:
    """Write the picture to `path`; its ending (png, svg, pdf) says as what.

    Args:
        curves: one line each.
        by: the x axis, "steps" or "minutes", or "both" side by side.
        references: scores to draw a line at.

    Raises:
        OSError, ValueError: where it cannot be written, or not as that kind of file.
    """
    panels = list(AXES) if by == "both" else [by]
    style = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#888888"}
    with plt.rc_context(style):
        figure, grid = plt.subplots(
            1, len(panels), figsize=(5.6 * len(panels), 4.2), sharey=True, squeeze=False, layout="constrained"
        )
        for axes, panel in zip(grid[0], panels, strict=True):
            for index, curve in enumerate(curves):
                _draw_curve(axes, curve, panel, index)
            _finish(axes, panel, references)
        games = sorted({_game(run.settings["env_name"]) for curve in curves for run in curve.runs})
        figure.suptitle(", ".join(games), fontweight="bold")
        grid[0][0].set_ylabel("raw score, mean of 100 games")
        grid[0][0].legend(frameon=False, fontsize=9, loc="best")
        figure.savefig(path, dpi=160)
        plt.close(figure)


def _draw_curve(axes: Axes, curve: Curve, by: str, index: int) -> None:
    at, scores = curve.points(by)
    colour, dash = COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]
    marker = "o" if at[0] == at[-1] else None  # a run with a single line of metrics
    axes.plot(at, scores.mean(axis=0), dash, marker=marker, color=colour, linewidth=1.8, label=curve.label)
    if len(scores) > 1:
        axes.fill_between(at, scores.min(axis=0), scores.max(axis=0), color=colour, alpha=0.2, linewidth=0)


def _finish(axes: Axes, by: str, references: Sequence[Reference]) -> None:
    axes.set_xlabel(AXES[by])
    axes.set_xlim(left=0)
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    if by == "steps":
        axes.xaxis.set_major_formatter(FuncFormatter(_readable_steps))
    for reference in references:
        axes.axhline(reference.score, color="#555555", linewidth=0.9, linestyle=(0, (4, 3)))
        axes.annotate(
            f"{reference.score:g} {reference.name}".rstrip(),
            (0, reference.score),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            xytext=(4, 3),
            color="#555555",
            fontsize=9,
        )


def _readable_steps(steps: float, _: int) -> str:
    return f"{steps / 1e6:g} M" if steps >= 1e6 else f"{steps / 1e3:g} k" if steps >= 1e3 else f"{steps:g}"


def _reference(text: str) -> Reference:
    score, _, name = text.strip().partition(" ")
    with contextlib.suppress(ValueError):
        if math.isfinite(float(score)):
            return Reference(float(score), name.strip())
    raise argparse.ArgumentTypeError(
        f"{text!r} does not begin with a score; write it as '18' or '19.5 PARL after 10 M'"
    )


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", help="a run's directory, e.g. train_log/train")
    parser.add_argument(
        "--out", default="curves.png", metavar="FILE", help="the picture: png, svg or pdf [curves.png]"
    )
    parser.add_argument("--by", choices=(*AXES, "both"), default="both", help="the x axis [both]")
    parser.add_argument(
        "--group", action=argparse.BooleanOptionalAction, default=True, help="one line for all seeds [yes]"
    )
    parser.add_argument(
        "--reference",
        type=_reference,
        action="append",
        default=[],
        metavar="'SCORE NAME'",
        help="draw a line at this score, with this name; may be given more than once",
    )
    options = parser.parse_args(argv)
    try:
        runs = [read_run(path) for path in options.run_dirs]
        draw(curves_of(runs, options.group), options.by, options.out, options.reference)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for run in runs:
        steps, minutes = run.sample_steps[-1], run.minutes[-1]
        print(f"{run.path}: score {run.scores[-1]:.1f} after {steps:,} sample steps, {minutes:.1f} min")
    print(f"written: {Path(options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
