"""progress.py: the band that runs keep to, and what is said of a run beside it."""

import dataclasses
import json

import numpy as np
import pytest
from test_plot import write_run

import progress
from a2c_config import A2CConfig
from progress import Band, Progress
from run_curves import RunError, what_it_learns

SETTINGS = A2CConfig().as_dict()
# Plateau to 100,000 sample steps, then one point each 10,000 up to 20.
STEPS = list(range(0, 501_000, 1000))
MEDIAN = [float(np.clip(-20 + (steps - 100_000) / 10_000, -20, 20)) for steps in STEPS]
BAND = Band(
    what_it_learns(SETTINGS), [0, 1], 18.0, STEPS, [m - 2 for m in MEDIAN], MEDIAN, [m + 2 for m in MEDIAN]
)


@pytest.fixture
def judge(tmp_path, monkeypatch):
    """A run of the default settings, where the band above is shipped."""
    monkeypatch.setattr(progress, "__file__", str(tmp_path / "progress.py"))
    progress.write_band(BAND, str(tmp_path / "progress_pong.json"))
    return Progress(SETTINGS)


def line(score=None, speed=1000.0, entropy=1.0):
    scalars = {"time/sample_steps_per_s": speed, "policy/entropy": entropy}
    return scalars if score is None else scalars | {"episode/raw_return_mean": score}


@pytest.mark.parametrize(
    ("sample_steps", "score", "phrase"),
    [
        # 300,000 steps is score 0; 480,000 is 18: 180,000 steps at 1,000 per s
        (300_000, 0.0, "on track (expected -2 to 2 here), 18 in about 3 min"),
        # the run is where the median has -10, within a point: at 210,000
        (300_000, -10.0, "below the band (expected -2 to 2 here), 18 in about 4 min"),
        (300_000, 10.0, "ahead of the band (expected -2 to 2 here), 18 in about 2 min"),
        # on the plateau the score says nothing, the sample steps do
        (0, -20.5, "on track (expected -22 to -18 here), 18 in about 8 min"),
        (60_000, -20.5, "on track (expected -22 to -18 here), 18 in about 7 min"),
        (300_000, 18.0, "18 reached"),
    ],
)
def test_the_phrase_says_where_the_run_stands_and_when_it_will_be_there(judge, sample_steps, score, phrase):
    assert judge.status(sample_steps, line(score)) == phrase


def test_twice_the_speed_halves_the_time_to_the_goal(judge):
    assert judge.status(300_000, line(0.0, speed=500.0)).endswith("18 in about 6 min")


def test_nothing_is_said_before_the_first_game_ends(judge):
    assert judge.status(1000, line()) == ""


@pytest.mark.parametrize(
    ("change", "compared"),
    [
        ({"seed": 5}, True),
        ({"engine": "parl"}, True),
        ({"start_lr": 1e-4}, False),
        ({"env_name": "ALE/Pong-v5"}, False),
    ],
)
def test_only_a_run_of_the_measured_settings_is_compared(judge, change, compared):
    assert bool(Progress(SETTINGS | change).status(300_000, line(0.0))) == compared


def test_without_a_band_nothing_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "__file__", str(tmp_path / "progress.py"))
    judge = Progress(SETTINGS)
    assert judge.status(300_000, line(0.0)) == ""
    assert judge.warnings(300_000, line(-20.0)) == []


def test_a_score_that_stays_on_the_plateau_is_warned_of_once(judge):
    # the low edge leaves -20 + 2 at 140,000
    assert judge.warnings(130_000, line(-20.0)) == []
    (warning,) = judge.warnings(150_000, line(-20.0))
    assert "above -18 by 140,000" in warning and "--seed" in warning
    assert judge.warnings(160_000, line(-20.0)) == []


def test_a_score_that_rises_late_is_not_called_flat(judge):
    assert judge.warnings(150_000, line(-17.5)) == []


