"""How fast this machine trains: the parts, the whole, and what other libraries do at the same settings.

    python scripts/benchmark.py --quick                                      # a short round, 2 min; with peers 5
    python scripts/benchmark.py --peer_python peers/bin/python --json benchmark.json
    python scripts/benchmark.py --parts env,local --rounds 3 --env_dim 44
    python scripts/benchmark.py --simulate_actors 1,8,64,256                 # how much the learner takes in

All on the CPU, in processes of their own, one at a time; "1 core" means that the process is bound to one. A round
measures every row once, ours and the peers' by turns, every other round backwards. The table has our median over
the rounds, the median of the best peer, and the ratio of the two.

env          The C++ vector environment under random actions; sample steps/s (1 = 4 emulator frames).
inference    uint8 observations to drawn actions and values, always with 1 thread; PyTorch: to logits and values.
learning     uint8 batch to new weights: forward, loss, backward, clipping, Adam; a thread per core.
             "after acting": without the forward pass, which acting on the same observations has done.
messages     What travels between the learner and one remote actor, pickled as the PARL engine does: ms and size.
local        `train.py --engine local`, after its start; peak memory is that of the process.
parl         The same with --engine parl, on a cluster of its own, each actor with the default environments.
peers        Stable-Baselines3's A2C: same game, size of frames, envs and steps, 4 frames stacked, no end at a lost
             life, else its defaults. PyTorch's Nature CNN: the best of two memory layouts, and of 1 and more
             threads.
additive limit
             cores / (core-seconds per sample step of env with 1 thread + inference for one actor + learning after
             acting), each measured alone on 1 core: the speed if nothing else cost anything.
simulate     Stub actors answer each message of weights with a recorded trajectory, over loopback: what a learner
             takes in, by stage. The stubs share this machine's cores. Once, not in rounds.
"""

import argparse
import json
import os
import signal
import sys
import time
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import benchmark_report as report
from benchmark_options import parse_options
from benchmark_plan import Plan, run_child
from benchmark_trainers import MeasurementError

from a2c_config import A2CConfig

BUSY_CORES = 0.2  # used by others: enough to spoil a measurement
PEER_PACKAGES = "torch stable-baselines3 gymnasium ale-py opencv-python-headless"


def measure(plan: Plan, rounds: int) -> tuple[report.Results, dict[str, str], list[float]]:
    """Run all rounds; return the results, why any step failed, and the cores that others used before each."""
    results, failures, busy = report.Results(), {}, []
    for number in range(1, rounds + 1):
        busy.append(cores_in_use())
        for step in plan.steps if number % 2 else reversed(plan.steps):
            label = f"{step.part}: {step.label}"
            if label in failures:
                continue
            start = time.monotonic()
            try:
                results.add(step.measure())
                outcome = f"{time.monotonic() - start:.0f} s"
            except MeasurementError as error:
                failures[label] = str(error)
                outcome = f"failed: {error}"
            print(f"round {number}/{rounds}  {label}  ({outcome})", flush=True)
    return results, failures, busy


def simulate(options: argparse.Namespace) -> list[dict]:
    """Feed the learner from each number of stub actors in turn."""
    records = []
    cores_in_use()
    for actor_num in options.simulate_actors:
        arguments = {"env_name": options.env_name, "env_dim": options.env_dim}
        arguments |= {"actor_num": actor_num, "seconds": options.seconds}
        output = run_child(sys.executable, "benchmark_simulate.py", "learn", arguments)
        records.append(json.loads(output.strip().splitlines()[-1]))
        print(f"simulated {actor_num} actors", flush=True)
    return records


