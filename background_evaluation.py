"""Evaluate the newest weights of a run while it trains: `--eval_interval_s` of train.py."""

import json
import logging
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import checkpoint
from a2c_config import A2CConfig
from atari_agent import AtariAgent
from checkpoint import Checkpoint
from metrics import Metrics

logger = logging.getLogger("a2c")

EVALUATE = Path(__file__).with_name("evaluate.py").resolve()


class BackgroundEvaluation:
    """Evaluates weights while training goes on: a process of its own, lowest priority, one at a time.

    Nothing of the run is touched: neither its random numbers nor its games, only the spare time of its CPUs.

        evaluation.start(checkpoint)      # False while one is still running
        report = evaluation.poll()        # as `evaluate.report_of`, once per finished evaluation; else None
        evaluation.close()                # ends a running one

    Args:
        directory: for its files; made when needed, removed in the end.
        episodes: games of an evaluation.
    """

    def __init__(self, directory: Path, episodes: int = 10) -> None:
        self._directory, self._episodes = directory, episodes
        self._process: subprocess.Popen | None = None

    def start(self, weights: Checkpoint) -> bool:
        """Begin to evaluate the model in `weights` (its settings, counters and "model/..." arrays)."""
        if self._process:
            return False
        checkpoint.save(checkpoint.without_training_state(weights), self._directory / "weights.npz")
        command = [sys.executable, str(EVALUATE), "--in_background", "--episodes", str(self._episodes)]
        for option, name in (("--checkpoint", "weights.npz"), ("--json", "report.json")):
            command += [option, str((self._directory / name).resolve())]
        with (self._directory / "errors").open("w") as errors:
            # A session of its own: Ctrl-C in the terminal is for the run, which then closes this.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
            )
        return True

    def poll(self) -> dict[str, Any] | None:
        """The report of an evaluation that has ended since the last call; a failed one is a line in the log."""
        if not self._process or self._process.poll() is None:
            return None
        status, self._process = self._process.returncode, None
        if status:
            reason = (self._directory / "errors").read_text(errors="replace").strip().splitlines() or [
                f"status {status}"
            ]
            logger.warning("an evaluation failed, training goes on: %s", reason[-1])
            return None
        return json.loads((self._directory / "report.json").read_text(encoding="utf-8"))

    def close(self) -> None:
        """End what is running and remove its files; closing twice does no harm."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None
        shutil.rmtree(self._directory, ignore_errors=True)


class PeriodicEvaluation:
    """Evaluates a run's newest weights in the background each `eval_interval_s` seconds; 0 = never.

    Args:
        config: the run's settings.
        agent: has the newest weights.
        metrics: gets the reports.
    """

    def __init__(self, config: A2CConfig, agent: AtariAgent, metrics: Metrics) -> None:
        self._config, self._agent, self._metrics = config, agent, metrics
        self._evaluation = BackgroundEvaluation(metrics.run_directory.path / "evaluation")
        self._started_at = time.monotonic()

    def run_if_due(self) -> None:
        """Between two updates: hand on a finished report, start an evaluation whose time has come."""
        interval_s = self._config.eval_interval_s
        if not interval_s:
            return
        report = self._evaluation.poll()
        if report:
            self._metrics.add_evaluation(report)
        if time.monotonic() - self._started_at < interval_s:
            return
        try:
            if self._evaluation.start(self._newest()):
                self._started_at = time.monotonic()
        except OSError as error:
            self._started_at = time.monotonic()
            logger.warning("no evaluation could be started, training goes on: %s", error)

    def close(self) -> None:
        """End a running evaluation; closing twice does no harm."""
        self._evaluation.close()

    def _newest(self) -> Checkpoint:
        arrays = {f"model/{name}": array for name, array in self._agent.get_weights().items()}
        return Checkpoint(self._config.as_dict(), {"sample_steps": self._metrics.sample_steps}, arrays)
