"""Train an Atari agent with Advantage Actor-Critic.

    python train.py
    python train.py --env_name BreakoutNoFrameskip-v4 --actor_num 4 --engine parl
    python train.py --preset parl --max_sample_steps 1e6
    python train.py --resume

Later sources win: defaults < --preset < --config FILE.json < options. An older run in --run_dir is
moved aside, never deleted. Ctrl-C ends the run with a checkpoint and a summary. --resume goes on with a run
that was stopped or killed, with its own settings; options given along with it change them, where they can
change. --init_from starts a new run from the weights of an older one.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import cpu_threads  # noqa: F401  before NumPy and Paddle start their threads

import numpy as np

import checkpoint
from a2c_config import A2CConfig, exit_status, parse_command_line
from atari_agent import AtariAgent, create_agent, resolve_device
from background_evaluation import PeriodicEvaluation
from checkpoint import Checkpoint
from engines import Engine, create_engine
from env_utils import action_num, observation_statistics
from metrics import Metrics, log_to_console, log_to_file
from resume import CheckpointSaver, find_checkpoint, initial_weights, metrics_state, restore
from rollout import Trajectory, join
from run_directory import RunDirectory

logger = logging.getLogger("a2c")

# Standard deviation that random play's pixels have once normalized. What was tried: docs/tuning.md.
OBSERVATION_STD = 0.25


def flatten(trajectories: list[Trajectory], name: str) -> np.ndarray:
    """One field of all trajectories as a batch: [A] x [T, N, ...] -> [A*T*N, ...]."""
    return join([getattr(trajectory, name) for trajectory in trajectories])


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[list[int]]:
    """Let Ctrl-C wait for the end of the block, which sees it in the list; a second one ends it at once.

    Between two updates all is in one piece and can be saved; and in one, Paddle would turn the interrupt into
    an error of the backward pass.
    """
    received: list[int] = []

    def note(number: int, _: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        os.write(sys.stderr.fileno(), b"stopping after this update; Ctrl-C once more stops at once\n")

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if threading.current_thread() is not threading.main_thread():
        handlers = {}  # Python delivers signals to the main thread only
    for number, handler in handlers.items():
        if callable(handler):  # one that is ignored stays ignored
            signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received:
        raise KeyboardInterrupt


def train(
    config: A2CConfig,
    engine: Engine,
    agent: AtariAgent,
    metrics: Metrics,
    saver: CheckpointSaver | None = None,
    evaluation: PeriodicEvaluation | None = None,
) -> None:
    """Update `agent` from the engine's trajectories to `max_sample_steps`, or Ctrl-C; save on the way and then."""
    metrics.start_clock()  # starting processes and environments is not part of the speed
    with interrupts_deferred() as interrupted:
        while metrics.sample_steps < config.max_sample_steps and not interrupted:
            update(config, engine, agent, metrics)
            if saver:
                saver.save_if_due()
            if evaluation:
                evaluation.run_if_due()
        if saver:
            saver.finish()


def update(config: A2CConfig, engine: Engine, agent: AtariAgent, metrics: Metrics) -> None:
    """Collect one batch, learn from it, and note what happened."""
    start = time.perf_counter()
    trajectories = engine.collect(agent.get_weights(), version=metrics.updates)
    collected = time.perf_counter()
    batch = [flatten(trajectories, name) for name in ("obs", "actions", "advantages", "target_values")]
    losses = agent.learn(*batch, sample_steps=metrics.sample_steps)
    learned = time.perf_counter()
    seconds = engine.seconds(trajectories, collected - start) | {"learning": learned - collected}
    losses["weights_lag"] = metrics.updates - np.mean([t.weights_version for t in trajectories])
    episodes = [episode for trajectory in trajectories for episode in trajectory.episodes]
    metrics.add(config.batch_size, episodes, losses, seconds)


