"""How much a learner takes in from many actors, for `benchmark.py --simulate_actors`.

    python scripts/benchmark_simulate.py learn \
        '{"env_name": "PongNoFrameskip-v4", "env_dim": 84, "actor_num": 64, "seconds": 4}'

Stub actors, in one process of their own that does nothing else, answer each message of weights with a trajectory
recorded from the real game, over ZeroMQ sockets of the loopback interface: one socket per actor, as PARL has.
"""

import contextlib
import itertools
import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import zmq

ROOT = Path(__file__).resolve().parent.parent
RECORDED = 4  # different trajectories, dealt out in turn
STAGES = ("pack weights", "exchange messages", "unpack trajectories", "flatten", "learn")


def learn(env_name: str, env_dim: int, actor_num: int, seconds: float) -> dict:
    """Feed a real learner from `actor_num` stub actors of the default settings for about `seconds`.

    Returns:
        `actors`, `sample_steps_per_s`, `intake_limit_per_s` (the same without the time to learn),
        `received_mb_per_s`, `sent_mb_per_s`, `peak_memory_mb`, and `stage_ms` per update by stage; or `actors` and
        `skipped`, the reason, where memory does not suffice.
    """
    sys.path.insert(0, str(ROOT))
    import cpu_threads  # noqa: F401  before NumPy and Paddle start their threads

    import psutil

    from a2c_config import A2CConfig
    from atari_agent import create_agent
    from env_utils import action_num

    config = A2CConfig(env_name=env_name, env_dim=env_dim, engine="local")
    batch = actor_num * config.env_num * config.sample_batch_steps
    available = psutil.virtual_memory().available
    # Of a sample at its peak: its observation as received and as flattened, and the network's activations.
    sample_bytes = 2 * 4 * env_dim**2 + 200_000
    if batch * sample_bytes > 0.8 * available:
        needed_gb = batch * sample_bytes / 1e9
        return {
            "actors": actor_num,
            "skipped": f"a batch of {batch:,} samples needs {needed_gb:.0f} GB, {available / 1e9:.0f} GB are free",
        }
    agent = create_agent(config, action_num(env_name), "cpu")
    recorded = _record(config, agent)
    with _stub_actors(recorded, actor_num) as sockets:
        _update(agent, sockets)  # primitives are made, memory is claimed
        seconds_by_stage, traffic = dict.fromkeys(STAGES, 0.0), [0, 0]
        updates, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds or not updates:
            stage_s, sent, received = _update(agent, sockets)
            for stage, spent_s in zip(STAGES, stage_s, strict=True):
                seconds_by_stage[stage] += spent_s
            traffic = [traffic[0] + sent, traffic[1] + received]
            updates += 1
        elapsed_s = time.perf_counter() - start
    return {
        "actors": actor_num,
        "sample_steps_per_s": updates * batch / elapsed_s,
        "intake_limit_per_s": updates * batch / (sum(seconds_by_stage.values()) - seconds_by_stage["learn"]),
        "sent_mb_per_s": traffic[0] / elapsed_s / 1e6,
        "received_mb_per_s": traffic[1] / elapsed_s / 1e6,
        "stage_ms": {stage: 1e3 * spent_s / updates for stage, spent_s in seconds_by_stage.items()},
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
    }


def _record(config, agent) -> list[bytes]:
    """Trajectories of the real game, as an actor sends them."""
    from actor import Actor

    actor, weights = Actor(config, 0), agent.get_weights()
    trajectories = [actor.collect(weights, 0) for _ in range(RECORDED + 1)]
    actor.close()
    # The first begins with stacks that are still filling up.
    return [pickle.dumps(trajectory, pickle.HIGHEST_PROTOCOL) for trajectory in trajectories[1:]]


def _update(agent, sockets: list[zmq.Socket]) -> tuple[list[float], int, int]:
    """One update as `train.py` makes it; return the seconds of each stage, and the bytes sent and received."""
    from train import flatten

    clock = [time.perf_counter()]
    weights = pickle.dumps(agent.get_weights(), pickle.HIGHEST_PROTOCOL)
    clock.append(time.perf_counter())
    for socket in sockets:
        socket.send(weights, copy=False)
    messages = [socket.recv(copy=False) for socket in sockets]
    clock.append(time.perf_counter())
    trajectories = [pickle.loads(message.buffer) for message in messages]
    clock.append(time.perf_counter())
    batch = [flatten(trajectories, name) for name in ("obs", "actions", "advantages", "target_values")]
    clock.append(time.perf_counter())
    agent.learn(*batch, sample_steps=0)
    clock.append(time.perf_counter())
    received = sum(message.buffer.nbytes for message in messages)
    stage_s = [end - start for start, end in itertools.pairwise(clock)]
    return stage_s, len(weights) * len(sockets), received


@contextlib.contextmanager
def _stub_actors(recorded: list[bytes], actor_num: int) -> Iterator[list[zmq.Socket]]:
    """One connected request socket per stub actor."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder, zmq.Context() as context:
        context.set(zmq.MAX_SOCKETS, actor_num + 8)
        Path(folder, "recorded").write_bytes(pickle.dumps(recorded))
        command = [sys.executable, __file__, "stubs", json.dumps({"folder": folder, "actor_num": actor_num})]
        stubs = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            ports = json.loads(stubs.stdout.readline())
            sockets = [context.socket(zmq.REQ) for _ in ports]
            for socket, port in zip(sockets, ports, strict=True):
                socket.linger = 0
                socket.connect(f"tcp://127.0.0.1:{port}")
            yield sockets
            for socket in sockets:
                socket.close()
        finally:
            stubs.terminate()
            stubs.wait()
            stubs.stdout.close()


def stubs(folder: str, actor_num: int) -> None:
    """Answer every request at each of `actor_num` ports with a recorded trajectory, until the parent is gone."""
    recorded = pickle.loads(Path(folder, "recorded").read_bytes())
    context, poller = zmq.Context(), zmq.Poller()
    context.set(zmq.MAX_SOCKETS, actor_num + 8)
    answers, ports, parent = {}, [], os.getppid()
    for index in range(actor_num):
        socket = context.socket(zmq.REP)
        ports.append(socket.bind_to_random_port("tcp://127.0.0.1"))
        poller.register(socket, zmq.POLLIN)
        answers[socket] = recorded[index % len(recorded)]
    print(json.dumps(ports), flush=True)
    while os.getppid() == parent:
        for socket, _ in poller.poll(1000):
            socket.recv(copy=False)
            socket.send(answers[socket], copy=False)


def main() -> None:
    arguments = json.loads(sys.argv[2])
    if sys.argv[1] == "stubs":
        stubs(**arguments)
    else:
        print(json.dumps(learn(**arguments)))


if __name__ == "__main__":
    main()