def test_a_collapsed_entropy_is_warned_of_once_it_stays(judge):
    for _ in range(2):
        assert judge.warnings(10_000, line(-20.0, entropy=0.001)) == []
    (warning,) = judge.warnings(10_000, line(-20.0, entropy=0.001))
    assert "entropy has collapsed" in warning and "larger --entropy_coeff than 0.003" in warning


def test_a_solved_run_may_be_sure_of_itself(judge):
    for _ in range(5):
        assert judge.warnings(490_000, line(19.0, entropy=0.001)) == []


def test_a_band_of_other_runs_has_their_extremes_and_a_margin_in_steps(tmp_path):
    low = write_run(tmp_path / "a", list(range(0, 20)), seed=0)
    high = write_run(tmp_path / "b", list(range(4, 24)), seed=1)
    band = progress.measure([low, high], goal=18.0)
    assert band.seeds == [0, 1]
    assert (band.sample_steps[0], band.sample_steps[-1]) == (1000, 20_000)
    # at 12,000: a line of 11 that comes from 10,000 (12,000 / 1.2), and of 15 that goes on to 14,400
    assert band.expected(12_000) == pytest.approx((9.0, 17.4), abs=0.15)
    assert np.interp(12_000, band.sample_steps, band.median) == pytest.approx(13.0, abs=0.1)
    assert band.goal_steps == pytest.approx(17_000, abs=150)


@pytest.mark.parametrize(
    ("change", "reason"), [({"seed": 1, "gamma": 0.9}, "differ in gamma"), ({"seed": 0}, "a seed of its own")]
)
def test_a_band_is_of_one_setting_and_several_seeds(tmp_path, change, reason):
    runs = [write_run(tmp_path / "a", [0, 1], seed=0), write_run(tmp_path / "b", [0, 1], **change)]
    with pytest.raises(RunError, match=reason):
        progress.measure(runs, goal=18.0)


def test_the_commands_measure_a_band_and_judge_a_run_by_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "__file__", str(tmp_path / "progress.py"))
    dirs = [str(tmp_path / f"seed{seed}") for seed in range(3)]
    for seed, path in enumerate(dirs):
        write_run(tmp_path / f"seed{seed}", [-20 + i for i in range(40)], seed=seed)
        with open(f"{path}/metrics.jsonl", "a") as file:
            record = {"sample_steps": 41_000, "time/elapsed_s": 2500.0} | line(score=19.0)
            file.write(json.dumps(record) + "\n")
    out = str(tmp_path / "progress_pong.json")
    assert progress.main(["--from", *dirs, "--out", out, "--goal", "21"]) == 0
    assert "a band of 3 seeds" in capsys.readouterr().out
    assert progress.main([dirs[0]]) == 0
    assert "on track (expected 13 to 19 here)" in capsys.readouterr().out
    assert progress.main(["nowhere"]) == 1
    assert "is no run of train.py" in capsys.readouterr().err


def test_a_damaged_band_is_named(judge, tmp_path):
    (tmp_path / "progress_pong.json").write_text('{"goal": 18}')
    with pytest.raises(RunError, match=r"progress_pong\.json is no band"):
        Progress(SETTINGS)


def test_every_band_that_is_shipped_can_be_read_and_ends_higher_than_it_began():
    for path in sorted(progress.Path(progress.__file__).parent.glob("progress_*.json")):
        band = Band(**json.loads(path.read_text()))
        assert band.median[-1] > band.median[0]
        assert {len(band.sample_steps)} == {len(edge) for edge in (band.low, band.median, band.high)}
        assert {field.name for field in dataclasses.fields(Band)} == set(json.loads(path.read_text()))
        assert Progress(band.settings | {"seed": 1}).band == band


def test_the_shipped_band_is_of_the_default():
    band = progress.band_for(SETTINGS)
    assert band is not None and len(band.seeds) == 3
    assert band.goal_steps < SETTINGS["max_sample_steps"]
