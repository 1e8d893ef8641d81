"""Where actors run: in this process, on a PARL cluster or on Ray, behind the same methods."""

import contextlib
import dataclasses
import logging
import pickle
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import parl_compat

import numpy as np
import parl
import zmq
from parl.remote.exceptions import FutureFunctionError, FutureObjectEmpty

from a2c_config import DEFAULT_MASTER_ADDRESS, A2CConfig
from actor import Actor, local_actors
from atari_agent import AtariAgent, create_agent
from env_utils import action_num
from rollout import Trajectory

PROJECT_ROOT = Path(__file__).resolve().parent
POLL_S = 0.5  # how often a wait looks at deadlines and lost actors; results arrive without this delay
RELEASE_WAIT_S = 3.0
SLOWEST_STEPS_PER_S = 200  # of an actor that plays games again; 2,500 are usual

logger = logging.getLogger("a2c")

Weights = dict[str, np.ndarray]


class Engine(Protocol):
    """What the learner needs of an engine; also a context manager that closes itself."""

    name: str

    def collect(self, weights: Weights, version: int) -> list[Trajectory]:
        """Return one trajectory per actor, in actor order, sampled with `weights` (update `version`)."""

    def seconds(self, trajectories: list[Trajectory], collect_s: float) -> dict[str, float]:
        """Split the `collect_s` seconds of one `collect` by activity: stepping, inferring, waiting."""

    def get_state(self) -> dict[str, Any]:
        """What `set_state` needs to collect on as if nothing had been between; see `Actor.get_state`."""

    def set_state(self, state: dict[str, Any]) -> list[str]:
        """Go on from `get_state`; return why games begin anew, for each actor that cannot go on with its own."""

    def close(self) -> None:
        """Release actors and environments; safe to call twice."""


class Closing:
    """An engine as a context manager."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def split_seconds(collect_s: float, trajectories: list[Trajectory], actors_at_once: int) -> dict[str, float]:
    """`Engine.seconds` where `actors_at_once` actors share the time."""
    stepping, inferring = (
        sum(trajectory.seconds[activity] for trajectory in trajectories) / actors_at_once
        for activity in ("stepping", "inferring")
    )
    return {
        "stepping": stepping,
        "inferring": inferring,
        "waiting": max(0.0, collect_s - stepping - inferring),
    }


def longest_replay_s(state: dict[str, Any]) -> float:
    """Seconds that a remote actor may need to come back to its part of `state`, from `Engine.get_state`."""
    # It starts as many games again, each worth some 20 steps, and plays the running ones.
    envs = [actor["env"] for actor in state["actors"]]
    return (
        max(len(env["games"]) * (env["lengths"] + 20 * env["games"]).max() for env in envs) / SLOWEST_STEPS_PER_S
    )


def log_hosts(hosts: list[str]) -> None:
    """Say how many actors run where; `hosts` has each actor's address."""
    places = [f"{count} on {host}" for host, count in Counter(hosts).items()]
    logger.info("actors: %s", ", ".join(places))


