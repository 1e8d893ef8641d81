"""Two jobs, each four times over: one after the other, then shared out over this machine's cores in every way.

    python examples/parallel_speedup.py [--quick]

    2 cores                        counting loop      NumPy factoring
    serial                         2.59 s  1.00x       2.88 s  1.00x
    threads                        3.23 s  0.80x       1.66 s  1.73x
    processes                      2.05 s  1.27x       2.24 s  1.28x
    PARL, wait=True                2.04 s  1.27x       2.03 s  1.42x
    PARL, wait=True, threads       2.26 s  1.15x       1.76 s  1.64x
    PARL, wait=False               1.91 s  1.35x       1.66 s  1.74x
    Ray                            1.59 s  1.63x       1.87 s  1.54x

Plain Python holds the interpreter's lock, so threads take turns; NumPy lets go of it inside its loops. A PARL
call with wait=True returns when the work is done: one after the other, unless threads call. NumPy gains less
from processes: its arrays stream through the memory, which all cores share.
"""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from importlib.util import find_spec
from itertools import cycle
from multiprocessing import cpu_count, get_context

import lesson

import parl
from workloads import Worker, best_of_three, count, factor

WORK = {count: [8_000_000] * 4, factor: [199_999_991, 199_999_963, 199_999_957, 199_999_949]}  # primes
QUICK_WORK = {count: [100_000] * 4, factor: [81, 97, 998_001, 1_999_998]}


def ways(cores: int) -> Iterator[tuple]:
    """Yield each way's name and its `map(function, arguments) -> results`; its workers run already."""
    yield "serial", map
    with ThreadPoolExecutor(cores) as threads, ProcessPoolExecutor(cores, get_context("spawn")) as processes:
        for pool in threads, processes:
            list(pool.map(time.sleep, [0.5] * cores))
        yield "threads", threads.map
        yield "processes", processes.map
        with lesson.parl_cluster(2 * cores) as address:
            parl.connect(address)
            waiting = [parl.remote_class(Worker)() for _ in range(cores)]
            prompt = [parl.remote_class(wait=False)(Worker)() for _ in range(cores)]
            _ = [future.get() for future in [worker.run(count, 1) for worker in prompt]]

            def calls(workers, function, arguments, map_all=map):
                return list(map_all(lambda w, argument: w.run(function, argument), cycle(workers), arguments))

            yield "PARL, wait=True", lambda *work: calls(waiting, *work)
            yield "PARL, wait=True, threads", lambda *work: calls(waiting, *work, threads.map)
            yield "PARL, wait=False", lambda *work: [future.get() for future in calls(prompt, *work)]
    if not find_spec("ray"):
        return print("Ray is not installed; `pip install -r requirements-ray.txt`")
    with lesson.local_ray(cores) as ray:
        remote = {function: ray.remote(function) for function in WORK}
        ray.get([remote[count].remote(5_000_000) for _ in range(cores)])
        yield "Ray", lambda function, arguments: ray.get([remote[function].remote(each) for each in arguments])


def main(argv: list[str]) -> None:
    cores = cpu_count()
    work, serial = QUICK_WORK if "--quick" in argv else WORK, {}
    print(f"{f'{cores} cores':26}{'counting loop':>18}{'NumPy factoring':>21}")
    for way, map_all in ways(cores):
        cells = ""
        for function, arguments in work.items():
            results, seconds = best_of_three(map_all, function, arguments)
            serial_results, serial_s = serial.setdefault(function, (results, seconds))
            assert results == serial_results, f"{way} gives {results} instead of {serial_results}"
            cells += f"{seconds:9.2f} s {serial_s / seconds:5.2f}x  "
        print(f"{way:26}{cells}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