def cores_in_use(seconds: float = 0.5) -> float:
    """How many cores other programs keep busy, over some idle seconds of ours; a note where that matters."""

    def ticks() -> tuple[int, int]:
        numbers = [int(number) for number in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        return sum(numbers) - numbers[3] - numbers[4], sum(numbers)  # [3] idle, [4] waiting for a disk

    busy, total = ticks()
    time.sleep(seconds)
    later_busy, later_total = ticks()
    cores = (os.cpu_count() or 1) * (later_busy - busy) / max(1, later_total - total)
    if cores > BUSY_CORES:
        print(f"note: other programs use {cores:.1f} cores now, which falsifies the results", flush=True)
    return cores


def describe_machine(env_name: str) -> dict:
    """This machine and our packages; MeasurementError where they, or the game, cannot be used."""
    try:
        return json.loads(run_child(sys.executable, "benchmark_parts.py", "describe", {"env_name": env_name}))
    except MeasurementError as error:
        kind, _, sentence = str(error).partition(": ")
        if kind == "ModuleNotFoundError":
            sentence = f"{sys.executable}: {sentence}; run `bash scripts/setup.sh` first"
        raise MeasurementError(sentence or kind) from error


def describe_peer(python: str) -> dict:
    """Versions and missing packages of the peers' Python; MeasurementError where it cannot serve at all."""
    try:
        found = json.loads(run_child(python, "benchmark_peers.py", "describe"))
    except (MeasurementError, ValueError) as error:
        raise MeasurementError(
            f"--peer_python {python} is no Python that runs here ({error}); use --peer_python peers/bin/python, "
            f"made with `python3 -m venv peers && peers/bin/pip install {PEER_PACKAGES}`"
        ) from error
    lacking = {peer: modules for peer, modules in found["missing"].items() if modules}
    if len(lacking) == len(found["missing"]):
        modules = sorted({module for missing in lacking.values() for module in missing})
        raise MeasurementError(
            f"--peer_python {python} lacks {', '.join(modules)}; run `{python} -m pip install {PEER_PACKAGES}`"
        )
    for peer, modules in lacking.items():
        print(f"note: {peer} is left out, since {python} lacks {', '.join(modules)}")
    return found


def run(options: argparse.Namespace) -> int:
    """Measure, print, save; return the exit status: 1 where any measurement failed."""
    peer = describe_peer(options.peer_python) if options.peer_python else None
    machine = describe_machine(options.env_name)
    chosen = f"{options.env_name} at {options.env_dim} x {options.env_dim} pixels"
    print(f"{chosen} on {machine['cpu']}, {machine['cores']} cores, {' and '.join(machine['precisions'])}")
    for packages in (machine["packages"], peer["packages"] if peer else {}):
        print(", ".join(f"{package} {version}" for package, version in packages.items() if version))
    if machine["fallback"]:
        print(f"note: the network runs on Paddle's own layers, since {machine['fallback']}")
    plan = Plan(options, machine, peer["missing"] if peer else None)
    results, failures, busy = measure(plan, options.rounds if plan.steps else 0)
    default = A2CConfig()
    shape = default.actor_num, default.env_num, default.sample_batch_steps
    conclusions = report.conclusions(results, machine["cores"], machine["best_precision"], *shape)
    if results.values:
        print("", *report.table(results), "", *report.lines(conclusions), sep="\n")
    simulated = simulate(options) if "simulate" in options.parts else []
    if simulated:
        print("", *report.simulation_table(simulated), sep="\n")
    for label, reason in failures.items():
        print(f"error: {label} could not be measured: {reason}", file=sys.stderr)
    if options.json:
        record = {
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "options": {name: str(value) for name, value in vars(options).items()},
            "machine": machine,
            "peer_packages": peer["packages"] if peer else None,
            "default_actors_envs_steps": shape,
            "cores_in_use_by_others": busy,
            "rows": results.as_records(),
            "conclusions": conclusions,
            "simulation": simulated,
            "failures": failures,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"every value of every round: {options.json}")
    return 1 if failures else 0


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv, __doc__)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop what was started, as for Ctrl-C
    try:
        return run(options)
    except KeyboardInterrupt:
        print("error: interrupted; nothing was saved", file=sys.stderr)
        return 130
    except (MeasurementError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