class LocalEngine(Closing):
    """All actors in this process, taking turns: while one infers, the others' environments step.

    Args:
        config: the run's settings.
        learner: the agent that learns, if it does so on the CPU: the actors then act with it itself, and
            its weights need no copy. None gives the actors an agent of their own.
    """

    name = "local"

    def __init__(self, config: A2CConfig, learner: AtariAgent | None = None) -> None:
        self._learner = learner
        self._agent = learner or create_agent(config, action_num(config.env_name), "cpu")
        self._actors = local_actors(config, self._agent)
        side = config.env_dim
        self._batch_shape = config.actor_num, config.sample_batch_steps, config.env_num, 4, side, side

    def collect(self, weights: Weights, version: int) -> list[Trajectory]:
        batch_obs = np.empty(self._batch_shape, np.uint8)
        if self._learner:
            self._learner.keep_forward(batch_obs.reshape(-1, *self._batch_shape[3:]))
        else:
            self._agent.set_weights(weights)
        running = [actor.steps(version, obs) for actor, obs in zip(self._actors, batch_obs, strict=True)]
        trajectories: list[Trajectory | None] = [None] * len(running)
        while trajectories[-1] is None:
            trajectories = [next(steps) for steps in running]
        return trajectories

    def seconds(self, trajectories: list[Trajectory], collect_s: float) -> dict[str, float]:
        # One thread serves all actors: their times add up, and what is left is bookkeeping.
        return split_seconds(collect_s, trajectories, actors_at_once=1)

    def get_state(self) -> dict[str, Any]:
        return {"actors": [actor.get_state() for actor in self._actors]}

    def set_state(self, state: dict[str, Any]) -> list[str]:
        # All at once: to play a game again takes as long as it did, and the emulator releases the GIL.
        with ThreadPoolExecutor(len(self._actors)) as pool:
            reasons = list(pool.map(Actor.set_state, self._actors, state["actors"]))
        return [reason for reason in reasons if reason]

    def close(self) -> None:
        for actor in self._actors:
            actor.close()
        self._actors = []


class OverlappedEngine(Closing):
    """Lets `engine` sample the next batch while the learner works on this one.

    What `collect` returns was sampled with the weights of the call before: one update behind.
    """

    def __init__(self, engine: Engine) -> None:
        self.name = engine.name
        self._engine = engine
        self._sampler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sampler")
        self._next: Future | None = None

    def collect(self, weights: Weights, version: int) -> list[Trajectory]:
        ready = self._next or self._sampler.submit(self._engine.collect, weights, version)
        trajectories = ready.result()
        self._next = self._sampler.submit(self._engine.collect, weights, version)
        return trajectories

    def seconds(self, trajectories: list[Trajectory], collect_s: float) -> dict[str, float]:
        # Sampling costs the learner only what it still has to wait.
        return {"waiting": collect_s}

    def get_state(self) -> dict[str, Any]:
        """The engine's state after the batch that is being sampled, and that batch."""
        ready = self._next.result() if self._next else []
        return {"ready": [dataclasses.asdict(trajectory) for trajectory in ready]} | self._engine.get_state()

    def set_state(self, state: dict[str, Any]) -> list[str]:
        reasons = self._engine.set_state(state)
        if state.get("ready"):
            self._next = Future()
            self._next.set_result([Trajectory.from_dict(fields) for fields in state["ready"]])
        return reasons

    def close(self) -> None:
        self._sampler.shutdown(wait=True)
        self._engine.close()


