"""What `benchmark.py` measures in a round, in processes of their own: ours and the peers' by turns."""

import argparse
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import benchmark_trainers as trainers
from benchmark_rows import INFERENCE, LEARNING, Row, parse_rows
from benchmark_trainers import MeasurementError

from a2c_config import A2CConfig

SCRIPTS = Path(__file__).resolve().parent
CHILD_TIMEOUT_S = 900.0
BATCHES = {INFERENCE: (16, 80), LEARNING: (80, 320)}
CLASSIC = (16, 5)  # environments x steps at which Stable-Baselines3 and the literature run A2C
ACTOR_NUMS = (1, 2, 4)


@dataclass(frozen=True)
class Step:
    """One process of a round, or several of them in turn."""

    part: str
    label: str
    measure: Callable[[], list[Row]]


def run_child(python: str, script: str, name: str, arguments: dict[str, Any] | None = None, cores: int = 0) -> str:
    """Run one of the benchmark's programs, on as many cores if given; return what it printed."""
    command = [python, str(SCRIPTS / script), name, *([json.dumps(arguments)] if arguments else [])]
    chosen = sorted(os.sched_getaffinity(0))[-cores:]  # the first core serves interrupts more often
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=CHILD_TIMEOUT_S,
            env=trainers.environment(),
            preexec_fn=functools.partial(os.sched_setaffinity, 0, chosen),
        )
    except OSError as error:
        raise MeasurementError(f"{python} cannot be run ({error.strerror})") from error
    except subprocess.TimeoutExpired as error:
        raise MeasurementError(f"no result within {CHILD_TIMEOUT_S:g} s") from error
    if done.returncode:
        raise MeasurementError(trainers.last_line(done.stderr))
    return done.stdout


class Plan:
    """The steps of one round."""

    def __init__(self, options: argparse.Namespace, machine: dict, missing: dict | None) -> None:
        self.options, self.machine, self.missing = options, machine, missing
        self.config = A2CConfig(env_name=options.env_name, env_dim=options.env_dim)
        self.part_s, self.trainer_s = options.seconds / 5, options.seconds
        self.steps: list[Step] = []
        self._parts()
        self._trainers()

    def _add(self, part: str, label: str, measure: Callable[..., list[Row]], *arguments: Any) -> None:
        if part in self.options.parts:
            self.steps.append(Step(part, label, functools.partial(measure, *arguments)))

    def _ours(self, part: str, label: str, cores: int = 0, name: str = "", /, **arguments: Any) -> None:
        arguments |= {"env_name": self.config.env_name, "env_dim": self.config.env_dim, "seconds": self.part_s}
        self._add(part, label, _rows_of, sys.executable, "benchmark_parts.py", name or part, arguments, cores)

    def _peer(self, part: str, label: str, name: str, cores: int = 0, /, **arguments: Any) -> None:
        if self.missing and not self.missing[name]:
            peer, arguments = self.options.peer_python, {"env_dim": self.config.env_dim} | arguments
            self._add(part, label, _rows_of, peer, "benchmark_peers.py", name, arguments, cores)

    def _parts(self) -> None:
        config, cores = self.config, self.machine["cores"]
        env_num, env_nums = config.env_num, config.actor_num * config.env_num
        self._ours("env", "1 thread", 1, env_num=env_num, threads=1)
        if cores > 1:
            self._ours("env", f"{cores} threads", env_num=env_num, threads=cores)
            self._ours("env", f"{env_nums} envs", env_num=env_nums, threads=cores)
        self._network(INFERENCE, env_num)
        self._network(LEARNING, config.batch_size)
        self._ours(
            *(LEARNING, "after acting", 1, "learning_after_acting"),
            env_num=env_num,
            batch=config.batch_size,
            precision=self.machine["best_precision"],
        )
        self._ours("messages", "ours", 1)

    def _network(self, what: str, default_batch: int) -> None:
        """Ours and PyTorch's, on one core and on as many as our learner uses."""
        all_cores = self.machine["learner_threads"]
        shared = {"batches": sorted({*BATCHES[what], default_batch}), "precisions": self.machine["precisions"]}
        for cores in sorted({1, all_cores}):
            self._ours(what, f"ours, cores: {cores}", cores, cores=cores, **shared)
            self._peer(
                *(what, f"PyTorch, threads: {cores}", "torch", cores),
                what=what,
                threads=cores,
                cores=[cores] if cores == all_cores else [cores, all_cores],
                seconds=self.part_s,
                **shared,
            )

    def _trainers(self) -> None:
        config, cores = self.config, self.machine["cores"]
        game = config.env_name, config.env_dim
        actor_num, steps = config.actor_num, config.sample_batch_steps
        default = (actor_num * config.env_num, steps)
        for env_num, steps_there in dict.fromkeys((CLASSIC, default)):
            actors = actor_num if env_num % actor_num == 0 else 1
            arguments = (*game, actors, env_num // actors, steps_there, self.trainer_s)
            self._add("local", f"{env_num} envs x {steps_there} steps", trainers.local, *arguments)
            for vec_env in ("Dummy", "Subproc"):
                self._peer(
                    *("local", f"Stable-Baselines3 {vec_env}, {env_num} x {steps_there}", "stable_baselines3"),
                    env_name=config.env_name,
                    env_num=env_num,
                    steps=steps_there,
                    vec_env=vec_env,
                    seconds=self.trainer_s,
                )
        counts = [count for count in ACTOR_NUMS if count <= (cores if self.options.quick else 2 * cores)]
        if "parl" in self.options.parts and len(counts) < len(ACTOR_NUMS):
            print(f"note: parl with more than {counts[-1]} actors is left out, on {cores} cores")
        runs = [(count, False) for count in counts]
        if actor_num in counts and not self.options.quick:
            runs.append((actor_num, True))
        arguments = (*game, runs, config.env_num, steps, counts[-1], self.trainer_s)
        self._add("parl", f"{', '.join(map(str, counts))} actors", trainers.parl, *arguments)


def _rows_of(python: str, script: str, name: str, arguments: dict[str, Any], cores: int) -> list[Row]:
    return parse_rows(run_child(python, script, name, arguments, cores))
