"""Try all combinations of some settings, several seeds each, and rank them.

    python tune.py --grid start_lr=1e-3,7e-4 env_num=16,32 --seeds 3 --jobs 2 --max_sample_steps 1e6
    python tune.py --grid grid.json --out_dir train_log/grid --resume
    mpirun -n 3 python tune.py --executor mpi --grid start_lr=1e-3,7e-4     # one rank leads, two work

Each trial is one train.py in a directory of its own, on its share of the cores. Options that are not listed
below go to every trial. grid.json holds {"start_lr": [1e-3, 7e-4], "env_num": [16, 32]}. Ctrl-C stops all
trials, which save a checkpoint each; --resume goes on with them, and leaves alone what has finished.
"""

import argparse
import signal
import sys
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from pathlib import Path

import cpu_threads  # noqa: F401  before NumPy starts its threads

import trials
from a2c_config import ConfigError, Parser, exit_status
from executors import EXECUTORS, create_executor
from grid import make_trials, read_grid
from trial_report import Table, write_report
from trials import Outcome, StopRule, Trial

REFRESH_S = 1.0


def pending_trials(all_trials: list[Trial], resume: bool) -> list[Trial]:
    """Those that have still to run.

    Raises:
        ConfigError: where the directory holds trials already and they are not to be resumed, or cannot be.
    """
    pending = []
    for trial in all_trials:
        outcome, options = trials.load_record(trial)
        if outcome and not resume:
            raise ConfigError(
                f"{str(trial.out_dir)!r} holds trials already; go on with them with --resume, or choose another "
                "--out_dir"
            )
        if options != trial.options:
            raise ConfigError(
                f"{trial.name} was run with {' '.join(options)!r}, not with {' '.join(trial.options)!r}; "
                "resume it with the options that it had, or choose another --out_dir"
            )
        if outcome is None or outcome.status not in (trials.FINISHED, trials.STOPPED):
            pending.append(trial)
    return pending


def run_all(executor: Executor, jobs: int, pending: list[Trial], stop_below: StopRule | None) -> bool:
    """Run the `pending` trials, each once, and show how they do; return whether Ctrl-C ended it."""
    table = Table(pending)
    try:
        futures = {executor.submit(trials.run_trial, trial, jobs, stop_below): trial for trial in pending}
        while futures:
            ended, _ = wait(futures, timeout=REFRESH_S, return_when=FIRST_COMPLETED)
            for future in ended:
                trial = futures.pop(future)
                table.show_end(trial, outcome_of(future, trial))
            table.refresh()
        return False
    except KeyboardInterrupt:
        table.clear()
        print("stopping the trials, which save a checkpoint each", flush=True)
        trials.stopping.set()
        executor.shutdown(wait=True, cancel_futures=True)
        return True


def outcome_of(future: Future, trial: Trial) -> Outcome:
    """A trial's outcome, also where the executor lost the process that ran it."""
    error = future.exception()
    if error is None:
        return future.result()
    with trial.log.open("a") as log:
        log.write(f"{type(error).__name__}: {error}\n")
    outcome = Outcome(trials.CRASHED)
    trials.save_record(trial, outcome)
    return outcome


def command_line() -> Parser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument(
        "--grid",
        nargs="+",
        required=True,
        metavar="NAME=VALUE,...",
        help="settings of train.py and the values to try; or one FILE.json",
    )
    parser.add_argument(
        "--seeds", type=count, default=1, metavar="N", help="seeds 0 to N-1 of each combination [1]"
    )
    parser.add_argument(
        "--out_dir", type=Path, default=Path("train_log/grid"), metavar="DIR", help="[train_log/grid]"
    )
    parser.add_argument(
        "--jobs", type=count, metavar="N", help="trials at once on each machine [1; mpi: ranks - 1]"
    )
    parser.add_argument(
        "--executor", choices=EXECUTORS, default="process", help="who runs the trials [process: this machine]"
    )
    parser.add_argument("--ray_address", metavar="HOST:PORT", help="of a Ray cluster [a local one]")
    parser.add_argument("--resume", action="store_true", help="go on with a grid that was stopped")
    parser.add_argument(
        "--stop_below",
        type=stop_rule,
        metavar="SCORE@STEPS",
        help="end a trial whose score is below SCORE after STEPS sample steps, e.g. -19@5e5",
    )
    return parser


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)


def stop_rule(text: str) -> StopRule:
    try:
        score, steps = text.split("@")
        return StopRule(float(score), int(float(steps)))
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not SCORE@STEPS, such as -19@5e5") from error


def run(options: argparse.Namespace, for_trials: list[str]) -> int:
    """Run the grid and rank it; return the exit status."""
    with create_executor(options.executor, options.jobs, options.ray_address) as (executor, jobs):
        if executor is None:
            return 0
        all_trials = make_trials(read_grid(options.grid), options.seeds, for_trials, options.out_dir)
        pending = pending_trials(all_trials, options.resume)
        options.out_dir.mkdir(parents=True, exist_ok=True)
        done = f", {len(all_trials) - len(pending)} of them done already" if len(pending) < len(all_trials) else ""
        print(f"{len(all_trials)} trials{done}, {jobs} at once on a machine, in {options.out_dir}", flush=True)
        interrupted = run_all(executor, jobs, pending, options.stop_below)
    crashed = write_report(all_trials, options.out_dir)
    if interrupted:
        print("next: the same command with --resume")
        return 130
    return 1 if crashed else 0


def main(argv: list[str] | None = None) -> int:
    options, for_trials = command_line().parse_known_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return exit_status(run, options, for_trials)


if __name__ == "__main__":
    sys.exit(main())
