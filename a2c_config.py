"""Every setting of a run, with its unit: `A2CConfig`, its presets and its command line.

    python train.py --help
    python train.py --preset parl --env_name BreakoutNoFrameskip-v4 --seed 3

Later sources win: defaults < `--preset` < `--config FILE.json` < options.
"""

import argparse
import dataclasses
import difflib
import json
import math
import sys
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

DEFAULT_MASTER_ADDRESS = "localhost:8010"
FRAMES_PER_SAMPLE_STEP = 4  # frame skip, Mnih et al. 2015


class ConfigError(ValueError):
    """A setting that cannot be used; the message names it, its value and what would be right."""


def _setting(default: Any, help_text: str, **limits: Any) -> Any:
    """A dataclass field with its help text and limits: `minimum`, `above`, `maximum` or `choices`."""
    return field(default=default, metadata={"help": help_text, **limits})


@dataclass(frozen=True)
class A2CConfig:
    """All settings of one training run.

    Raises:
        ConfigError: where a value has the wrong type or lies outside its limits.
    """

    # What is played
    env_name: str = _setting("PongNoFrameskip-v4", "the game, e.g. BreakoutNoFrameskip-v4 or ALE/Pong-v5")
    env_dim: int = _setting(44, "side of the square grey observation, pixels", minimum=36, maximum=210)
    episodic_life: bool = _setting(False, "learn from a lost life as from an end (scores stay whole games)")
    max_episode_frames: int = _setting(
        108_000, "time limit of a game, emulator frames (108,000 = 30 min of play)", minimum=4
    )

    # Who plays
    engine: str = _setting(
        "auto",
        "where actors run: auto = parl if a cluster answers, else local",
        choices=("auto", "local", "parl", "ray"),
    )
    master_address: str | None = _setting(
        None, f"PARL master, HOST:PORT [{DEFAULT_MASTER_ADDRESS}]; given by hand, it must answer"
    )
    ray_address: str | None = _setting(None, "Ray cluster, HOST:PORT, for --engine ray [a Ray on this machine]")
    actor_num: int = _setting(2, "actors; on PARL or Ray each needs one vacant CPU", minimum=1)
    env_num: int = _setting(8, "environments per actor", minimum=1)
    sample_batch_steps: int = _setting(8, "sample steps per environment and update", minimum=1)
    overlap: bool = _setting(False, "sample the next batch while learning from this one: one update behind")
    actor_timeout_s: float = _setting(120.0, "longest wait for one actor's answer, s", above=0)
    cluster_wait_s: float = _setting(60.0, "longest wait for a cluster and its vacant CPUs, s", minimum=0)

    # How it learns
    max_sample_steps: int = _setting(
        2_000_000, "length of the run, sample steps (1 sample step = 4 emulator frames)", minimum=1
    )
    gamma: float = _setting(0.99, "discount per sample step", minimum=0, maximum=1)
    gae_lambda: float = _setting(0.95, "lambda of the advantage estimate", minimum=0, maximum=1)
    optimizer: str = _setting("adam", "update rule", choices=("adam", "rmsprop"))
    optimizer_epsilon: float = _setting(1e-5, "epsilon of the update rule", above=0)
    start_lr: float = _setting(1.5e-3, "learning rate at the start; falls linearly to 0 over the run", above=0)
    vf_loss_coeff: float = _setting(0.5, "weight of the value loss", minimum=0)
    entropy_coeff: float = _setting(0.003, "weight of the entropy bonus; positive rewards entropy", minimum=0)
    entropy_decay: bool = _setting(True, "let entropy_coeff fall linearly to 0 over the run, as the rate does")
    max_grad_norm: float = _setting(0.5, "clip the gradients' global norm to this; 0 = no clip", minimum=0)
    normalize_advantages: bool = _setting(False, "scale advantages to mean 0, standard deviation 1 per batch")
    normalize_observations: bool = _setting(
        True, "centre and scale the pixels by what random play shows; else only divide them by 255"
    )
    seed: int = _setting(0, "seed of Python, NumPy, Paddle and every environment", minimum=0, maximum=2**31 - 1)
    device: str = _setting("auto", "where to learn: auto, cpu, gpu or gpu:N")
    precision: str = _setting(
        "auto",
        "of the network's products: auto = bf16 on a CPU that computes it in hardware, else fp32",
        choices=("auto", "fp32", "bf16"),
    )

    # What is kept
    run_dir: str = _setting("train_log/train", "directory of this run; an older run there is moved aside")
    log_metrics_interval_s: float = _setting(10.0, "seconds between two lines of metrics", above=0)
    checkpoint_interval_s: float = _setting(
        60.0, "seconds between two checkpoints; 0 = only at the end or at Ctrl-C", minimum=0
    )
    keep_checkpoints: int = _setting(
        3, "newest checkpoints to keep, beside the best by score", minimum=1, maximum=1000
    )
    init_from: str | None = _setting(
        None, "start from the weights of this checkpoint (a file or a run directory), all else new"
    )
    eval_interval_s: float = _setting(
        0.0, "seconds between two evaluations of the newest weights, beside the training; 0 = none", minimum=0
    )

    def __post_init__(self) -> None:
        for name, setting_type in _SETTING_TYPES.items():
            object.__setattr__(self, name, _converted(name, getattr(self, name), setting_type))
        for setting in dataclasses.fields(self):
            _check_limits(setting, getattr(self, setting.name))
        if self.env_dim % 4:
            raise ConfigError(f"env_dim is {self.env_dim}, but must be a multiple of 4, such as 44 or 84")
        if self.batch_size > self.max_sample_steps:
            raise ConfigError(
                f"max_sample_steps is {self.max_sample_steps}, less than one update's batch of "
                f"{self.batch_size} (actor_num x env_num x sample_batch_steps)"
            )
        if self.master_address is not None:
            _check_address("master_address", self.master_address)
        if self.ray_address is not None:
            _check_address("ray_address", self.ray_address)
            if self.engine == "auto":
                raise ConfigError(
                    f"ray_address is {self.ray_address!r}, but engine auto never chooses Ray; add --engine ray"
                )
        if self.device not in ("auto", "cpu", "gpu") and not (
            self.device.startswith("gpu:") and self.device[4:].isdigit()
        ):
            raise ConfigError(f"device is {self.device!r}; choose auto, cpu, gpu or gpu:N")

    @property
    def batch_size(self) -> int:
        """Sample steps per update, B = A*T*N."""
        return self.actor_num * self.sample_batch_steps * self.env_num

    def as_dict(self) -> dict[str, Any]:
        """Every setting by name, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> "A2CConfig":
        """Build from settings by name; an unknown name raises ConfigError with the nearest right one."""
        for name in settings:
            if name not in _SETTING_TYPES:
                raise ConfigError(f"there is no setting {name!r}{_nearest(name, _SETTING_TYPES)}")
        return cls(**settings)

    @classmethod
    def from_command_line(cls, argv: list[str] | None = None, description: str | None = None) -> "A2CConfig":
        """Parse `argv` (default: the program's own); a bad option ends the program with one sentence."""
        return cls.from_dict(parse_command_line(argv, description)[0])


def parse_command_line(
    argv: list[str] | None = None, description: str | None = None
) -> tuple[dict[str, Any], str | None]:
    """Return the settings that preset, file and options give, and the run directory to resume, or None.

    A bad option ends the program with one sentence.
    """
    parser = _parser(description)
    options = vars(parser.parse_args(argv))
    resume, preset, config_file = (options.pop(name, None) for name in ("resume", "preset", "config"))
    try:
        settings = preset_settings(preset) if preset else {}
        if config_file:
            settings |= load_json(config_file)
        settings |= options
        if resume is None:
            A2CConfig.from_dict(settings)
        elif resume and "run_dir" in settings:
            raise ConfigError(f"--resume {resume} names the run to resume; leave out --run_dir")
        else:
            resume = resume or settings.pop("run_dir", A2CConfig.run_dir)
    except ConfigError as error:
        parser.error(str(error))
    return settings, resume


@dataclass(frozen=True)
class Preset:
    """A short difference from the defaults, and why one would want it."""

    reason: str
    settings: dict[str, Any]


PRESETS: dict[str, Preset] = {
    "pong": Preset("the defaults, chosen for Pong on two cores (docs/tuning.md says what was tried)", {}),
    "atari": Preset(
        "any game: a lost life counts while learning, more exploration, 10 M sample steps",
        {
            "episodic_life": True,
            "start_lr": 1e-3,
            "entropy_coeff": 0.01,
            "max_sample_steps": 10_000_000,
        },
    ),
    "parl": Preset(
        "the classic run of PARL's A2C example: 5 actors x 5 environments x 20 steps, plain pixels",
        {
            "env_dim": 84,
            "actor_num": 5,
            "env_num": 5,
            "sample_batch_steps": 20,
            "normalize_observations": False,
            "start_lr": 1e-3,
            "gae_lambda": 1.0,
            "entropy_coeff": 0.01,
            "entropy_decay": False,
            "max_sample_steps": 10_000_000,
        },
    ),
}

_SETTING_TYPES = typing.get_type_hints(A2CConfig)


def preset_settings(name: str) -> dict[str, Any]:
    """Return the settings of preset `name`; ConfigError names the nearest right one."""
    if name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r}; choose {', '.join(PRESETS)}{_nearest(name, PRESETS)}")
    return dict(PRESETS[name].settings)