def normalize_observations(config: A2CConfig, agent: AtariAgent) -> None:
    """Let the network see pixels relative to what random play shows; from then on this is part of its weights."""
    start = time.perf_counter()
    statistics = observation_statistics(config.env_name, config.env_dim, num_threads=cpu_threads.usable_cores())
    agent.alg.model.normalize_observations(statistics.mean, statistics.std / OBSERVATION_STD)
    seconds = time.perf_counter() - start
    logger.info(
        "observations: random play has a standard deviation of %.1f grey levels (%.1f s)", statistics.std, seconds
    )


def run(
    config: A2CConfig,
    run_directory: RunDirectory,
    saved: Checkpoint | None = None,
    weights: dict[str, np.ndarray] | None = None,
) -> int:
    """One run from settings to summary, from its checkpoint `saved` or new; return the exit status."""
    device = resolve_device(config.device)
    metrics = Metrics(
        run_directory,
        config.as_dict(),
        config.max_sample_steps,
        config.log_metrics_interval_s,
        metrics_state(saved) if saved else None,
    )
    try:
        if run_directory.moved_to:
            logger.info("an older run was moved to %s", run_directory.moved_to)
        logger.info("%s on %s, logs and curves in %s", config.env_name, device, config.run_dir)
        agent = create_agent(config, action_num(config.env_name), device)
        if weights:
            agent.set_weights(weights)
        if config.normalize_observations and not saved:
            normalize_observations(config, agent)
        with create_engine(config, learner=agent if device == "cpu" else None) as engine:
            if saved:
                restore(saved, agent, engine)
            saver = CheckpointSaver(config, run_directory.path / checkpoint.DIRECTORY, agent, engine, metrics)
            try:
                with contextlib.closing(PeriodicEvaluation(config, agent, metrics)) as evaluation:
                    train(config, engine, agent, metrics, saver, evaluation)
            except (ConnectionError, TimeoutError):
                saver.finish(actors_lost=True)
                raise
    except KeyboardInterrupt:
        logger.info("stopped by Ctrl-C; go on with `python train.py --resume %s`", config.run_dir)
        return 130
    except (OSError, FloatingPointError) as error:
        logger.error("error: %s", error)
        if isinstance(error, FloatingPointError) and checkpoint.newest(run_directory.path / checkpoint.DIRECTORY):
            way_on = f"`python train.py --resume {config.run_dir} --start_lr {config.start_lr / 2:g}`"
            logger.error("the checkpoints from before are kept; go on from the newest with %s", way_on)
        return 1
    finally:
        metrics.write()
        logger.info("%s", metrics.summary())
        metrics.close()
    print(f"next: python evaluate.py --run_dir {config.run_dir}")
    print(f"      bash scripts/visualdl.sh --logdir {config.run_dir}")
    return 0


def start(config: A2CConfig) -> int:
    """Begin a new run."""
    # A wrong game, device or checkpoint ends here, before anything is moved or started.
    resolve_device(config.device)
    action_num(config.env_name)
    weights = initial_weights(config)
    with contextlib.closing(RunDirectory(config.run_dir)) as run_directory:
        return run(config, run_directory, weights=weights)


def resume(run_dir: str, given: dict[str, Any]) -> int:
    """Go on with the run in `run_dir`, its settings changed by those `given`."""
    with contextlib.closing(RunDirectory(run_dir, resume=True)) as run_directory:
        with contextlib.closing(log_to_file(run_directory.path)):
            config, saved = find_checkpoint(run_dir, given)
        if saved is None:
            return run(config, run_directory, weights=initial_weights(config))
        if saved.counters["sample_steps"] >= config.max_sample_steps:
            print(
                f"the run in {run_dir} has finished: {saved.counters['sample_steps']:,} of "
                f"{config.max_sample_steps:,} sample steps; train longer with --resume and a larger "
                f"--max_sample_steps, or look at it: python evaluate.py --run_dir {run_dir}"
            )
            return 0
        return run(config, run_directory, saved)


def main(argv: list[str] | None = None) -> int:
    log_to_console()
    settings, run_to_resume = parse_command_line(argv, __doc__)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if run_to_resume is None:
        return exit_status(start, A2CConfig.from_dict(settings))
    return exit_status(resume, run_to_resume, settings)


if __name__ == "__main__":
    sys.exit(main())
