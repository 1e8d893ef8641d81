"""Show that nothing is lost: kill a run with SIGKILL again and again, resume it, compare it with one left alone.

    python scripts/kill_and_resume.py --kills 20
    python scripts/kill_and_resume.py --kills 5 --env_name BreakoutNoFrameskip-v4 --episodic_life

One run is never killed. Another of the same settings and seed is killed at random moments: while it starts, plays,
learns or saves. Then the two must agree in sample steps, in every weight and every number of the optimizer, in
games and scores; and the killed one's curves must have no step twice. Should it finish before the last kill, one
more run takes the rest. Options that are not listed go to train.py.
The exit status is 1 where they differ, or a run fails.
"""

import argparse
import json
import math
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cpu_threads  # noqa: F401

import numpy as np

import checkpoint
from a2c_config import Parser, exit_status

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {
    "engine": "local",
    "actor_num": 2,
    "env_num": 4,
    "sample_batch_steps": 5,
    "max_sample_steps": 20_000,
    "checkpoint_interval_s": 0.5,
    "log_metrics_interval_s": 0.5,
}


class RunFailed(ChildProcessError):
    """train.py ended by itself, but not well."""


def train(arguments: list[str], output: Path, kill_after_s: float | None = None) -> bool:
    """Run train.py, all it prints appended to `output`; return whether it finished before the kill.

    Raises:
        RunFailed: where its status is not 0.
    """
    with output.open("a") as file:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), *arguments], stdout=file, stderr=subprocess.STDOUT
        )
        try:
            status = process.wait(timeout=kill_after_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return False
        except BaseException:
            process.kill()
            raise
    if status != 0:
        raise RunFailed(f"train.py ended with status {status}; its last words are in {output}")
    return True


def steps_saved(run_dir: Path) -> int:
    """Sample steps of the newest checkpoint, 0 where there is none."""
    newest = checkpoint.newest(run_dir / checkpoint.DIRECTORY)
    return int(newest.stem.removeprefix("step-")) if newest else 0


def differences(left_alone: Path, killed: Path) -> list[str]:
    """What distinguishes the two runs' last checkpoints, and the killed one's curve from a whole one."""
    (_, expected), (_, actual) = checkpoint.resolve(left_alone), checkpoint.resolve(killed)
    found = [
        f"{name}: {expected.counters[name]} and {actual.counters[name]}"
        for name in ("sample_steps", "updates", "episode_num")
        if expected.counters[name] != actual.counters[name]
    ]
    found += [
        f"{name} differs"
        for name in sorted(expected.arrays.keys() | actual.arrays.keys())
        if not np.array_equal(expected.arrays.get(name, np.nan), actual.arrays.get(name, np.nan))
    ]
    recent = [saved.state["metrics"][name] for saved in (expected, actual) for name in ("returns", "lengths")]
    if recent[:2] != recent[2:]:
        found.append("the last games' scores or lengths differ")
    lines = (killed / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["sample_steps"] for line in lines]
    if steps != sorted(set(steps)):
        found.append("the killed run's metrics.jsonl has a step twice, or not in order")
    return found


def kill_and_resume(options: argparse.Namespace, train_options: list[str], directory: Path) -> int:
    """Both runs and the comparison; return the exit status."""
    chance = random.Random(options.seed)
    settings = [f"--{name}={value}" for name, value in (SETTINGS | {"seed": options.seed}).items()]
    settings += train_options
    left_alone = directory / "left_alone"
    start = time.monotonic()
    train([*settings, f"--run_dir={left_alone}"], directory / "left_alone.txt")
    whole_s = time.monotonic() - start
    training_s = checkpoint.resolve(left_alone)[1].counters["elapsed_s"]
    print(f"left alone: {steps_saved(left_alone):,} sample steps in {whole_s:.1f} s", flush=True)

    # At any moment from the first import on, and so that on average, x^2 / 2 / (start_s + x), the run gets on by
    # half its share: it shall rarely finish before the last kill.
    start_s, half_share_s = whole_s - training_s, training_s / (options.kills + 1) / 2
    latest_kill_s = start_s + half_share_s + math.sqrt(half_share_s**2 + 2 * half_share_s * start_s)
    kills, repetition, finished, found = 0, 1, False, []
    while not finished or kills < options.kills:
        killed = directory / f"killed{repetition}"
        resuming = (killed / "config.json").is_file()
        arguments = ["--resume", str(killed)] if resuming else [*settings, f"--run_dir={killed}"]
        before = steps_saved(killed)
        kill_after_s = chance.uniform(0, latest_kill_s)
        finished = train(arguments, directory / "killed.txt", kill_after_s if kills < options.kills else None)
        how = f"{'resumed' if resuming else 'started'} at {before:,}"
        if finished:
            print(f"{how}, finished with {steps_saved(killed):,} sample steps", flush=True)
            found += differences(left_alone, killed)
            repetition += 1
        else:
            kills += 1
            print(
                f"kill {kills}/{options.kills}: {how}, killed after {kill_after_s:.1f} s, "
                f"{steps_saved(killed):,} sample steps saved",
                flush=True,
            )
    for difference in found:
        print(f"DIFFERENT {difference}")
    verdict = "the runs differ" if found else "the same sample steps, weights, optimizer, games and scores"
    print(f"{kills} kills: {verdict}")
    return 1 if found else 0


def run(options: argparse.Namespace, train_options: list[str]) -> int:
    """The experiment in the directory that is asked for, or in one that is removed in the end."""
    if not options.directory:
        with tempfile.TemporaryDirectory(prefix="kill-and-resume-") as directory:
            return kill_and_resume(options, train_options, Path(directory))
    if options.directory.exists() and any(options.directory.iterdir()):
        raise FileExistsError(f"--directory {options.directory} is not empty; name a new one")
    options.directory.mkdir(parents=True, exist_ok=True)
    return kill_and_resume(options, train_options, options.directory)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        prog="scripts/kill_and_resume.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--kills", type=int, default=20, help="how often [20]")
    parser.add_argument("--seed", type=int, default=0, help="of the runs and of the moments [0]")
    parser.add_argument("--directory", type=Path, help="keep the runs here [a temporary directory]")
    options, train_options = parser.parse_known_args(argv)
    if options.kills < 1:
        parser.error(f"--kills is {options.kills}, but must be at least 1")
    return exit_status(run, options, train_options)


if __name__ == "__main__":
    sys.exit(main())
