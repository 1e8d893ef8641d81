"""The names of Atari environments, their games and their ROMs.

    game = resolve_env_name("BreakoutNoFrameskip-v4")

| name, with any game's in Pong's place | frames per step | sticky actions |
|---|---|---|
| `PongNoFrameskip-v4`, `PongDeterministic-v4`, `Pong-v4` | 4 | none |
| `PongNoFrameskip-v0`, `PongDeterministic-v0`, `Pong-v0` | 4 | 0.25 |
| `ALE/Pong-v5` | 4 | 0.25 (Machado et al. 2018, arXiv:1709.06009) |

The frame skip is always ours: `Pong-v4` skips 4 frames here, not 2 to 4 at random as in gym.
"""

import difflib
import functools
import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import ale_py
import gymnasium
from ale_py import roms

_NAME_PATTERN = re.compile(r"(ALE/)?(\w+?)(NoFrameskip|Deterministic)?-v(\d+)")
_STICKY_ACTIONS = {"0": 0.25, "4": 0.0, "5": 0.25}


@dataclass(frozen=True)
class AtariGame:
    """A game as its environment name asks for it."""

    env_name: str
    rom_id: str  # ale-py's name, e.g. "space_invaders"
    repeat_action_probability: float  # sticky actions, per emulator frame


@functools.cache
def rom_ids_by_game() -> dict[str, str]:
    """The rom id of every game that one can play alone, by its name as in `ALE/SpaceInvaders-v5`."""
    gymnasium.register_envs(ale_py)
    specs = [spec for name, spec in gymnasium.registry.items() if name.startswith("ALE/")]
    return {spec.name: spec.kwargs["game"] for spec in specs}


@functools.cache
def rom_md5s() -> dict[str, str]:
    """ale-py's list of ROMs: the MD5 of the right file, by rom id."""
    md5s = json.loads((Path(roms.__file__).parent / "md5.json").read_text())
    return {file_name.removesuffix(".bin"): md5 for file_name, md5 in md5s.items()}


def rom_dir() -> Path:
    """Where ale-py looks for ROMs."""
    return Path(os.environ.get("ALE_ROMS_DIR") or Path(roms.__file__).parent)


def rom_problem(rom_id: str, directory: Path) -> str | None:
    """Say what is wrong with a game's ROM in `directory`; None if it is there and the right one."""
    path = directory / f"{rom_id}.bin"
    if not path.is_file():
        return f"{path.name} is not in {directory}"
    md5 = hashlib.md5(path.read_bytes()).hexdigest()
    if md5 != rom_md5s()[rom_id]:
        return f"{path} has the MD5 {md5}, but the right file has {rom_md5s()[rom_id]}"
    return None


def _nearest_names(env_name: str) -> str:
    """A hint that has the right names nearest to `env_name`."""
    words = re.sub(r"^ale/|(noframeskip|deterministic)?(-?v\d+)?$", "", env_name.strip().lower())
    game = re.sub(r"[\W_]", "", words)
    games = {name.lower(): name for name in rom_ids_by_game()}
    nearest = [game] if game in games else difflib.get_close_matches(game, games, n=3)
    if not nearest:
        return "right names look like PongNoFrameskip-v4; `python scripts/install_roms.py --list` has all games"
    names = [f"{games[name]}NoFrameskip-v4" for name in nearest] + [f"ALE/{games[nearest[0]]}-v5"]
    return f"did you mean {' or '.join(names)}?"


def parse_env_name(env_name: str) -> AtariGame:
    """Return the game that `env_name` stands for, whether its ROM is there or not.

    Raises:
        ValueError: where there is no such name; the message has the nearest right ones.
    """
    match = _NAME_PATTERN.fullmatch(env_name)
    prefix, game, variant, version = match.groups() if match else (None, "", None, "")
    rom_id = rom_ids_by_game().get(game)
    is_well_formed = bool(prefix) == (version == "5") and not (prefix and variant)
    if rom_id is None or version not in _STICKY_ACTIONS or not is_well_formed:
        raise ValueError(f"there is no environment {env_name!r}; {_nearest_names(env_name)}")
    return AtariGame(env_name, rom_id, _STICKY_ACTIONS[version])


def resolve_env_name(env_name: str) -> AtariGame:
    """Return the game that `env_name` stands for, ready to be played.

    Raises:
        ValueError: where there is no such name; the message has the nearest right ones.
        FileNotFoundError: where the game's ROM is missing or a wrong one.
    """
    game = parse_env_name(env_name)
    problem = rom_problem(game.rom_id, rom_dir())
    if problem:
        raise FileNotFoundError(
            f"{env_name} cannot start: {problem}; "
            f"get the ROM with `python scripts/install_roms.py --game {game.rom_id}`"
        )
    return game


@functools.cache
def action_num(env_name: str) -> int:
    """The number of actions that this game tells apart (ALE's minimal action set).

    Raises:
        ValueError, FileNotFoundError: as `resolve_env_name`.
    """
    game = resolve_env_name(env_name)
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    emulator = ale_py.ALEInterface()
    emulator.loadROM(rom_dir() / f"{game.rom_id}.bin")
    return len(emulator.getMinimalActionSet())
