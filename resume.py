"""What of a run is saved, and how it goes on: between the running parts and `checkpoint`.

saver = CheckpointSaver(config, directory, agent, engine, metrics)
config, saved = find_checkpoint(run_dir, settings_given)
restore(saved, agent, engine)
"""

import json
import logging
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import paddle

import checkpoint
from a2c_config import A2CConfig, ConfigError
from atari_agent import AtariAgent
from checkpoint import Checkpoint, CheckpointError
from engines import Engine
from env_utils import action_num
from metrics import Metrics

logger = logging.getLogger("a2c")

COUNTERS = ("sample_steps", "updates", "episode_num", "elapsed_s")

# Settings that cannot change when a run is resumed, and why; every other one can, and the log names it.
FIXED = {
    "env_name": "its weights and its score are of that game",
    "env_dim": "its network sees pictures of that size",
    "episodic_life": "its running games were begun that way",
    "max_episode_frames": "its running games were begun that way",
    "actor_num": "its saved environments and random numbers are of that many actors",
    "env_num": "its saved environments and random numbers are of that many environments",
    "normalize_observations": "its weights fit the pixels as they were scaled",
    "optimizer": "its saved optimizer is of that kind",
    "seed": "its random numbers go on from where they were",
    "init_from": "its weights come from its own checkpoint",
}


class CheckpointSaver:
    """Saves a checkpoint now and then: the newest few, and the best by score.

    Args:
        config: has `checkpoint_interval_s` and `keep_checkpoints`.
        directory: where they are kept.
        agent, engine, metrics: what is saved; metrics tells how far and how good the run is, too.
    """

    def __init__(
        self, config: A2CConfig, directory: Path, agent: AtariAgent, engine: Engine, metrics: Metrics
    ) -> None:
        self._config, self._directory = config, directory
        self._agent, self._engine, self._metrics = agent, engine, metrics
        self._best_score = _best_score(directory)
        self._saved_at = time.monotonic()

    def save_if_due(self) -> None:
        """Save where `checkpoint_interval_s` seconds have passed; a full disk is a warning, not the run's end."""
        interval_s = self._config.checkpoint_interval_s
        if not interval_s or time.monotonic() - self._saved_at < interval_s:
            return
        try:
            self.save()
        except (ConnectionError, TimeoutError):  # an actor's, not the disk's
            raise
        except OSError as error:
            self._saved_at = time.monotonic()
            logger.warning("no checkpoint could be saved, training goes on: %s", error)

    def finish(self, actors_lost: bool = False) -> None:
        """Save at the end of a run, after its last line of metrics; without the actors where they are lost.

        Raises:
            OSError: where it cannot be written.
        """
        self._metrics.write()
        if actors_lost:
            self._engine = None
            if checkpoint.step_path(self._directory, self._metrics.sample_steps).exists():
                return  # with the actors' state
        self.save()

    def save(self) -> Path:
        """Save now.

        Raises:
            OSError: where it cannot be written.
            ConnectionError, TimeoutError: where an actor does not answer.
        """
        start, score = time.monotonic(), self._metrics.score()
        best = score is not None and score > self._best_score
        if best:
            self._best_score = score
        captured = capture(self._config, self._agent, self._engine, self._metrics)
        if self._best_score > -np.inf:
            captured.counters["best_score"] = self._best_score
        path = checkpoint.step_path(self._directory, self._metrics.sample_steps)
        checkpoint.save(captured, path)
        if best:
            checkpoint.save(captured, self._directory / checkpoint.BEST)
        checkpoint.prune(self._directory, self._config.keep_checkpoints)
        self._saved_at = time.monotonic()
        seconds = self._saved_at - start
        logger.debug("checkpoint %s%s, saved in %.2f s", path.name, " (the best so far)" if best else "", seconds)
        return path


def _best_score(directory: Path) -> float:
    try:
        return checkpoint.load(directory / checkpoint.BEST).counters["best_score"]
    except (CheckpointError, KeyError):
        return -np.inf


def capture(config: A2CConfig, agent: AtariAgent, engine: Engine | None, metrics: Metrics) -> Checkpoint:
    """The checkpoint of a run between two updates; without an engine, its games begin anew on resume."""
    recent = metrics.get_state()
    counters = {name: recent.pop(name) for name in COUNTERS}
    arrays = agent.get_state()
    state = {
        "metrics": recent,
        "engine": engine and engine.get_state(),
        # Paddle tells only its seed, and nothing draws from it once the weights are there.
        "rng": {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)},
    }
    return Checkpoint(config.as_dict(), counters, arrays, _take_arrays(state, "state", arrays))


def metrics_state(saved: Checkpoint) -> dict[str, Any]:
    """What `Metrics` goes on from."""
    return {name: saved.counters[name] for name in COUNTERS} | saved.state["metrics"]


