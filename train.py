"""Train an Atari agent with Advantage Actor-Critic.

    python train.py
    python train.py --env_name BreakoutNoFrameskip-v4 --actor_num 4 --engine parl
    python train.py --preset parl --max_sample_steps 1e6

Later sources win: defaults < --preset < --config FILE.json < options. An older run in --run_dir is
moved aside, never deleted. Ctrl-C ends the run with a summary.
"""

import contextlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator

import cpu_threads  # noqa: F401  before NumPy and Paddle start their threads

import numpy as np

from a2c_config import A2CConfig
from atari_agent import AtariAgent, create_agent, resolve_device
from engines import Engine, create_engine
from env_utils import action_num
from metrics import Metrics, RunDirectory, log_to_console
from rollout import Trajectory, join

logger = logging.getLogger("a2c")


def flatten(trajectories: list[Trajectory], name: str) -> np.ndarray:
    """One field of all trajectories as a batch: [A] x [T, N, ...] -> [A*T*N, ...]."""
    return join([getattr(trajectory, name) for trajectory in trajectories])


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block: Paddle would turn it into an error of the backward pass."""
    received: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if threading.current_thread() is not threading.main_thread():
        handlers = {}  # Python delivers signals to the main thread only
    for number, handler in handlers.items():
        if callable(handler):  # one that is ignored stays ignored
            signal.signal(number, lambda number, _: received.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received:
        raise KeyboardInterrupt


def train(config: A2CConfig, engine: Engine, agent: AtariAgent, metrics: Metrics) -> None:
    """Update `agent` from the engine's trajectories until `max_sample_steps`."""
    metrics.start_clock()  # starting processes and environments is not part of the speed
    while metrics.sample_steps < config.max_sample_steps:
        start = time.perf_counter()
        trajectories = engine.collect(agent.get_weights(), version=metrics.updates)
        collected = time.perf_counter()
        batch = [flatten(trajectories, name) for name in ("obs", "actions", "advantages", "target_values")]
        with interrupts_deferred():
            losses = agent.learn(*batch, sample_steps=metrics.sample_steps)
        learned = time.perf_counter()
        seconds = engine.seconds(trajectories, collected - start) | {"learning": learned - collected}
        losses["weights_lag"] = metrics.updates - np.mean([t.weights_version for t in trajectories])
        episodes = [episode for trajectory in trajectories for episode in trajectory.episodes]
        metrics.add(config.batch_size, episodes, losses, seconds)


def run(config: A2CConfig) -> int:
    """One training run from settings to summary; return the exit status."""
    device = resolve_device(config.device)
    actions = action_num(config.env_name)  # a wrong game ends here, before anything is moved or started
    run_directory = RunDirectory(config.run_dir)
    try:
        metrics = Metrics(run_directory, config.as_dict(), config.max_sample_steps, config.log_metrics_interval_s)
        try:
            if run_directory.moved_to:
                logger.info("an older run was moved to %s", run_directory.moved_to)
            logger.info("%s on %s, logs and curves in %s", config.env_name, device, config.run_dir)
            agent = create_agent(config, actions, device)
            with create_engine(config, learner=agent if device == "cpu" else None) as engine:
                train(config, engine, agent, metrics)
        except KeyboardInterrupt:
            logger.info("stopped by Ctrl-C")
            return 130
        except (ConnectionError, TimeoutError, FloatingPointError) as error:
            logger.error("error: %s", error)
            return 1
        finally:
            metrics.write()
            logger.info("%s", metrics.summary())
            metrics.close()
    finally:
        run_directory.close()
    print(f"next: bash scripts/visualdl.sh --logdir {config.run_dir}")
    return 0


def main(argv: list[str] | None = None) -> int:
    log_to_console()
    config = A2CConfig.from_command_line(argv, __doc__)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run(config)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
