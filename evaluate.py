"""Measure a trained agent: raw scores of whole games that it was not trained on.

    python evaluate.py                                            # the newest checkpoint of train_log/train
    python evaluate.py --run_dir train_log/seed1 --episodes 100 --greedy
    python evaluate.py --checkpoint train_log/train/checkpoints/best.npz --seeds 0,1,2 --json scores.json
    python evaluate.py --episodes 0 --video game.mp4 --gif game.gif
    python evaluate.py --episodes 0 --render

Every seed plays its games at once, one per environment, each to its end: so short games count no more
than long ones. Actions are drawn from the policy, as in training; --greedy takes the likeliest ones.
The same checkpoint, seeds and options give the same scores.
"""

import argparse
import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cpu_threads

import numpy as np
from tqdm import tqdm

import checkpoint
from a2c_config import A2CConfig, ConfigError, Parser, exit_status
from atari_agent import AtariAgent, create_agent, resolve_device
from atari_games import parse_env_name
from checkpoint import Checkpoint, CheckpointError
from env_utils import FRAME_SKIP, action_num, make_env, make_vector_env
from human_scores import human_normalized
from rollout import EpisodeStats
from video import FRAMES_PER_S, GifWriter, Mp4Writer, add_frame_listener

ENVS_AT_ONCE = 64


def load_agent(path: str | Path, device: str = "cpu") -> tuple[AtariAgent, A2CConfig, Checkpoint]:
    """Build the agent of a checkpoint; `path` as in `checkpoint.resolve`.

    Raises:
        CheckpointError: where there is no checkpoint, or it is damaged or does not fit this network.
        ConfigError: where its settings, or the device, cannot be used here.
    """
    path, loaded = checkpoint.resolve(path)
    config = A2CConfig.from_dict(loaded.settings)
    agent = create_agent(config, action_num(config.env_name), resolve_device(device))
    try:
        agent.set_weights(checkpoint.model_weights(loaded))
    except ValueError as error:
        raise CheckpointError(f"the weights in {path} do not fit this network: {error}") from error
    return agent, config, loaded


def play_games(agent: AtariAgent, config: A2CConfig, games: int, seed: int, greedy: bool) -> list[EpisodeStats]:
    """Play `games` whole games and return their raw scores, in the order of their environments' seeds."""
    played: list[EpisodeStats] = []
    with tqdm(total=games, unit=" games", desc=f"seed {seed}", disable=None, leave=False) as bar:
        while len(played) < games:
            played += _play_at_once(
                agent, config, min(ENVS_AT_ONCE, games - len(played)), seed, len(played), greedy, bar
            )
    return played


def game_seeds(seed: int, first_game: int) -> tuple[int, np.random.Generator]:
    """The first environment's seed, apart from all of training, and the source of the actions' chance."""
    env_seed = np.random.SeedSequence(seed, spawn_key=(0,)).generate_state(1)[0] >> 2
    return int(env_seed) + first_game, np.random.default_rng([seed, first_game])


def _play_at_once(
    agent: AtariAgent, config: A2CConfig, env_num: int, seed: int, first_game: int, greedy: bool, bar: tqdm
) -> list[EpisodeStats]:
    """One game in each of `env_num` environments; those that are through play on unseen until all are."""
    env_seed, rng = game_seeds(seed, first_game)
    env = make_vector_env(
        config.env_name,
        env_num,
        seed=env_seed,
        env_dim=config.env_dim,
        num_threads=cpu_threads.env_threads(env_num),
        max_episode_frames=config.max_episode_frames,
    )
    games: dict[int, EpisodeStats] = {}
    obs = env.reset()
    while len(games) < env_num:
        actions = agent.predict(obs) if greedy else agent.sample(obs, rng)[0]
        step = env.step(actions)
        obs = step.obs
        for index, game in zip(np.flatnonzero(step.dones), step.episodes, strict=True):
            if index not in games:
                games[index] = game
                bar.update()
    env.close()
    return [games[index] for index in range(env_num)]


def show_game(
    agent: AtariAgent,
    config: A2CConfig,
    seed: int,
    greedy: bool,
    listeners: list[Callable[[np.ndarray], None]] | None = None,
) -> EpisodeStats:
    """Play one game for the eye and return its raw score.

    Every emulator frame, uint8 [210, 160, 3], goes to all `listeners`; None shows a window instead, at the
    console's own speed.
    """
    env_seed, rng = game_seeds(seed, first_game=0)
    env = make_env(
        config.env_name,
        env_seed,
        config.env_dim,
        render_mode="human" if listeners is None else "rgb_array",
        max_episode_frames=config.max_episode_frames,
    )
    with contextlib.closing(env):
        if listeners is not None:
            add_frame_listener(env, lambda frame: [listener(frame) for listener in listeners])
        obs, _ = env.reset()
        done = False
        while not done:
            next_step = time.monotonic() + FRAME_SKIP / FRAMES_PER_S
            actions = agent.predict(obs[None]) if greedy else agent.sample(obs[None], rng)[0]
            obs, _, terminated, truncated, info = env.step(int(actions[0]))
            done = terminated or truncated
            if listeners is None:
                time.sleep(max(0.0, next_step - time.monotonic()))
    return EpisodeStats(float(info["episode"]["r"]), int(info["episode"]["l"]))


