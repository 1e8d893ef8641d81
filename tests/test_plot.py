"""plot.py: which runs become one line, what it is called, and what is written."""

import json

import matplotlib.pyplot as plt
import numpy as np
import pytest
from PIL import Image

import plot
from a2c_config import A2CConfig
from run_curves import RunError, read_run


def write_run(path, scores, seconds_per_line=60.0, **settings):
    """A run directory as train.py leaves it, with a line of metrics each 1,000 sample steps."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(A2CConfig(**settings).as_dict()))
    lines = [
        {"sample_steps": 1000 * i, "episode/raw_return_mean": score, "time/elapsed_s": seconds_per_line * i}
        for i, score in enumerate(scores, 1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_run(path) if scores else None


def test_runs_that_differ_only_in_their_seed_are_one_line_with_its_mean(tmp_path):
    runs = [write_run(tmp_path / f"seed{seed}", [seed, 10 + seed], seed=seed) for seed in (0, 2)]
    (curve,) = plot.curves_of(runs, group=True)
    steps, scores = curve.points("steps")
    assert curve.label == "mean of 2 seeds"
    assert (steps[0], steps[-1], scores.shape[0]) == (1000, 2000, 2)
    assert scores.mean(axis=0)[[0, -1]].tolist() == [1.0, 11.0]
    assert [curve.label for curve in plot.curves_of(runs, group=False)] == ["seed 0", "seed 2"]


def test_a_line_is_called_by_the_settings_that_set_it_apart(tmp_path):
    runs = [write_run(tmp_path / f"env_num{number}", [0, 1], env_num=number) for number in (16, 32)]
    assert [curve.label for curve in plot.curves_of(runs, group=True)] == [
        "env_num 16, seed 0",
        "env_num 32, seed 0",
    ]


def test_repeated_runs_are_told_apart_by_their_directories(tmp_path):
    runs = [write_run(tmp_path / name, [0, 1]) for name in ("first", "second")]
    labels = [curve.label for curve in plot.curves_of(runs, group=False)]
    assert labels == ["seed 0, first", "seed 0, second"]


def test_by_minutes_a_faster_run_of_the_same_scores_comes_first(tmp_path):
    slow = write_run(tmp_path / "slow", [0, 10], seconds_per_line=60)
    fast = write_run(tmp_path / "fast", [0, 10], seconds_per_line=30, engine="parl")
    ends = [curve.points("minutes")[0][-1] for curve in plot.curves_of([slow, fast], group=True)]
    assert ends == [2.0, 1.0]


def test_a_killed_and_resumed_run_gives_one_rising_curve(tmp_path):
    write_run(tmp_path / "run", [0, 1, 2])
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        # resumed from a checkpoint at 1,500 sample steps, on a clock that began anew; then killed in mid-line
        file.write('{"sample_steps": 2500, "episode/raw_return_mean": 7, "time/elapsed_s": 10}\n{"sample_st')
    run = read_run(tmp_path / "run")
    assert run.sample_steps.tolist() == [1000, 2000, 2500]
    assert run.scores.tolist() == [0, 1, 7]
    assert np.allclose(run.minutes, [1, 2, 2 + 10 / 60])


@pytest.mark.parametrize(("by", "panels"), [("both", 2), ("steps", 1), ("minutes", 1)])
def test_the_picture_has_a_panel_per_axis(tmp_path, by, panels):
    write_run(tmp_path / "run", [0, 1, 2])
    picture = tmp_path / "curves.png"
    assert plot.main([str(tmp_path / "run"), "--out", str(picture), "--by", by, "--reference", "1.5"]) == 0
    with Image.open(picture) as image:
        assert image.width == panels * 896
        assert len(image.convert("RGB").getcolors(1 << 24)) > 10


def test_a_reference_is_a_line_with_its_name(tmp_path):
    write_run(tmp_path / "run", [0, 1, 2])
    picture = tmp_path / "curves.svg"
    references = ["--reference", "18", "--reference", "279.8 Stable-Baselines3 after 10 M"]
    with plt.rc_context({"svg.fonttype": "none"}):  # text stays text
        assert plot.main([str(tmp_path / "run"), "--out", str(picture), *references]) == 0
    assert ">279.8 Stable-Baselines3 after 10 M<" in picture.read_text() and ">18<" in picture.read_text()


@pytest.mark.parametrize("reference", ["PARL 19.5", "", "nan"])
def test_a_reference_without_a_score_is_named(reference, capsys):
    with pytest.raises(SystemExit):
        plot.main(["run", "--reference", reference])
    error = capsys.readouterr().err
    assert repr(reference) in error and "19.5 PARL" in error


def test_a_directory_that_is_no_run_is_named(tmp_path, capsys):
    assert plot.main([str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "is no run of train.py" in error and str(tmp_path) in error and len(error.splitlines()) == 1


def test_a_run_whose_first_game_has_not_ended_says_so(tmp_path):
    write_run(tmp_path / "run", [])
    with pytest.raises(RunError, match="no game .* has ended yet"):
        read_run(tmp_path / "run")


def test_a_picture_that_cannot_be_written_is_one_sentence(tmp_path, capsys):
    write_run(tmp_path / "run", [0, 1])
    for out, reason in (("no/such/dir.png", "No such file"), (str(tmp_path / "curves.xyz"), "xyz")):
        assert plot.main([str(tmp_path / "run"), "--out", out]) == 1
        assert reason in capsys.readouterr().err
