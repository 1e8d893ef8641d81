"""Actors on Ray: a Ray of this machine's own, or a cluster of several."""

import logging
import shutil
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from cpu_threads import THREAD_SETTINGS  # before NumPy and Paddle start their threads

import ray_compat
from a2c_config import A2CConfig
from actor import Actor
from engines import Closing, Weights, log_hosts, longest_replay_s, split_seconds
from rollout import Trajectory

PROJECT_ROOT = Path(__file__).resolve().parent
MAX_LOSSES = 3  # of one actor in one call: more than bad luck

logger = logging.getLogger("a2c")


class RayEngine(Closing):
    """One Ray actor per vacant CPU; one that is lost is started again, and the update goes on.

    Raises:
        ConnectionError: where Ray is not installed or does not answer, or an actor fails or is lost for good.
        TimeoutError: where CPUs stay taken, or an actor does not answer within `actor_timeout_s`.
    """

    name = "ray"

    def __init__(self, config: A2CConfig) -> None:
        self._config = config
        self._actors: list[Any] = []
        self._starts = [0] * config.actor_num
        self._ray = _connect(config)
        try:
            self._wait_for_cpus()
            # Ray restarts nothing by itself: an actor's state is the engine's business.
            self._remote_class = self._ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(Actor)
            self._actors = [self._start(index) for index in range(config.actor_num)]
            self._call("__ray_ready__", [()] * config.actor_num)
            log_hosts(self._call("__ray_call__", [(_host,)] * config.actor_num))
        except BaseException:
            self.close()
            raise

    def collect(self, weights: Weights, version: int) -> list[Trajectory]:
        stored = self._ray.put(weights)  # once for all actors; those on one machine share the memory
        return self._call("collect", [(stored, version)] * len(self._actors))

    def seconds(self, trajectories: list[Trajectory], collect_s: float) -> dict[str, float]:
        return split_seconds(collect_s, trajectories, actors_at_once=len(trajectories))

    def get_state(self) -> dict[str, Any]:
        return {"actors": self._call("get_state", [()] * len(self._actors))}

    def set_state(self, state: dict[str, Any]) -> list[str]:
        arguments = [(actor,) for actor in state["actors"]]
        reasons = self._call("set_state", arguments, extra_s=longest_replay_s(state))
        return [reason for reason in reasons if reason]

    def close(self) -> None:
        self._actors = []
        self._ray.shutdown()  # ends the actors; a cluster stays

    def _start(self, index: int) -> Any:
        # An actor that is started again plays other games than before: they would repeat what was learnt from.
        seed_index = index + self._starts[index] * self._config.actor_num
        self._starts[index] += 1
        return self._remote_class.remote(self._config, seed_index)

    def _call(self, method: str, arguments: list[tuple], extra_s: float = 0.0) -> list[Any]:
        """Call every actor, each with its own arguments; return what they answer, in actor order."""
        ray, losses = self._ray, [0] * len(self._actors)
        answers: list[Any] = [None] * len(self._actors)
        deadline = time.monotonic() + self._config.actor_timeout_s + extra_s

        def call(index: int) -> Any:
            return getattr(self._actors[index], method).remote(*arguments[index])

        running = {call(index): index for index in range(len(self._actors))}
        while running:
            ready, _ = ray.wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                what = f"did not answer within {self._config.actor_timeout_s:g} s (--actor_timeout_s)"
                raise TimeoutError(self._message(min(running.values()), what))
            index = running.pop(ready[0])
            try:
                answers[index] = ray.get(ready[0])
            except ray.exceptions.RayTaskError as error:
                raise ConnectionError(self._message(index, f"failed: {_last_line(error)}")) from None
            except ray.exceptions.RayActorError as error:
                losses[index] += 1
                if losses[index] > MAX_LOSSES or self._starts[index] == 1 and method == "__ray_ready__":
                    raise ConnectionError(self._message(index, f"was lost: {_last_line(error)}")) from None
                logger.warning("actor %d on Ray was lost (%s); starting it again", index, _last_line(error))
                ray.kill(self._actors[index])  # it may only be out of reach
                self._actors[index] = self._start(index)
                running[call(index)] = index
                deadline = time.monotonic() + self._config.actor_timeout_s + extra_s
        return answers

    def _wait_for_cpus(self) -> None:
        wanted, wait_s = self._config.actor_num, self._config.cluster_wait_s
        deadline = time.monotonic() + wait_s
        while (vacant := int(self._ray.available_resources().get("CPU", 0))) < wanted:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the Ray cluster at {self._config.ray_address} has {vacant} vacant CPUs, but actor_num is "
                    f"{wanted} (waited {wait_s:g} s); use --actor_num {max(1, vacant)}, or add a machine to it "
                    "with `ray start --address`"
                )
            time.sleep(0.5)

    def _message(self, index: int, what: str) -> str:
        where = f"the Ray cluster at {self._config.ray_address}" if self._config.ray_address else "Ray"
        return (
            f"actor {index} of {self._config.actor_num} on {where} {what}; start again, or train in this process "
            "with --engine local"
        )


def _connect(config: A2CConfig) -> ModuleType:
    """Join or start the Ray that `config` names, with this project's modules at its actors' hand."""
    if not config.ray_address:
        environment = THREAD_SETTINGS | {"PYTHONPATH": str(PROJECT_ROOT)}
        return ray_compat.connect(None, config.actor_num, {"env_vars": environment})
    # Other machines do not have these files, and need no others: Ray takes a copy of the folder when it connects.
    with tempfile.TemporaryDirectory() as folder:
        for path in PROJECT_ROOT.glob("*.py"):
            shutil.copy(path, folder)
        runtime_env = {"env_vars": dict(THREAD_SETTINGS), "working_dir": folder}
        return ray_compat.connect(config.ray_address, config.actor_num, runtime_env)


def _host(_: Actor) -> str:
    """The address of the machine that this actor runs on."""
    import ray

    return ray.util.get_node_ip_address()


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1].strip()
