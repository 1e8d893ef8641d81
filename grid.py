"""The grid of `tune.py`: which settings with which values, and one `Trial` for each combination."""

import itertools
import json
from pathlib import Path
from typing import Any

from a2c_config import A2CConfig, ConfigError, load_json, parse_command_line
from trials import Trial

RESERVED = {"run_dir": "each trial has its own", "engine": "give it to all trials as --engine"}


def read_grid(arguments: list[str]) -> dict[str, list[Any]]:
    """Return the values to try by setting, from NAME=VALUE,... each, or from one FILE.json.

    Raises:
        ConfigError: where a name or the file cannot be used, or a value is given twice.
    """
    if len(arguments) == 1 and arguments[0].endswith(".json"):
        grid = load_json(arguments[0])
    else:
        grid = {}
        for argument in arguments:
            name, equals, values = argument.partition("=")
            if not equals or name in grid:
                problem = "is given twice" if name in grid else "is not NAME=VALUE,..., such as start_lr=1e-3,7e-4"
                raise ConfigError(f"--grid {argument} {problem}")
            grid[name] = [_value(text) for text in values.split(",")]
    known = A2CConfig().as_dict()
    for name, values in grid.items():
        if name in RESERVED:
            raise ConfigError(f"{name} cannot be in the grid: {RESERVED[name]}")
        if not isinstance(values, list) or not values:
            raise ConfigError(f"the grid's {name} is {values!r}, but must be a list of values to try")
        # One at a time, beside defaults: checks name and type. Whether they fit together shows per trial.
        checked = [getattr(A2CConfig.from_dict({**known, name: value}), name) for value in values]
        if len(set(checked)) < len(checked):
            raise ConfigError(f"the grid's {name} has a value twice: {', '.join(map(str, checked))}")
        grid[name] = checked
    return grid


def make_trials(grid: dict[str, list[Any]], seeds: int, options: list[str], out_dir: Path) -> list[Trial]:
    """The full product of the grid's values, each with seeds 0 to `seeds` - 1, unless the grid names seeds.

    `options` of train.py go to every trial. One that train.py would refuse ends the program with its sentence.
    """
    if "seed" not in grid:
        grid = {**grid, "seed": list(range(seeds))}
    elif seeds > 1:
        raise ConfigError("the grid names the seeds already; leave out --seeds")
    made = []
    for values in itertools.product(*grid.values()):
        settings = dict(zip(grid, values, strict=True))
        name = ",".join(f"{name}={value}" for name, value in settings.items()).replace("/", "-")
        own = itertools.chain.from_iterable(_option(*setting) for setting in settings.items())
        # A trial runs alone on its cores, not on a PARL cluster that happens to be up.
        trial = Trial(name, settings, ["--engine", "local", *options, *own], out_dir)
        given, resumed = parse_command_line(trial.options)
        if resumed is not None or "run_dir" in given:
            raise ConfigError("--run_dir cannot be given to all trials: each has its own, in --out_dir")
        made.append(trial)
    return made


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _option(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", str(value)]