def restore(saved: Checkpoint, agent: AtariAgent, engine: Engine) -> None:
    """Bring agent, engine and random number generators to where `capture` was called."""
    state = _put_arrays(saved.state, saved.arrays)
    agent.set_state(
        {name: array for name, array in saved.arrays.items() if name.startswith(("model/", "optimizer/"))}
    )
    paddle.seed(saved.settings["seed"])
    version, numbers, gauss = state["rng"]["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(state["rng"]["numpy"])
    if state["engine"] is None:
        logger.info("games begin anew: their actors were lost")
        return
    start = time.monotonic()
    reasons = engine.set_state(state["engine"])
    seconds = time.monotonic() - start
    if reasons:
        logger.info("games begin anew, so from here on the run is not what it would have been: %s", reasons[0])
    else:
        logger.info("the running games were played again in %.1f s: the run goes on exactly", seconds)


def find_checkpoint(run_dir: str, given: dict[str, Any]) -> tuple[A2CConfig, Checkpoint | None]:
    """The settings and the newest sound checkpoint of the run in `run_dir`; None where it had not made one.

    Checkpoints that are damaged lose their place: they are renamed.

    Args:
        run_dir: a run directory that has its config.json.
        given: settings by name that were given along with --resume.

    Raises:
        ConfigError: where a setting cannot be used, or not be changed.
        CheckpointError: where there are checkpoints, but none is sound.
    """
    directory = Path(run_dir) / checkpoint.DIRECTORY
    if checkpoint.newest(directory) is None:
        logger.info("the run in %s had made no checkpoint: it begins again", run_dir)
        settings = json.loads((Path(run_dir) / "config.json").read_text(encoding="utf-8"))
        return resumed_config(settings, given, run_dir), None
    path, saved = checkpoint.load_newest(directory)
    for damaged in directory.glob("step-*.npz"):
        if damaged > path:
            damaged.rename(damaged.with_suffix(".damaged"))
    logger.info("resuming %s from %s: %s sample steps", run_dir, path.name, f"{saved.counters['sample_steps']:,}")
    return resumed_config(saved.settings, given, run_dir), saved


def resumed_config(saved: dict[str, Any], given: dict[str, Any], run_dir: str) -> A2CConfig:
    """The settings of a resumed run: the `saved` ones, changed by those `given` along with --resume.

    Raises:
        ConfigError: where one is given that cannot change.
    """
    config = A2CConfig.from_dict(saved | given | {"run_dir": run_dir})
    for name, value in config.as_dict().items():
        before = saved.get(name, value)
        if name == "run_dir" or value == before:
            continue
        if name in FIXED:
            raise ConfigError(
                f"{name} is {before!r} in the run to resume and cannot become {value!r}: {FIXED[name]}; leave out "
                f"--{name}, or start a new run from its weights with --init_from {run_dir}"
            )
        note = " (the learning rate now falls to 0 there)" if name == "max_sample_steps" else ""
        logger.info("changed for the rest of the run: %s from %s to %s%s", name, before, value, note)
    return config


def initial_weights(config: A2CConfig) -> dict[str, np.ndarray] | None:
    """The weights that `init_from` names; None where it names none.

    Raises:
        CheckpointError: where there is no such checkpoint, or it is damaged.
        ConfigError: where its game has other actions, or its pictures another size.
    """
    if config.init_from is None:
        return None
    path, saved = checkpoint.resolve(config.init_from)
    theirs = A2CConfig.from_dict({name: saved.settings[name] for name in ("env_name", "env_dim")})
    if (theirs.env_dim, action_num(theirs.env_name)) != (config.env_dim, action_num(config.env_name)):
        raise ConfigError(
            f"the weights in {path} are for {theirs.env_name} at env_dim {theirs.env_dim}; {config.env_name} at "
            f"env_dim {config.env_dim} has other actions or pictures, so start without --init_from"
        )
    logger.info("weights from %s, trained on %s", path, theirs.env_name)
    return checkpoint.model_weights(saved)


def _take_arrays(tree: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    """Move the arrays in nested dicts and lists to `arrays`; return the rest, ready for JSON."""
    if isinstance(tree, np.ndarray):
        arrays[name] = tree
        return {"array": name}
    if isinstance(tree, dict):
        return {key: _take_arrays(value, f"{name}/{key}", arrays) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_take_arrays(value, f"{name}/{index}", arrays) for index, value in enumerate(tree)]
    return tree


def _put_arrays(tree: Any, arrays: dict[str, np.ndarray]) -> Any:
    """The inverse of `_take_arrays`."""
    if isinstance(tree, dict):
        if tree.keys() == {"array"}:
            return arrays[tree["array"]]
        return {key: _put_arrays(value, arrays) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_put_arrays(value, arrays) for value in tree]
    return tree
