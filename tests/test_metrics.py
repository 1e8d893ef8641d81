import json
import re

import pytest
from visualdl import LogReader

from metrics import Metrics, RunDirectory
from rollout import EpisodeStats

LOSSES = {"policy_loss": 1.0, "value_loss": 2.0, "entropy": 1.5, "grad_norm": 3.0}
LOSSES |= {"learning_rate": 1e-3, "weights_lag": 0}
SECONDS = {"stepping": 0.1, "inferring": 0.1, "waiting": 0.0, "learning": 0.2}


def make_metrics(tmp_path, interval_s=1000.0):
    return Metrics(RunDirectory(str(tmp_path / "run")), {"seed": 1}, 1000, interval_s)


def records(tmp_path):
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def test_scores_are_absent_before_the_first_game_ends_and_raw_after(tmp_path):
    metrics = make_metrics(tmp_path)
    metrics.add(10, [], LOSSES, SECONDS)
    metrics.write()
    metrics.add(10, [EpisodeStats(-21.0, 800), EpisodeStats(-19.0, 1000)], LOSSES, SECONDS)
    metrics.write()
    metrics.close()
    before, after = records(tmp_path)
    assert not any(name.startswith("episode/raw") for name in before)
    assert (after["episode/raw_return_mean"], after["episode/raw_return_max"]) == (-20.0, -19.0)
    assert (after["episode/raw_return_min"], after["episode/length_mean"]) == (-21.0, 900.0)
    assert after["sample_steps"] == 20


def test_losses_are_means_over_the_interval(tmp_path):
    metrics = make_metrics(tmp_path)
    metrics.add(10, [], LOSSES, SECONDS)
    metrics.add(10, [], LOSSES | {"policy_loss": 3.0}, SECONDS)
    metrics.write()
    metrics.close()
    assert records(tmp_path)[0]["loss/policy_loss"] == 2.0


def test_visualdl_reads_the_curve_back(tmp_path):
    metrics = make_metrics(tmp_path)
    for score in (-21.0, -15.0):
        metrics.add(10, [EpisodeStats(score, 800)], LOSSES, SECONDS)
        metrics.write()
    metrics.close()
    path = next((tmp_path / "run").glob("vdlrecords.*.log"))
    points = LogReader(file_path=str(path)).get_data("scalar", "episode/raw_return_mean")
    assert [(point.id, point.value) for point in points] == [(10, -21.0), (20, -18.0)]


def test_the_log_has_a_readable_line_per_interval(tmp_path):
    metrics = make_metrics(tmp_path, interval_s=1e-9)
    metrics.add(10, [EpisodeStats(-21.0, 800)], LOSSES, SECONDS)
    metrics.close()
    line = (tmp_path / "run" / "log.log").read_text()
    assert re.search(r"steps 10/1,000 .* score -21\.0 .* entropy 1\.500", line)


def test_an_older_run_is_moved_aside_and_keeps_its_files(tmp_path):
    make_metrics(tmp_path).close()
    (tmp_path / "run" / "log.log").write_text("precious")
    second = RunDirectory(str(tmp_path / "run"))
    assert (second.moved_to / "log.log").read_text() == "precious"
    assert re.fullmatch(r"run-\d{8}-\d{6}", second.moved_to.name)
    assert not any(second.path.iterdir())


def test_two_runs_cannot_share_a_directory(tmp_path):
    first = RunDirectory(str(tmp_path / "run"))
    with pytest.raises(FileExistsError, match="--run_dir"):
        RunDirectory(str(tmp_path / "run"))
    first.close()


def test_a_directory_that_is_no_run_is_never_moved(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("precious")
    with pytest.raises(FileExistsError, match=r"config\.json"):
        RunDirectory(str(tmp_path / "run"))
    assert (tmp_path / "run" / "thesis.txt").read_text() == "precious"
