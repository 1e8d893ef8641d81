"""What the benchmark's programs share: rows and the clock. Standard library only: a peer's Python runs it too."""

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

OURS = "ours"
SAMPLE_STEPS, OBSERVATIONS, SAMPLES = "sample steps/s", "observations/s", "samples/s"
INFERENCE, LEARNING, AFTER_ACTING = "inference", "learning", "learning after acting"
MILLISECONDS, MEGABYTES = "ms", "MB"


@dataclass(frozen=True)
class Row:
    """One measured value; rows of one `name` meet in one line of the table."""

    name: str
    unit: str
    value: float
    who: str = OURS


def env_row(env_num: int, threads: int) -> str:
    return f"env, {env_num} envs, {threads} thread{'s' if threads > 1 else ''}"


def network_row(what: str, batch: int, precision: str, cores: int) -> str:
    """`what` is INFERENCE, LEARNING or AFTER_ACTING."""
    return f"{what}, batch {batch}, {precision}, {cores} core{'s' if cores > 1 else ''}"


def trainer_row(engine: str, env_num: int, steps: int) -> str:
    return f"{engine}, {env_num} envs x {steps} steps"


def parl_row(actor_num: int, env_num: int, steps: int, overlap: bool = False) -> str:
    actors = f"{actor_num} actor{'s' if actor_num > 1 else ''}"
    return f"parl, {actors}, {actor_num * env_num} envs x {steps} steps{', overlap' if overlap else ''}"


def seconds_per_call(call: Callable[[], object], seconds: float, warm_up: int = 3) -> float:
    """Mean wall-clock seconds of `call`, over about `seconds` of calls after `warm_up` uncounted ones."""
    for _ in range(warm_up):
        call()
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or not count:
        call()
        count += 1
    return elapsed / count


def print_rows(rows: list[Row]) -> None:
    """Hand `rows` to the benchmark: as the last line of this program's output."""
    print(json.dumps([dataclasses.asdict(row) for row in rows]), flush=True)


def parse_rows(output: str) -> list[Row]:
    """The rows in what a program printed."""
    return [Row(**fields) for fields in json.loads(output.strip().splitlines()[-1])]
