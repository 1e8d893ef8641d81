"""Say which Atari ROMs are there, and put missing ones where ale-py looks for them.

    python scripts/install_roms.py                                  # how many are there
    python scripts/install_roms.py --list                           # every game
    python scripts/install_roms.py --game pong                      # if it is missing, fetch it with AutoROM
    python scripts/install_roms.py --game PongNoFrameskip-v4 --from DIR
    python scripts/install_roms.py --from DIR                       # every missing ROM that DIR has

A ROM is known by its MD5 in ale-py's list, whatever its file is called.
"""

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from atari_games import parse_env_name, rom_dir, rom_ids_by_game, rom_md5s, rom_problem

_AUTOROM_TIMEOUT_S = 600


class RomError(RuntimeError):
    """A ROM that could not be had; the message says why and what to do."""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    description, _, rest = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--game", help="one game: pong, PongNoFrameskip-v4, ALE/Pong-v5 [all]")
    parser.add_argument("--list", action="store_true", help="list the games and the state of their ROMs")
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="DIR", help="copy from the *.bin files in and under DIR"
    )
    parser.add_argument(
        "--accept_license",
        action="store_true",
        help="answer yes to AutoROM's question about the ROMs' licence",
    )
    parser.add_argument(
        "--rom_dir",
        type=Path,
        default=rom_dir(),
        help="where the ROMs belong; ale-py looks there if ALE_ROMS_DIR names it [%(default)s]",
    )
    return parser.parse_args(argv)


def rom_ids_of(game: str | None) -> list[str]:
    """The rom ids that are asked for: of one game, by rom id or environment name, or all.

    Raises:
        ValueError: where there is no such game.
    """
    if game is None:
        return sorted(rom_md5s())
    return [game if game in rom_md5s() else parse_env_name(game).rom_id]


def missing_roms(rom_ids: list[str], directory: Path) -> dict[str, str]:
    """What is wrong with each ROM that `directory` lacks, by rom id."""
    problems = {rom_id: rom_problem(rom_id, directory) for rom_id in rom_ids}
    return {rom_id: problem for rom_id, problem in problems.items() if problem}


def copy_roms(rom_ids: list[str], source: Path, directory: Path) -> list[str]:
    """Copy those ROMs that lie in or under `source` to `directory`; return the rom ids that were copied.

    Raises:
        RomError: where `source` is no directory, or has a file of the right name but of another MD5 only.
    """
    if not source.is_dir():
        raise RomError(f"there is no directory {source} to copy ROMs from")
    files = sorted(path for path in source.rglob("*") if path.suffix.lower() == ".bin" and path.is_file())
    md5s = {path: hashlib.md5(path.read_bytes()).hexdigest() for path in files}
    paths = {md5: path for path, md5 in md5s.items()}
    copied = [rom_id for rom_id in rom_ids if rom_md5s()[rom_id] in paths]
    for rom_id in copied:
        _install(paths[rom_md5s()[rom_id]], directory / f"{rom_id}.bin")
    for path in files:
        if path.stem.lower() in set(rom_ids) - set(copied):
            rom_id = path.stem.lower()
            raise RomError(f"{path} has the MD5 {md5s[path]}, but the right {rom_id}.bin has {rom_md5s()[rom_id]}")
    return copied


def _install(source: Path, target: Path) -> None:
    """Copy by way of a temporary file, so that a broken copy never takes the ROM's name."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".part")
    shutil.copyfile(source, partial)
    os.replace(partial, target)
    print(f"{source} -> {target}")


def fetch_roms(rom_ids: list[str], directory: Path, accept_license: bool) -> None:
    """Download ROMs with AutoROM, which always fetches all, and keep those asked for.

    Raises:
        RomError: where AutoROM is not installed, fails or does not bring the ROMs.
    """
    names = ", ".join(rom_ids)
    if importlib.util.find_spec("AutoROM") is None:
        raise RomError(
            f"{names} cannot be downloaded without AutoROM: install it with `pip install autorom`, "
            "or copy the ROM from a directory with --from DIR"
        )
    with tempfile.TemporaryDirectory() as download_dir:
        command = [sys.executable, "-c", "from AutoROM import cli; cli()", "--quiet"]
        command += ["--install-dir", download_dir] + ["--accept-license"] * accept_license
        try:
            status = subprocess.run(command, timeout=_AUTOROM_TIMEOUT_S).returncode
        except subprocess.TimeoutExpired:
            status = f"none within {_AUTOROM_TIMEOUT_S} s"
        # AutoROM's status is 0 even where the network, or the user about the licence, said no.
        if not copy_roms(rom_ids, Path(download_dir), directory):
            raise RomError(
                f"AutoROM (exit status {status}) did not bring {names}: its output above says why; "
                "--accept_license answers its question, --from DIR needs no network"
            )


def report(rom_ids: list[str], directory: Path) -> None:
    """Print how many of the ROMs are there, and which are not."""
    missing = missing_roms(rom_ids, directory)
    there = (
        f"{rom_ids[0]} is" if len(rom_ids) == 1 else f"{len(rom_ids) - len(missing)} of {len(rom_ids)} ROMs are"
    )
    print(f"{there} in {directory}")
    if missing:
        print(f"missing: {', '.join(missing)}")
        print("next: python scripts/install_roms.py --game NAME, or --from DIR")


def list_games(rom_ids: list[str], missing: dict[str, str]) -> None:
    """Print one line a game: its rom id, an environment name, the state of its ROM."""
    games = {rom_id: game for game, rom_id in rom_ids_by_game().items()}
    for rom_id in rom_ids:
        env_name = f"{games[rom_id]}NoFrameskip-v4" if rom_id in games else "(for two players only)"
        print(f"{rom_id:20} {env_name:32} {missing.get(rom_id, 'there')}")


def install(arguments: argparse.Namespace) -> None:
    """Do what the command line asks for.

    Raises:
        RomError: where a ROM that was asked for is still missing at the end.
        ValueError: where there is no such game.
    """
    rom_ids = rom_ids_of(arguments.game)
    missing = missing_roms(rom_ids, arguments.rom_dir)
    if arguments.list:
        list_games(rom_ids, missing)
        return
    if missing and arguments.source:
        if not copy_roms(list(missing), arguments.source, arguments.rom_dir):
            wanted = ", ".join(f"{rom_id} (MD5 {rom_md5s()[rom_id]})" for rom_id in list(missing)[:3])
            raise RomError(f"no *.bin file in or under {arguments.source} is a missing ROM such as {wanted}")
    elif missing and arguments.game:
        fetch_roms(rom_ids, arguments.rom_dir, arguments.accept_license)
    report(rom_ids, arguments.rom_dir)


def main(argv: list[str] | None = None) -> int:
    """Run; errors are one sentence."""
    try:
        install(parse_arguments(argv))
    except (RomError, ValueError, OSError) as error:
        print(f"install_roms: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
