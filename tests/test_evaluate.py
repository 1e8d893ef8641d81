"""evaluate.py and what it writes: real games of a real, untrained network."""

import dataclasses
import json
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

import checkpoint
import evaluate
from a2c_config import A2CConfig
from atari_agent import create_agent
from checkpoint import Checkpoint
from env_utils import action_num, make_env
from human_scores import human_normalized
from video import Mp4Writer

SHORT = A2CConfig(max_episode_frames=240)  # games of Pong that end after 60 sample steps


def make_checkpoint(config: A2CConfig) -> Checkpoint:
    agent = create_agent(config, action_num(config.env_name), "cpu")
    return Checkpoint(config.as_dict(), {"sample_steps": 1000}, agent.get_state())


@pytest.fixture(scope="module")
def short_run(tmp_path_factory) -> Path:
    """A run directory that holds one checkpoint."""
    run_dir = tmp_path_factory.mktemp("run")
    checkpoint.save(make_checkpoint(SHORT), checkpoint.step_path(run_dir / "checkpoints", 1000))
    return run_dir


def play_alone(agent, config, seed):
    """The greedy agent's first game in a single environment, step by step."""
    env = make_env(config.env_name, seed, config.env_dim, max_episode_frames=config.max_episode_frames)
    obs, _ = env.reset()
    done, score, length = False, 0.0, 0
    while not done:
        obs, reward, terminated, truncated, _ = env.step(int(agent.predict(obs[None])[0]))
        done, score, length = terminated or truncated, score + reward, length + 1
    env.close()
    return score, length


def test_each_game_is_the_first_whole_one_of_its_environment_unclipped():
    config = A2CConfig(env_name="AlienNoFrameskip-v4", max_episode_frames=1000)
    agent = create_agent(config, action_num(config.env_name), "cpu")
    games = evaluate.play_games(agent, config, 3, seed=5, greedy=True)
    first_seed, _ = evaluate.game_seeds(5, first_game=0)
    assert [(game.raw_return, game.length) for game in games] == [
        play_alone(agent, config, first_seed + index) for index in range(3)
    ]
    assert min(game.raw_return for game in games) >= 10  # one of Alien's dots counts 10


def test_more_games_than_fit_at_once_are_all_played_and_all_differ(monkeypatch):
    monkeypatch.setattr(evaluate, "ENVS_AT_ONCE", 2)
    config = A2CConfig(env_name="AlienNoFrameskip-v4", max_episode_frames=600)
    agent = create_agent(config, action_num(config.env_name), "cpu")
    games = evaluate.play_games(agent, config, 5, seed=0, greedy=False)
    assert len(games) == 5 and len({game.raw_return for game in games}) > 1


def test_equal_seeds_give_equal_scores_and_the_report_has_the_statistics(short_run, tmp_path, capsys):
    reports = []
    for name in ("a.json", "b.json"):
        options = [
            "--run_dir",
            str(short_run),
            "--episodes",
            "4",
            "--seeds",
            "0,7",
            "--json",
            str(tmp_path / name),
        ]
        assert evaluate.main(options) == 0
        reports.append(json.loads((tmp_path / name).read_text()))
    assert reports[0] == reports[1]
    assert "8 whole games, seeds 0, 7" in capsys.readouterr().out
    scores = [game["raw_return"] for game in reports[0]["games"]]
    statistics = reports[0]["raw_return"]
    assert len(scores) == reports[0]["episodes"] == 8
    assert [statistics[name] for name in ("mean", "median", "std", "min", "max")] == [
        np.mean(scores),
        np.median(scores),
        np.std(scores),
        min(scores),
        max(scores),
    ]
    assert reports[0]["human_normalized"] == human_normalized("pong", statistics["mean"])


def test_a_human_scores_1_and_random_play_0():
    assert human_normalized("pong", 14.6) == 1.0
    assert human_normalized("breakout", 1.7) == 0.0
    assert human_normalized("air_raid", 1000.0) is None


def test_the_film_shows_every_frame_and_plays_in_a_browser(short_run, tmp_path):
    film, gif = tmp_path / "game.mp4", tmp_path / "game.gif"
    options = ["--checkpoint", str(short_run), "--episodes", "0", "--video", str(film)]
    assert evaluate.main([*options, "--gif", str(gif), "--gif_seconds", "2"]) == 0
    with av.open(str(film)) as container:
        stream = container.streams.video[0]
        pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        # What browsers play: H.264 in yuv420p, its index before its pictures.
        assert (stream.codec_context.name, stream.pix_fmt) == ("h264", "yuv420p")
        assert (stream.width, stream.height, stream.average_rate) == (3 * 160, 3 * 210, 60)
    content = film.read_bytes()
    assert content.index(b"moov") < content.index(b"mdat")
    assert len(pictures) == SHORT.max_episode_frames
    assert np.abs(pictures[-1][300, 240].astype(int) - (144, 72, 17)).max() < 12  # Pong's brown
    with Image.open(gif) as image:
        assert (image.size, image.info["loop"]) == ((320, 420), 0)
        assert image.convert("RGB").getpixel((160, 200)) == (144, 72, 17)
    assert gif.stat().st_size < 100_000
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_film_that_cannot_be_finished_leaves_no_file(tmp_path):
    with pytest.raises(KeyboardInterrupt), Mp4Writer(str(tmp_path / "game.mp4")) as film:
        film.add(np.zeros((210, 160, 3), np.uint8))
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "status", "sentence"),
    [
        (["--run_dir", "nowhere"], 1, "there is no checkpoint nowhere"),
        (["--episodes", "0"], 2, "add --video, --gif or --render"),
        (["--episodes", "many"], 2, "--episodes"),
        (["--seeds", "1,1"], 2, "different integers"),
        (["--greeedy"], 2, "did you mean '--greedy'?"),
        (["--render"], 1, "--render needs a display"),
    ],
)
def test_a_mistake_is_one_sentence_and_a_status(monkeypatch, capsys, options, status, sentence):
    for variable in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(variable, raising=False)
    try:
        returned = evaluate.main(options)
    except SystemExit as stop:
        returned = stop.code
    assert returned == status
    errors = capsys.readouterr().err
    assert sentence in errors and len(errors.splitlines()) == 1


def test_weights_of_another_game_are_refused(tmp_path, capsys):
    wrong = dataclasses.replace(make_checkpoint(SHORT), settings=SHORT.as_dict() | {"env_name": "Breakout-v4"})
    checkpoint.save(wrong, tmp_path / "wrong.npz")
    assert evaluate.main(["--checkpoint", str(tmp_path / "wrong.npz")]) == 1
    assert "do not fit this network" in capsys.readouterr().err


def test_the_help_lists_the_options(capsys):
    with pytest.raises(SystemExit, match="0"):
        evaluate.main(["--help"])
    assert "--gif_seconds" in capsys.readouterr().out


def test_the_shipped_agent_plays_pong_well(tmp_path):
    out = tmp_path / "scores.json"
    shipped = Path(evaluate.__file__).parent / "docs" / "pong.npz"
    assert evaluate.main(["--checkpoint", str(shipped), "--episodes", "2", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["raw_return"]["mean"] >= 18
