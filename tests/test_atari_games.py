import pytest

from env_utils import action_num, make_env, make_vector_env, resolve_env_name


@pytest.mark.parametrize(
    "env_name, rom_id, sticky",
    [
        ("PongNoFrameskip-v4", "pong", 0.0),
        ("PongDeterministic-v4", "pong", 0.0),
        ("Pong-v4", "pong", 0.0),
        ("PongNoFrameskip-v0", "pong", 0.25),
        ("ALE/Pong-v5", "pong", 0.25),
        ("SpaceInvadersNoFrameskip-v4", "space_invaders", 0.0),
        ("ALE/MsPacman-v5", "ms_pacman", 0.25),
    ],
)
def test_a_name_says_the_game_and_its_sticky_actions(env_name, rom_id, sticky):
    game = resolve_env_name(env_name)
    assert (game.env_name, game.rom_id, game.repeat_action_probability) == (env_name, rom_id, sticky)


@pytest.mark.parametrize(
    "wrong_name, hint",
    [
        ("Pong", "did you mean PongNoFrameskip-v4 or ALE/Pong-v5?"),
        ("pong", "PongNoFrameskip-v4"),
        ("PongNoFrameSkip-v4", "PongNoFrameskip-v4"),
        ("BreakoutNoFrameskip-v5", "did you mean BreakoutNoFrameskip-v4 or ALE/Breakout-v5?"),
        ("ALE/PongNoFrameskip-v5", "ALE/Pong-v5"),
        ("Pong-v5", "ALE/Pong-v5"),
        ("ALE/Pong-v4", "PongNoFrameskip-v4"),
        ("PongNoFrameskip-v7", "PongNoFrameskip-v4"),
        ("Brekout-v4", "BreakoutNoFrameskip-v4"),
        ("space_invaders", "SpaceInvadersNoFrameskip-v4"),
        ("CartPole-v1", "install_roms.py --list"),
        ("", "PongNoFrameskip-v4"),
    ],
)
def test_a_wrong_name_names_the_nearest_right_ones(wrong_name, hint):
    for make in (resolve_env_name, action_num, make_env, lambda name: make_vector_env(name, 1)):
        with pytest.raises(ValueError) as caught:
            make(wrong_name)
        assert repr(wrong_name) in str(caught.value) and hint in str(caught.value)


def test_a_missing_or_wrong_rom_names_the_script_that_gets_it(monkeypatch, tmp_path):
    monkeypatch.setenv("ALE_ROMS_DIR", str(tmp_path))
    command = "python scripts/install_roms.py --game pong"
    with pytest.raises(FileNotFoundError, match=command):
        make_env("PongNoFrameskip-v4")
    (tmp_path / "pong.bin").write_bytes(b"not Pong")
    with pytest.raises(FileNotFoundError, match=f"has the MD5 .*{command}"):
        make_vector_env("PongNoFrameskip-v4", 1)


def test_actions_are_those_the_game_tells_apart():
    # Pong: nothing, fire, right, left, right + fire, left + fire.
    assert [action_num(f"{game}NoFrameskip-v4") for game in ("Pong", "Breakout", "Freeway")] == [6, 4, 3]