def report_of(games: dict[int, list[EpisodeStats]], config: A2CConfig, loaded: Checkpoint, greedy: bool) -> dict:
    """All games of all seeds and their statistics, ready for JSON."""
    scores = np.array([game.raw_return for played in games.values() for game in played])
    return {
        "env_name": config.env_name,
        "sample_steps": loaded.counters["sample_steps"],
        "policy": "greedy" if greedy else "stochastic",
        "seeds": list(games),
        "episodes": len(scores),
        "raw_return": {
            "mean": float(scores.mean()),
            "median": float(np.median(scores)),
            "std": float(scores.std()),
            "min": float(scores.min()),
            "max": float(scores.max()),
        },
        "human_normalized": human_normalized(parse_env_name(config.env_name).rom_id, float(scores.mean())),
        "games": [
            {"seed": seed, "raw_return": game.raw_return, "length": game.length}
            for seed, played in games.items()
            for game in played
        ],
    }


def readable(report: dict[str, Any]) -> str:
    """A report in two lines."""
    statistics = ", ".join(f"{name} {value:.2f}" for name, value in report["raw_return"].items())
    human = report["human_normalized"]
    games = f"{report['episodes']} whole game{'s' * (report['episodes'] > 1)}"
    seeds = f"seed{'s' * (len(report['seeds']) > 1)} {', '.join(map(str, report['seeds']))}"
    return (
        f"{report['env_name']} after {report['sample_steps']:,} sample steps, {report['policy']} policy: "
        f"{games}, {seeds}\n"
        f"raw score: {statistics}" + ("" if human is None else f"; human-normalized {human:.0%}")
    )


def _go_to_background() -> None:
    """For the process that evaluates: give way to everything else, and end with the run."""
    # Even a run that is killed leaves no evaluation behind.
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    os.nice(19)


def _open_display() -> None:
    """Let SDL, which draws the window, take a real display or fail: else it would draw for nobody to see."""
    for variable, driver in (("SDL_VIDEODRIVER", ""), ("DISPLAY", "x11"), ("WAYLAND_DISPLAY", "wayland")):
        if os.environ.get(variable):
            os.environ.setdefault("SDL_VIDEODRIVER", driver)
            break
    else:
        raise ConfigError("--render needs a display, and DISPLAY is not set; write a film with --video game.mp4")
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")  # the console's sound is no use here


def _seed_list(text: str) -> list[int]:
    parts = text.split(",")
    seeds = [int(part) for part in parts if part.isdecimal()]
    if len(set(seeds)) < len(parts):
        raise argparse.ArgumentTypeError(f"{text!r} must be different integers from 0 on, e.g. 0,1,2")
    return seeds


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--checkpoint", metavar="PATH", help="a checkpoint, a run or a directory of checkpoints")
    source.add_argument(
        "--run_dir",
        metavar="DIR",
        default="train_log/train",
        help="a run; its newest checkpoint [train_log/train]",
    )
    parser.add_argument("--episodes", type=int, default=30, metavar="N", help="games per seed [30]")
    parser.add_argument(
        "--seeds", "--seed", type=_seed_list, default=[0], metavar="N,N,...", help="seeds of games and actions [0]"
    )
    parser.add_argument("--greedy", action="store_true", help="take the likeliest action instead of drawing one")
    parser.add_argument("--json", metavar="FILE", help="write the report with every game's score there")
    parser.add_argument(
        "--video", nargs="?", const="game.mp4", metavar="FILE.mp4", help="film one more game [game.mp4]"
    )
    parser.add_argument("--gif", metavar="FILE.gif", help="a small film of that game's beginning")
    parser.add_argument("--gif_seconds", type=float, default=15.0, metavar="S", help="its length, s [15]")
    parser.add_argument("--render", action="store_true", help="play one more game in a window")
    parser.add_argument(
        "--device", default="cpu", metavar="TEXT", help="where the network runs: cpu, gpu, gpu:N [cpu]"
    )
    parser.add_argument("--in_background", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.episodes < 0 or options.gif_seconds <= 0:
        parser.error("--episodes must be 0 or more, and --gif_seconds above 0")
    if not (options.episodes or options.video or options.gif or options.render):
        parser.error("--episodes is 0 and there is nothing to show; add --video, --gif or --render")
    if options.json and not options.episodes:
        parser.error("--json needs games to report; leave --episodes at 1 or more")
    return options


def evaluate(options: argparse.Namespace) -> int:
    """Do what the command line asks for; return the exit status."""
    if options.render:
        _open_display()
    agent, config, loaded = load_agent(options.checkpoint or options.run_dir, options.device)
    if options.episodes:
        start = time.monotonic()
        games = {seed: play_games(agent, config, options.episodes, seed, options.greedy) for seed in options.seeds}
        report = report_of(games, config, loaded, options.greedy)
        print(f"{readable(report)}\n({time.monotonic() - start:.0f} s)")
        if options.json:
            checkpoint.write_text(options.json, json.dumps(report, indent=2) + "\n")
            print(f"written: {options.json}")
    seed = options.seeds[0]
    if options.video or options.gif:
        with contextlib.ExitStack() as files:
            writers = [Mp4Writer(options.video)] if options.video else []
            writers += [GifWriter(options.gif, options.gif_seconds)] if options.gif else []
            listeners = [files.enter_context(writer).add for writer in writers]
            game = show_game(agent, config, seed, options.greedy, listeners)
        names = " and ".join(filter(None, (options.video, options.gif)))
        print(f"written: {names}, a game with score {game.raw_return:.0f}")
    if options.render:
        try:
            game = show_game(agent, config, seed, options.greedy)
        except RuntimeError as error:  # ALE's answer where SDL cannot open a window
            raise ConfigError(
                f"--render cannot open a window ({error}); write a film with --video game.mp4"
            ) from error
        print(f"the game in the window ended with score {game.raw_return:.0f}")
    return 0


def main(argv: list[str] | None = None) -> int:
    options = _parse(argv)
    logging.getLogger("a2c").setLevel(logging.WARNING)  # how the network runs is of no interest here
    if options.in_background:
        _go_to_background()
    return exit_status(evaluate, options)


if __name__ == "__main__":
    sys.exit(main())