def load_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON object of settings.

    Raises:
        ConfigError: where the file is missing, no JSON, or no object.
    """
    try:
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read the settings in {str(path)!r}: {reason}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{str(path)!r} is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f'{str(path)!r} holds a JSON {type(settings).__name__}, not {{"setting": value}}')
    return settings


def _check_address(name: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{name} is {address!r}; it must be HOST:PORT, e.g. {DEFAULT_MASTER_ADDRESS}")


def _check_limits(setting: dataclasses.Field, value: Any) -> None:
    limits = setting.metadata
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{setting.name} is {value}, but must be a finite number")
    for broken, rule in (
        ("minimum" in limits and not value >= limits["minimum"], f"at least {limits.get('minimum')}"),
        ("above" in limits and not value > limits["above"], f"above {limits.get('above')}"),
        ("maximum" in limits and not value <= limits["maximum"], f"at most {limits.get('maximum')}"),
    ):
        if broken:
            raise ConfigError(f"{setting.name} is {value}, but must be {rule}")
    if "choices" in limits and value not in limits["choices"]:
        choices = ", ".join(limits["choices"])
        raise ConfigError(f"{setting.name} is {value!r}; choose {choices}{_nearest(value, limits['choices'])}")


def _converted(name: str, value: Any, setting_type: Any) -> Any:
    """`value` as `setting_type`; whole floats such as 1e7 serve as int, ints serve as float."""
    allowed = typing.get_args(setting_type) or (setting_type,)
    if isinstance(value, bool) and bool not in allowed:
        pass
    elif int in allowed and isinstance(value, float) and value.is_integer():
        return int(value)
    elif float in allowed and isinstance(value, int):
        return float(value)
    elif isinstance(value, allowed):
        return value
    expected = " or ".join("null" if kind is type(None) else kind.__name__ for kind in allowed)
    raise ConfigError(f"{name} is {value!r}, but must be {expected}")


def _nearest(name: str, names: typing.Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence and suggest the nearest option."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            name = unknown.split()[0]
            message = f"there is no option {name.split('=')[0]}"
            message += _nearest(name.split("=")[0], self._option_string_actions)
        print(f"error: {message}; `python {self.prog} --help` lists all options", file=sys.stderr)
        sys.exit(2)


def exit_status(script: typing.Callable[..., int], *arguments: Any) -> int:
    """Run `script` and return its exit status; an interrupt is 130, a foreseen error one sentence and 1."""
    try:
        return script(*arguments)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _number(kind: type) -> typing.Callable[[str], Any]:
    def parse(text: str) -> int | float:
        try:
            return int(text) if kind is int else float(text)
        except ValueError:
            if kind is int and float(text).is_integer():  # 1e7 is easier to read than 10000000
                return int(float(text))
            raise

    parse.__name__ = kind.__name__  # argparse prints it: "invalid int value"
    return parse


def _metavar(setting: dataclasses.Field, kind: Any) -> str:
    if "choices" in setting.metadata:
        return "|".join(setting.metadata["choices"])
    return {int: "INT", float: "FLOAT"}.get(kind, "TEXT")


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = Parser(
        description=description or __doc__,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    presets = "; ".join(f"{name}: {preset.reason}" for name, preset in PRESETS.items())
    parser.add_argument("--preset", metavar="|".join(PRESETS), help=f"a named set of settings ({presets})")
    parser.add_argument("--config", metavar="FILE.json", help="settings as a JSON object")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN_DIR",
        help=f"go on with the run in RUN_DIR [--run_dir, {A2CConfig.run_dir}] from its newest checkpoint",
    )
    for setting in dataclasses.fields(A2CConfig):
        kind = _SETTING_TYPES[setting.name]
        default = "" if setting.default is None else f" [{setting.default}]"
        help_text = (setting.metadata["help"] + default).replace("%", "%%")
        if kind is bool:
            parser.add_argument(f"--{setting.name}", action=argparse.BooleanOptionalAction, help=help_text)
        else:
            parser.add_argument(
                f"--{setting.name}",
                type=_number(kind) if kind in (int, float) else str,
                metavar=_metavar(setting, kind),
                help=help_text,
            )
    return parser
