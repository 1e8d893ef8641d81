"""Measures one part of the trainer alone, for `benchmark.py`, which defines each row and chooses the cores.

python scripts/benchmark_parts.py env \
    '{"env_name": "ALE/Pong-v5", "env_dim": 84, "env_num": 16, "threads": 1, "seconds": 2}'
"""

import json
import pickle
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cpu_threads

import numpy as np
from benchmark_rows import (
    AFTER_ACTING,
    INFERENCE,
    LEARNING,
    MEGABYTES,
    MILLISECONDS,
    OBSERVATIONS,
    SAMPLE_STEPS,
    SAMPLES,
    Row,
    env_row,
    network_row,
    print_rows,
    seconds_per_call,
)

from a2c_config import A2CConfig
from env_utils import action_num, make_vector_env

if TYPE_CHECKING:
    from atari_agent import AtariAgent


def describe(env_name: str) -> dict:
    """This machine and our packages; an error where the game is unknown."""
    import cpu_kernels

    action_num(env_name)
    cpuinfo = Path("/proc/cpuinfo")
    models = [line.partition(":")[2].strip() for line in cpuinfo.open() if line.startswith("model name")]
    packages = ("paddlepaddle", "parl", "ale-py", "numpy")
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": cpu_threads.usable_cores(),
        "learner_threads": cpu_threads.learner_threads(),
        "precisions": ["fp32"] if cpu_kernels.unavailable_reason("bf16") else ["fp32", "bf16"],
        "best_precision": cpu_kernels.best_precision(),
        "fallback": cpu_kernels.unavailable_reason("fp32"),
        "python": platform.python_version(),
        "packages": {package: _version(package) for package in packages},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # another build, such as paddlepaddle-gpu
        return None


def env(env_name: str, env_dim: int, env_num: int, threads: int, seconds: float) -> list[Row]:
    """The vector environment alone, under random actions drawn beforehand."""
    vector_env = make_vector_env(env_name, env_num, seed=0, env_dim=env_dim, num_threads=threads)
    vector_env.reset()
    actions = np.random.default_rng(0).integers(vector_env.action_num, size=(1024, env_num))
    step_count = 0

    def step() -> None:
        nonlocal step_count
        vector_env.step(actions[step_count % len(actions)])
        step_count += 1

    row = Row(env_row(env_num, threads), SAMPLE_STEPS, env_num / seconds_per_call(step, seconds, warm_up=20))
    vector_env.close()
    return [row]


def inference(
    env_name: str, env_dim: int, batches: list[int], precisions: list[str], cores: int, seconds: float
) -> list[Row]:
    """Bytes to actions and values: `AtariAgent.sample`."""
    rng, rows = np.random.default_rng(0), []
    for precision in precisions:
        agent = _agent(env_name, env_dim, precision)
        for batch in batches:
            obs = _random_batch(batch, agent)[0]
            call_s = seconds_per_call(lambda agent=agent, obs=obs: agent.sample(obs, rng), seconds)
            rows.append(Row(network_row(INFERENCE, batch, precision, cores), OBSERVATIONS, batch / call_s))
    return rows


def learning(
    env_name: str, env_dim: int, batches: list[int], precisions: list[str], cores: int, seconds: float
) -> list[Row]:
    """Bytes to new weights: `AtariAgent.learn` with a forward pass of its own."""
    rows = []
    for precision in precisions:
        agent = _agent(env_name, env_dim, precision)
        for batch in batches:
            arrays = _random_batch(batch, agent)
            call_s = seconds_per_call(lambda agent=agent, arrays=arrays: agent.learn(*arrays, 0), seconds)
            rows.append(Row(network_row(LEARNING, batch, precision, cores), SAMPLES, batch / call_s))
    return rows


def learning_after_acting(
    env_name: str, env_dim: int, env_num: int, batch: int, precision: str, seconds: float
) -> list[Row]:
    """`AtariAgent.learn` where acting on the same observations, not timed here, did its forward pass."""
    agent, rng = _agent(env_name, env_dim, precision), np.random.default_rng(0)
    arrays = _random_batch(batch, agent)
    call_s = []
    while len(call_s) < 3 or sum(call_s[2:]) < seconds:  # the first two warm up
        agent.keep_forward(arrays[0])
        for start in range(0, batch, env_num):
            agent.sample(arrays[0][start : start + env_num], rng)
        start_s = time.perf_counter()
        agent.learn(*arrays, 0)
        call_s.append(time.perf_counter() - start_s)
    return [Row(network_row(AFTER_ACTING, batch, precision, 1), SAMPLES, batch / np.mean(call_s[2:]))]


def messages(env_name: str, env_dim: int, seconds: float) -> list[Row]:
    """What travels between the learner and one remote actor of the default settings, per update."""
    from actor import Actor

    config = A2CConfig(env_name=env_name, env_dim=env_dim, engine="local")
    actor, learner = Actor(config, 0), _agent(env_name, env_dim, "auto")
    weights = learner.get_weights()
    for version in range(2):  # the first trajectory begins with stacks that are still filling up
        trajectory = actor.collect(weights, version)

    def pack_weights() -> bytes:
        return pickle.dumps(learner.get_weights(), protocol=pickle.HIGHEST_PROTOCOL)

    def pack_trajectory() -> bytes:
        return pickle.dumps(trajectory, protocol=pickle.HIGHEST_PROTOCOL)

    packed_weights, packed_trajectory = pack_weights(), pack_trajectory()
    timed = {
        "weights, packed by the learner, once": pack_weights,
        "weights, unpacked and set by an actor": lambda: actor.agent.set_weights(pickle.loads(packed_weights)),
        "trajectory, packed by an actor": pack_trajectory,
        "trajectory, unpacked by the learner": lambda: pickle.loads(packed_trajectory),
    }
    sizes = {
        "weights, message": len(packed_weights),
        "trajectory, message": len(packed_trajectory),
        "trajectory, its observations in memory": trajectory.obs.nbytes,
    }
    actor.close()
    return [Row(name, MILLISECONDS, 1e3 * seconds_per_call(call, seconds / 2)) for name, call in timed.items()] + [
        Row(name, MEGABYTES, size / 1e6) for name, size in sizes.items()
    ]


def _agent(env_name: str, env_dim: int, precision: str) -> "AtariAgent":
    from atari_agent import create_agent  # not above: the environment alone needs no Paddle

    config = A2CConfig(env_name=env_name, env_dim=env_dim, engine="local", precision=precision)
    return create_agent(config, action_num(env_name), "cpu")


def _random_batch(batch: int, agent: "AtariAgent") -> tuple[np.ndarray, ...]:
    """`obs` uint8 [B, 4, D, D], `actions` int64 [B], `advantages` and `target_values` float32 [B]."""
    rng, model = np.random.default_rng(0), agent.alg.model
    obs = rng.integers(256, size=(batch, 4, model.env_dim, model.env_dim), dtype=np.uint8)
    advantages, target_values = rng.standard_normal((2, batch), dtype=np.float32)
    return obs, rng.integers(model.action_num, size=batch), advantages, target_values


MEASUREMENTS = {
    measure.__name__: measure for measure in (env, inference, learning, learning_after_acting, messages)
}


def main() -> None:
    name = sys.argv[1]
    if name == "describe":
        print(json.dumps(describe(**json.loads(sys.argv[2]))))
    else:
        print_rows(MEASUREMENTS[name](**json.loads(sys.argv[2])))


if __name__ == "__main__":
    main()