class ParlEngine(Closing):
    """One remote actor per vacant CPU of a PARL cluster.

    Raises:
        ConnectionError: where no master answers, or an actor is lost.
        TimeoutError: where CPUs stay taken, or an actor does not answer within `actor_timeout_s`.
    """

    name = "parl"

    def __init__(self, config: A2CConfig) -> None:
        self._config = config
        self._address = config.master_address or DEFAULT_MASTER_ADDRESS
        self._actors: list[Any] = []
        self._disconnections: list[zmq.Socket] = []
        self._errors = _ThreadErrors()
        wait_for_cpus(self._address, config.actor_num, config.cluster_wait_s)
        parl_compat.set_host(parl_compat.local_address_towards(self._address))
        try:
            # PARL sends the files beside the started script, which may be pytest or a notebook.
            with parl_compat.shipped_from(PROJECT_ROOT):
                parl.connect(self._address)
                remote_class = parl.remote_class(wait=False)(Actor)
                self._actors = [remote_class(config, index) for index in range(config.actor_num)]
                for index in range(config.actor_num):
                    self._wait_until_ready(index)
            jobs = [actor.__dict__["_xparl_remote_wrapper_obj"].job_address for actor in self._actors]
            log_hosts([job.partition(":")[0] for job in jobs])
        except BaseException:
            self.close()
            raise

    def collect(self, weights: Weights, version: int) -> list[Trajectory]:
        packed = pickle.dumps(weights, protocol=pickle.HIGHEST_PROTOCOL)
        futures = [actor.collect(packed, version) for actor in self._actors]
        return [self._result(index, future) for index, future in enumerate(futures)]

    def seconds(self, trajectories: list[Trajectory], collect_s: float) -> dict[str, float]:
        return split_seconds(collect_s, trajectories, actors_at_once=len(trajectories))

    def get_state(self) -> dict[str, Any]:
        futures = [actor.get_state() for actor in self._actors]
        return {"actors": [self._result(index, future) for index, future in enumerate(futures)]}

    def set_state(self, state: dict[str, Any]) -> list[str]:
        futures = [remote.set_state(actor) for remote, actor in zip(self._actors, state["actors"], strict=True)]
        replay_s = longest_replay_s(state)
        reasons = [self._result(index, future, replay_s) for index, future in enumerate(futures)]
        return [reason for reason in reasons if reason]

    def close(self) -> None:
        # A job that is told that its client leaves gives its CPU back at once, else after 30 to 40 s.
        for actor in self._actors:
            _release(actor)
        self._actors, self._disconnections = [], []
        parl_compat.disconnect()
        self._errors.close()

    def _wait_until_ready(self, index: int) -> None:
        actor = self._actors[index].__dict__
        deadline = time.monotonic() + self._config.actor_timeout_s
        while not actor["_xparl_calling_finished_event"].wait(POLL_S):
            if time.monotonic() > deadline:
                raise TimeoutError(self._message(index, f"did not start {self._within_timeout()}"))
        if actor["_xparl_remote_object_exception"] is not None:
            raise ConnectionError(self._message(index, "failed to start"))
        # PARL's own heartbeat needs up to a minute to notice a dead job; the closed socket tells at once.
        job_socket = actor["_xparl_remote_wrapper_obj"].job_socket
        self._disconnections.append(job_socket.get_monitor_socket(zmq.EVENT_DISCONNECTED))

    def _result(self, index: int, future: Any, extra_s: float = 0.0) -> Any:
        """Wait for actor `index`'s answer, for `actor_timeout_s` and `extra_s` seconds."""
        deadline = time.monotonic() + self._config.actor_timeout_s + extra_s
        while True:
            try:
                return future.get(timeout=POLL_S)
            except FutureObjectEmpty:
                for other, socket in enumerate(self._disconnections):
                    if socket.poll(0):
                        raise ConnectionError(self._message(other, "was lost: its process ended")) from None
            except FutureFunctionError:
                raise ConnectionError(self._message(index, "failed")) from None
            if time.monotonic() > deadline:
                raise TimeoutError(self._message(index, f"did not answer {self._within_timeout()}"))

    def _within_timeout(self) -> str:
        return f"within {self._config.actor_timeout_s:g} s (--actor_timeout_s)"

    def _message(self, index: int, what: str) -> str:
        cause = self._errors.of(self._actors[index])
        return (
            f"actor {index} of {self._config.actor_num} on the PARL cluster at {self._address} {what}"
            f"{': ' + cause if cause else ''}; look at the cluster with `bash scripts/cluster_status.sh`, then "
            "start again, or train in this process with --engine local"
        )


class _ThreadErrors:
    """Keeps what PARL's calling threads raise, which otherwise lands on the terminal as a traceback."""

    def __init__(self) -> None:
        self._by_actor: dict[int, BaseException] = {}
        self._previous_hook = threading.excepthook
        threading.excepthook = self._keep

    def close(self) -> None:
        threading.excepthook = self._previous_hook

    def of(self, actor: Any) -> str:
        """The last line of what went wrong in `actor`'s calls; details go to the log."""
        error = self._by_actor.get(id(actor))
        if error is None:
            return ""
        logger.debug("remote error: %s", error)
        return str(error).strip().splitlines()[-1]

    def _keep(self, args: threading.ExceptHookArgs) -> None:
        traceback = args.exc_traceback
        while traceback is not None:
            if traceback.tb_frame.f_code.co_name == "_run_object_in_backend":
                self._by_actor[id(traceback.tb_frame.f_locals["self"])] = args.exc_value
                return
            traceback = traceback.tb_next
        self._previous_hook(args)


