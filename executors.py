"""Who runs the trials of `tune.py`: executors of concurrent.futures, whatever is behind them."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

from cpu_threads import usable_cores

import ray_compat

Started = Iterator[tuple[Executor | None, int]]


def create_executor(
    name: str, jobs: int | None, ray_address: str | None = None
) -> contextlib.AbstractContextManager[tuple[Executor | None, int]]:
    """Give the executor `name` of `EXECUTORS`, and how many of its jobs may run on one machine at once.

    The executor is None in a process that only works for another one: it has nothing left to do.

    Raises:
        ConnectionError: where a package is missing, a cluster does not answer, or mpirun is needed.
    """
    return {"process": _processes, "mpi": _mpi, "ray": _ray}[name](jobs, ray_address)


@contextlib.contextmanager
def _processes(jobs: int | None, _: str | None) -> Started:
    # A trial is a process anyway: a thread starts it and waits.
    with ThreadPoolExecutor(jobs or 1) as executor:
        yield executor, jobs or 1


@contextlib.contextmanager
def _mpi(jobs: int | None, _: str | None) -> Started:
    try:
        from mpi4py import MPI
        from mpi4py.futures import MPICommExecutor
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there, MPI's library is not
        raise ConnectionError(
            f"MPI cannot be used ({error}); run `pip install -r requirements-mpi.txt`"
        ) from error
    ranks = MPI.COMM_WORLD.Get_size()
    if ranks < 2:
        raise ConnectionError(
            "--executor mpi needs one process to lead and others to work, but there is only one; start it with "
            "`mpirun -n 3 python tune.py --executor mpi ...`"
        )
    # Every rank comes here; all but the first work until the first one leaves. Started with
    # `python -m mpi4py.futures` instead, only the first comes here, with the same effect.
    with MPICommExecutor(MPI.COMM_WORLD, root=0) as executor:
        if executor is not None:
            yield executor, jobs or ranks - 1
    if executor is None:
        yield None, 0


@contextlib.contextmanager
def _ray(jobs: int | None, address: str | None) -> Started:
    jobs = jobs or 1
    share = max(1, usable_cores() // jobs)
    ray = ray_compat.connect(address, cpu_num=share * jobs)
    try:
        with _RayExecutor(ray, share) as executor:
            yield executor, jobs
    finally:
        ray.shutdown()


class _RayExecutor(Executor):
    """Each call is a Ray task that asks for `cpu_num` CPUs, and that Ray does not repeat."""

    def __init__(self, ray: Any, cpu_num: int) -> None:
        self._ray, self._cpu_num, self._references = ray, cpu_num, []

    def submit(self, function: Callable, /, *args: Any, **kwargs: Any) -> Future:
        task = self._ray.remote(num_cpus=self._cpu_num, max_retries=0)(function)
        self._references.append(task.remote(*args, **kwargs))
        return self._references[-1].future()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:  # running ones too: they end with the processes that run them
            for reference in self._references:
                self._ray.cancel(reference, force=True)
        if wait:
            self._ray.wait(self._references, num_returns=len(self._references))


EXECUTORS = ("process", "mpi", "ray")
