"""Measures Stable-Baselines3 and PyTorch for `benchmark.py --peer_python`: one of them, one setting, one process.

    PEER_PYTHON scripts/benchmark_peers.py describe
    PEER_PYTHON scripts/benchmark_peers.py stable_baselines3 '{"env_name": "PongNoFrameskip-v4", ...}'

Runs in a Python that need not have Paddle. The peers keep their own defaults, also of threads, unless told.
"""

import contextlib
import functools
import importlib.util
import json
import platform
import sys
import time
from collections.abc import Callable
from importlib import metadata

from benchmark_rows import (
    INFERENCE,
    LEARNING,
    OBSERVATIONS,
    SAMPLE_STEPS,
    SAMPLES,
    Row,
    network_row,
    print_rows,
    seconds_per_call,
    trainer_row,
)

PEERS = {
    "torch": ("torch",),
    "stable_baselines3": ("stable_baselines3", "torch", "gymnasium", "ale_py", "cv2"),
}
ACTION_NUM = 6  # Pong's


def describe() -> dict:
    """Versions, and the packages that each peer lacks."""
    missing = {
        peer: [module for module in modules if importlib.util.find_spec(module) is None]
        for peer, modules in PEERS.items()
    }
    versions = {"python": platform.python_version()}
    for package in ("torch", "stable-baselines3", "gymnasium", "ale-py"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {"missing": missing, "packages": versions}


def stable_baselines3(
    env_name: str, env_dim: int, env_num: int, steps: int, vec_env: str, seconds: float
) -> list[Row]:
    """A2C as its users run it, whole updates only, from the fourth on. `vec_env`: Dummy or Subproc."""
    from stable_baselines3 import A2C
    from stable_baselines3.common import vec_env as vec_envs
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env

    class Clock(BaseCallback):
        start_s, start_steps, rate, updates = 0.0, 0, 0.0, -1

        def _on_rollout_start(self) -> None:
            self.updates += 1
            now = time.perf_counter()
            if self.updates == 3:
                self.start_s, self.start_steps = now, self.num_timesteps
            elif self.updates > 3 and now - self.start_s >= seconds:
                self.rate = (self.num_timesteps - self.start_steps) / (now - self.start_s)

        def _on_step(self) -> bool:
            return not self.rate

    env = make_atari_env(
        f"ale_py:{env_name}",  # the worker processes of Subproc must import ale_py, too
        n_envs=env_num,
        seed=0,
        wrapper_kwargs={"terminal_on_life_loss": False, "screen_size": env_dim},
        vec_env_cls=getattr(vec_envs, f"{vec_env}VecEnv"),
    )
    env = vec_envs.VecFrameStack(env, n_stack=4)
    clock = Clock()
    A2C("CnnPolicy", env, n_steps=steps, seed=0, device="cpu").learn(2**31 - 1, callback=clock)
    env.close()
    return [Row(trainer_row("local", env_num, steps), SAMPLE_STEPS, clock.rate, f"Stable-Baselines3, {vec_env}")]


def torch(
    what: str,
    env_dim: int,
    batches: list[int],
    precisions: list[str],
    threads: int,
    cores: list[int],
    seconds: float,
) -> list[Row]:
    """The Nature CNN in both memory layouts: forward; or forward, backward, clipping and Adam (fused).

    A result counts for each number of `cores`: one thread is what PyTorch may choose on two, too.
    """
    from torch import channels_last, contiguous_format, set_num_threads

    set_num_threads(threads)
    make, unit = {INFERENCE: (_torch_inference, OBSERVATIONS), LEARNING: (_torch_update, SAMPLES)}[what]
    rows = []
    for precision in precisions:
        for layout in (contiguous_format, channels_last):
            who = f"PyTorch, {str(layout).removeprefix('torch.')}, {threads} thread{'s' if threads > 1 else ''}"
            for batch in batches:
                rate = batch / seconds_per_call(make(env_dim, batch, precision, layout), seconds)
                rows += [Row(network_row(what, batch, precision, count), unit, rate, who) for count in cores]
    return rows


def _torch_model(env_dim: int, layout):
    from torch import nn

    side = ((env_dim // 4 - 1) - 4) // 2 - 1
    trunk = [nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1)]
    trunk += [nn.ReLU(), nn.Flatten(), nn.Linear(64 * side * side, 512), nn.ReLU(), nn.Linear(512, ACTION_NUM + 1)]
    return nn.Sequential(*trunk).to(memory_format=layout)


def _torch_inference(env_dim: int, batch: int, precision: str, layout) -> Callable[[], object]:
    """Bytes to logits and values in NumPy, at the precision's fastest: bf16 weights, no casting per call."""
    import torch

    data_type = torch.bfloat16 if precision == "bf16" else torch.float32
    model = _torch_model(env_dim, layout).to(data_type)
    obs = torch.randint(256, (batch, 4, env_dim, env_dim), dtype=torch.uint8)

    @torch.inference_mode()
    def infer():
        frames = obs.to(dtype=data_type, memory_format=layout) / 255
        return model(frames).float().numpy()

    return infer


def _torch_update(env_dim: int, batch: int, precision: str, layout) -> Callable[[], object]:
    """Bytes to new float32 weights, in bf16 by autocast."""
    import torch
    from torch import nn

    model = _torch_model(env_dim, layout)
    optimizer = torch.optim.Adam(model.parameters(), 7e-4, eps=1e-5, fused=True)
    obs = torch.randint(256, (batch, 4, env_dim, env_dim), dtype=torch.uint8)
    actions = torch.randint(ACTION_NUM, (batch, 1))
    advantages, target_values = torch.randn(2, batch)
    casting = functools.partial(torch.autocast, "cpu", torch.bfloat16, enabled=precision == "bf16")

    def update():
        with casting():
            outputs = model(obs.to(dtype=torch.float32, memory_format=layout) / 255).float()
        log_probs = outputs[:, :-1].log_softmax(-1)
        policy_loss = -(advantages * log_probs.gather(1, actions).squeeze(1)).mean()
        value_loss = (outputs[:, -1] - target_values).square().mean()
        entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
        optimizer.zero_grad(set_to_none=True)
        (policy_loss + 0.5 * value_loss - 0.01 * entropy).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    return update


def main() -> None:
    name = sys.argv[1]
    if name == "describe":
        print(json.dumps(describe()))
    else:
        measure = {"stable_baselines3": stable_baselines3, "torch": torch}[name]
        print_rows(measure(**json.loads(sys.argv[2])))


if __name__ == "__main__":
    main()