def _release(actor: Any) -> None:
    """Tell an idle actor's job to end; one that is still at work notices that its client is gone."""
    fields = actor.__dict__
    remote = fields.get("_xparl_remote_wrapper_obj")
    if remote is not None and fields["_xparl_calling_finished_event"].wait(RELEASE_WAIT_S):
        remote.job_socket.disable_monitor()
        remote.__del__()
        remote.job_is_alive.value = False
    actor.destroy()


def wait_for_cpus(master_address: str, cpu_num: int, wait_s: float) -> None:
    """Return once the cluster has `cpu_num` vacant CPUs.

    Raises:
        ConnectionError: where no master answers within `wait_s` seconds.
        TimeoutError: where one answers, but its CPUs stay taken or are too few.
    """
    deadline = time.monotonic() + wait_s
    announced = ""
    while True:
        used = vacant = None
        with contextlib.suppress(ConnectionError):
            used, vacant = parl_compat.cluster_cpus(master_address)
        if vacant is not None and vacant >= cpu_num:
            return
        state = "no master answers yet" if vacant is None else f"{vacant} vacant, {used} used"
        if time.monotonic() >= deadline:
            break
        if state != announced:
            wanted = f"{cpu_num} vacant CPUs" if cpu_num > 1 else "a vacant CPU"
            logger.info("waiting up to %g s for %s at %s: %s", wait_s, wanted, master_address, state)
            announced = state
        time.sleep(POLL_S)
    if vacant is None:
        raise ConnectionError(
            f"no PARL master answers at {master_address} (waited {wait_s:g} s); start one with "
            "`bash scripts/start_cluster.sh`, or train in this process with --engine local"
        )
    raise TimeoutError(
        f"the PARL cluster at {master_address} has {vacant} vacant and {used} used CPUs, but actor_num is "
        f"{cpu_num} (waited {wait_s:g} s); use --actor_num {max(1, vacant)}, or a cluster with more CPUs: "
        f"`bash scripts/stop_cluster.sh`, then `bash scripts/start_cluster.sh --cpu_num {cpu_num}`"
    )


def create_engine(config: A2CConfig, learner: AtariAgent | None = None) -> Engine:
    """Build the engine that `config` asks for; `learner` as in `LocalEngine`."""
    if config.overlap:
        # Actors that act while the learner changes its weights need an agent of their own.
        return OverlappedEngine(_plain_engine(config, None))
    return _plain_engine(config, learner)


def _plain_engine(config: A2CConfig, learner: AtariAgent | None) -> Engine:
    """The engine that `config.engine` names.

    "auto" is `parl` where a master answers at the default address, else `local`. An address that was
    given by hand must answer: training on one machine instead would be a silent surprise.
    """
    if config.engine == "local":
        logger.info("engine: local, %d actors in this process", config.actor_num)
        return LocalEngine(config, learner)
    if config.engine == "ray":
        from ray_engine import RayEngine  # which imports this module, and Ray, which is optional

        where = f"the Ray cluster at {config.ray_address}" if config.ray_address else "a Ray of their own"
        logger.info("engine: ray, %d remote actors on %s", config.actor_num, where)
        return RayEngine(config)
    if config.engine == "auto" and config.master_address is None:
        try:
            parl_compat.cluster_cpus(DEFAULT_MASTER_ADDRESS)
        except ConnectionError:
            logger.info(
                "engine: local, %d actors in this process, since no PARL master answers at %s",
                config.actor_num,
                DEFAULT_MASTER_ADDRESS,
            )
            return LocalEngine(config, learner)
    address = config.master_address or DEFAULT_MASTER_ADDRESS
    logger.info("engine: parl, %d remote actors on the cluster at %s", config.actor_num, address)
    return ParlEngine(config)
