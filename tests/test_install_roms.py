import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from atari_games import rom_dir, rom_md5s
from scripts.install_roms import main

SCRIPT = Path(__file__).parent.parent / "scripts" / "install_roms.py"
PONG_MD5 = "60e0ea3cbe0913d39803477945e9e5ec"


@pytest.fixture
def empty(tmp_path):
    """A ROM directory without ROMs, as of an ale-py that ships none."""
    directory = tmp_path / "roms"
    directory.mkdir()
    return directory


@pytest.fixture
def collection(tmp_path):
    """A player's collection: right files, deep down, under other names."""
    directory = tmp_path / "collection" / "atari"
    directory.mkdir(parents=True)
    shutil.copyfile(rom_dir() / "pong.bin", directory / "Video Olympics (1977).BIN")
    shutil.copyfile(rom_dir() / "breakout.bin", directory / "breakout.bin")
    return directory.parent


def run(capsys, *arguments):
    """Run the script; return its exit status, output and errors."""
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_list_has_the_well_known_pong():
    assert rom_md5s()["pong"] == PONG_MD5


def test_it_says_how_many_roms_are_there(capsys, empty):
    total = len(rom_md5s())
    assert run(capsys)[:2] == (0, f"{total} of {total} ROMs are in {rom_dir()}\n")
    status, out, _ = run(capsys, "--rom_dir", empty)
    assert status == 0 and f"0 of {total} ROMs" in out and "missing: adventure, air_raid" in out


def test_it_lists_games_with_their_environment_names(capsys, empty, collection):
    run(capsys, "--rom_dir", empty, "--from", collection)
    lines = [line.split(maxsplit=2) for line in run(capsys, "--rom_dir", empty, "--list")[1].splitlines()]
    states = {rom_id: (name, state) for rom_id, name, state in lines}
    assert states["pong"] == ("PongNoFrameskip-v4", "there")
    assert states["space_invaders"] == ("SpaceInvadersNoFrameskip-v4", f"space_invaders.bin is not in {empty}")


@pytest.mark.parametrize("game", ["pong", "PongNoFrameskip-v4", "ALE/Pong-v5"])
def test_one_game_is_checked_by_any_of_its_names(capsys, game):
    assert run(capsys, "--game", game)[:2] == (0, f"pong is in {rom_dir()}\n")


def test_a_missing_rom_is_copied_by_its_md5_whatever_its_name(capsys, empty, collection):
    status, out, _ = run(capsys, "--rom_dir", empty, "--game", "pong", "--from", collection)
    assert status == 0 and f"pong is in {empty}" in out
    assert [path.name for path in empty.iterdir()] == ["pong.bin"]
    assert (empty / "pong.bin").read_bytes() == (rom_dir() / "pong.bin").read_bytes()


def test_from_without_a_game_copies_every_missing_rom(capsys, empty, collection):
    status, out, _ = run(capsys, "--rom_dir", empty, "--from", collection)
    assert status == 0 and f"2 of {len(rom_md5s())} ROMs" in out
    assert sorted(path.name for path in empty.iterdir()) == ["breakout.bin", "pong.bin"]


def test_a_wrong_rom_that_is_installed_is_replaced(capsys, empty, collection):
    (empty / "pong.bin").write_bytes(b"not Pong")
    assert run(capsys, "--rom_dir", empty, "--game", "pong", "--from", collection)[0] == 0
    assert (empty / "pong.bin").read_bytes() == (rom_dir() / "pong.bin").read_bytes()


def test_a_wrong_md5_names_the_file_and_both_sums(capsys, empty, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "pong.bin").write_bytes(b"not Pong")
    status, _, err = run(capsys, "--rom_dir", empty, "--game", "pong", "--from", tmp_path / "mine")
    # md5sum of the 8 bytes "not Pong"
    assert status == 1 and "302c931cd1740480b504351e5173f367" in err and PONG_MD5 in err
    assert str(tmp_path / "mine" / "pong.bin") in err and not list(empty.iterdir())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--game", "pnog"], "did you mean PongNoFrameskip-v4"),
        (["--game", "pong", "--from", "no/such/place"], "there is no directory no/such/place"),
        (["--game", "tetris", "--from", "{collection}"], rom_md5s()["tetris"]),
    ],
)
def test_errors_are_one_line(capsys, empty, collection, arguments, message):
    arguments = [argument.format(collection=collection) for argument in arguments]
    status, _, err = run(capsys, "--rom_dir", empty, *arguments)
    assert status == 1 and message in err and err.count("\n") == 1


def test_without_autorom_it_says_how_to_get_it(capsys, empty, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, _, err = run(capsys, "--rom_dir", empty, "--game", "pong")
    assert status == 1 and "pip install autorom" in err and "--from DIR" in err and err.count("\n") == 1


@pytest.mark.parametrize("has_network", [True, False])
def test_autorom_fetches_a_missing_rom(capsys, empty, collection, monkeypatch, tmp_path, has_network):
    """A stand-in for AutoROM with its command line; like it, it ends with status 0 without a network too."""
    (tmp_path / "stand_in").mkdir()
    (tmp_path / "stand_in" / "AutoROM.py").write_text(
        "import shutil, sys\n"
        "def cli():\n"
        "    quiet, option, directory, licence = sys.argv[-4:]\n"
        "    assert (quiet, option, licence) == ('--quiet', '--install-dir', '--accept-license')\n"
        f"    if {has_network}:\n"
        f"        shutil.copy({str(collection / 'atari' / 'breakout.bin')!r}, directory)\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "stand_in")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stand_in"))
    status, _, err = run(capsys, "--rom_dir", empty, "--game", "breakout", "--accept_license")
    assert (status, (empty / "breakout.bin").is_file()) == ((0, True) if has_network else (1, False))
    assert ("did not bring breakout" in err) != has_network


def test_help_says_what_it_does_and_a_failure_shows_no_traceback(empty):
    shown = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0 and "--from DIR" in shown.stdout and "AutoROM" in shown.stdout
    failed = subprocess.run(
        [sys.executable, SCRIPT, "--game", "pnog"], capture_output=True, text=True, timeout=60, cwd=empty
    )
    assert failed.returncode == 1 and "Traceback" not in failed.stderr and failed.stderr.count("\n") == 1
