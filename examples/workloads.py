"""What lessons share out, and their clocks: a counting loop, factoring with NumPy, a pause, a sum."""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

BLOCK = 1 << 20  # candidates tried at once: 8 MB an array, however large the number


def count(limit: int) -> int:
    """Sum 0 ... limit - 1 in a plain Python loop."""
    total = 0
    for number in range(limit):
        total += number
    return total


def factor(number: int) -> list[int]:
    """Return the prime factors of 2 <= `number` < 1e10, ascending; ValueError outside.

    Fermat: an odd number = a^2 - b^2 = (a - b)(a + b), and every pair of factors has its a. The search begins
    at the pair nearest the root, a square's own, and ends only where a - b = 3: factors that lie far apart are
    found too, and a number without any is prime.
    """
    if not 2 <= number < 10**10:
        raise ValueError(f"number is {number}, but must be at least 2 and below 1e10: its a^2 must fit in int64")
    if number <= 3:
        return [number]
    if number % 2 == 0:
        return [2, *factor(number // 2)]
    smallest, largest = math.isqrt(number - 1) + 1, (number + 9) // 6
    for first in range(smallest, largest + 1, BLOCK):
        a = np.arange(first, min(first + BLOCK, largest + 1), dtype=np.int64)
        squares = a * a - number
        b = np.rint(np.sqrt(squares)).astype(np.int64)
        found = np.flatnonzero(b * b == squares)
        if len(found):
            low, high = int((a - b)[found[0]]), int((a + b)[found[0]])
            return sorted(factor(low) + factor(high))
    return [number]


def pause(seconds: float) -> float:
    """Wait rather than compute, so that any number of them fit on any machine."""
    time.sleep(seconds)
    return seconds


def add_up(numbers: np.ndarray) -> float:
    return float(numbers.sum())


class Worker:
    """For PARL, whose unit of work is a class: its objects run elsewhere."""

    def run(self, function: Callable[[int], Any], argument: int) -> Any:
        return function(argument)  # there


def best_of_three(map_all: Callable, function: Callable, arguments: Iterable) -> tuple[list, float]:
    """`map_all(function, arguments)`: its results, and the least of three times, s: others may disturb one."""
    seconds = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        results = list(map_all(function, arguments))
        seconds = min(seconds, time.perf_counter() - start)
    return results, seconds


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    """Print how long the block took."""
    start = time.perf_counter()
    yield
    print(f"  {time.perf_counter() - start:5.2f} s  {what}", flush=True)
