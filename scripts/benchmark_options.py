"""The command line of `benchmark.py`."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

PARTS = ("env", "inference", "learning", "messages", "local", "parl", "simulate")
SIMULATED = [1, 8, 64, 256]
# Stable-Baselines3 skips frames itself, so the game must not.
PEER_GAMES = "NoFrameskip-v4"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; `python {self.prog} --help` explains all options\n")


def _parts(text: str) -> list[str]:
    parts = text.split(",")
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no part {unknown[0]!r}; choose of {','.join(PARTS)}")
    return parts


def _counts(text: str) -> list[int]:
    if not all(count.isdecimal() and int(count) for count in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} are no numbers of actors; give some such as 1,8,64")
    return [int(count) for count in text.split(",")]


def _positive(kind: type) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        if not (value := kind(text)) > 0:
            raise ValueError
        return value

    parse.__name__ = f"positive {kind.__name__}"
    return parse


def parse_options(argv: list[str] | None, description: str) -> argparse.Namespace:
    """The command line, with the defaults that depend on other options filled in."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="scripts/benchmark.py", description=description, formatter_class=formatter, allow_abbrev=False
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round of short measurements, 2 min; with peers 5"
    )
    parser.add_argument("--rounds", type=_positive(int), help="rounds, whose medians count [5; 1 with --quick]")
    parser.add_argument(
        "--seconds", type=_positive(float), help="of one measurement of a trainer; a part gets a fifth [15; 4]"
    )
    parser.add_argument("--parts", type=_parts, help=f"which of {','.join(PARTS)} [all but simulate]")
    parser.add_argument("--env_name", default="PongNoFrameskip-v4", help="the game [%(default)s]")
    parser.add_argument(
        "--env_dim",
        type=_positive(int),
        default=84,
        help="side of the frames, pixels, of ours and of the peers [%(default)s, as in the literature]",
    )
    parser.add_argument("--peer_python", metavar="PYTHON", help="a Python that has the peers' packages")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every value of every round there")
    parser.add_argument(
        "--simulate_actors", type=_counts, metavar="1,8,64", help="feed the learner from so many stub actors"
    )
    options = parser.parse_args(argv)
    options.rounds = options.rounds or (1 if options.quick else 5)
    options.seconds = options.seconds or (4.0 if options.quick else 15.0)
    options.parts = options.parts or (["simulate"] if options.simulate_actors else list(PARTS[:-1]))
    options.simulate_actors = options.simulate_actors or SIMULATED
    if options.peer_python and not options.env_name.endswith(PEER_GAMES):
        parser.error(
            f"--env_name is {options.env_name}, but with --peer_python its name must end in {PEER_GAMES}, such as "
            "PongNoFrameskip-v4"
        )
    if options.env_dim % 4 or options.env_dim < 36:
        parser.error(f"--env_dim is {options.env_dim}; it must be a multiple of 4, and 36 or more")
    if options.json and not options.json.resolve().parent.is_dir():
        parser.error(f"there is no folder {options.json.resolve().parent} for --json")
    return options
