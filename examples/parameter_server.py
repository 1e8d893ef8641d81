"""A parameter server, then two that share the parameters: on Ray, then on PARL, until CartPole is solved.

    python examples/parameter_server.py

    Ray, servers: 1; games of 406 steps after 110 updates, 2.5 s
    Ray, servers: 2; games of 403 steps after 118 updates, 5.0 s
    PARL, servers: 1; games of 404 steps after 90 updates, 1.5 s
    PARL, servers: 2; games of 402 steps after 100 updates, 1.4 s

Which worker comes first differs from run to run, so the number of updates does too.
"""

import time

import lesson

import numpy as np
import parl
from cartpole import Server, Worker, until_solved

WORKERS = 2


def on_ray(shards: list[np.ndarray]) -> None:
    """Only references pass through here: each gradient goes from its worker straight to its server."""
    import ray

    servers = [ray.remote(num_cpus=0)(Server).remote(shard) for shard in shards]
    workers = [ray.remote(num_cpus=1)(Worker).remote(seed) for seed in range(WORKERS)]
    running = {}

    def play(worker, parameters) -> None:
        length, *gradients = worker.gradients.options(num_returns=1 + len(shards)).remote(*parameters)
        running[length] = worker, gradients

    def next_length() -> float:
        (length,), _ = ray.wait(list(running))
        worker, gradients = running.pop(length)
        play(worker, [server.apply.remote(each) for server, each in zip(servers, gradients, strict=True)])
        return ray.get(length)

    for worker in workers:
        play(worker, shards)
    until_solved("Ray", len(shards), next_length)


def on_parl(shards: list[np.ndarray], workers: list) -> None:
    """PARL has no references: parameters and gradients all come here and leave again."""
    servers = [parl.remote_class(Server)(shard) for shard in shards]
    running = {worker: worker.gradients(*shards) for worker in workers}

    def next_length() -> float:
        while not (ready := [worker for worker in running if not running[worker].empty()]):
            time.sleep(0.001)
        length, *gradients = running.pop(ready[0]).get()
        parameters = [server.apply(each) for server, each in zip(servers, gradients, strict=True)]
        running[ready[0]] = ready[0].gradients(*parameters)
        return length

    until_solved("PARL", len(shards), next_length)
    _ = [future.get() for future in running.values()]  # a worker that is left at work would complain


if __name__ == "__main__":
    one_server, two_servers = ([*np.array_split(np.zeros(5), server_num)] for server_num in (1, 2))
    with lesson.local_ray(WORKERS):
        on_ray(one_server)
        on_ray(two_servers)
    with lesson.parl_cluster(WORKERS + 3) as address:
        parl.connect(address)
        workers = [parl.remote_class(wait=False)(Worker)(seed) for seed in range(WORKERS)]
        on_parl(one_server, workers)
        on_parl(two_servers, workers)
