"""Between NumPy and the algorithm: an agent that acts, judges observations, and learns from batches."""

import logging
import random

import cpu_threads
import parl_compat  # noqa: F401  makes `import parl` work

import numpy as np
import paddle
import parl

import cpu_kernels
from a2c import A2C
from a2c_config import A2CConfig, ConfigError
from atari_model import AtariModel

logger = logging.getLogger("a2c")


class AtariAgent(parl.Agent):
    """NumPy in and out around `A2C`."""

    def sample(self, obs: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw actions from the policy.

        Args:
            obs: uint8 [N, 4, D, D].
            rng: the source of chance; the same state and observations give the same actions.

        Returns:
            actions: int64 [N].
            values: float32 [N].
        """
        logits, values = self.alg.predict(obs)
        # Gumbel-max: argmax(logits + Gumbel noise) is a draw from softmax(logits).
        noise = rng.gumbel(size=logits.shape)
        return (logits + noise).argmax(axis=-1), values

    def predict(self, obs: np.ndarray) -> np.ndarray:
        """Return the likeliest actions, int64 [N], of `obs` uint8 [N, 4, D, D]."""
        logits, _ = self.alg.predict(obs)
        return logits.argmax(axis=-1)

    def value(self, obs: np.ndarray) -> np.ndarray:
        """Return V, float32 [N], of `obs` uint8 [N, 4, D, D]."""
        _, values = self.alg.predict(obs)
        return values

    def get_state(self) -> dict[str, np.ndarray]:
        """Weights ("model/...") and optimizer ("optimizer/...") as arrays, to go on from later."""
        parts = {"model": self.get_weights(), "optimizer": self.alg.get_state()}
        return {f"{part}/{name}": array for part, arrays in parts.items() for name, array in arrays.items()}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `get_state` returned; ValueError names what does not fit."""
        parts: dict[str, dict[str, np.ndarray]] = {"model": {}, "optimizer": {}}
        for name, array in state.items():
            part, _, rest = name.partition("/")
            if part not in parts:
                raise ValueError(f"the agent's state holds {name!r}; it must begin with model/ or optimizer/")
            parts[part][rest] = array
        self.set_weights(parts["model"])
        self.alg.set_state(parts["optimizer"])

    def keep_forward(self, batch_obs: np.ndarray) -> None:
        """Announce the observations of the next `learn`, uint8 [B, 4, D, D], before they are acted on.

        `sample` on slices of this array then does the forward pass of learning as well.
        """
        self.alg.model.keep_forward(batch_obs)

    def learn(
        self,
        obs: np.ndarray,
        actions: np.ndarray,
        advantages: np.ndarray,
        target_values: np.ndarray,
        sample_steps: int,
    ) -> dict[str, float]:
        """Update once from a batch of B sample steps; see `A2C.learn`.

        Args:
            obs: uint8 [B, 4, D, D].
            actions: int64 [B].
            advantages, target_values: float32 [B].
            sample_steps: sample steps so far, for the schedules.
        """
        config = self.alg.config
        if config.normalize_advantages:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        return self.alg.learn(obs, actions, advantages, target_values, sample_steps)


def create_agent(config: A2CConfig, action_num: int, device: str) -> AtariAgent:
    """Build network, algorithm and agent on `device` ("cpu", "gpu:0"), their weights drawn with `config.seed`."""
    paddle.set_device(device)
    seed_everything(config.seed)
    model = AtariModel(action_num, config.env_dim)
    if device == "cpu":
        _use_cpu_kernels(model, config.precision)
    elif config.precision == "bf16":
        model.use_mixed_precision()
    return AtariAgent(A2C(model, config, compiled=device != "cpu"))


def _use_cpu_kernels(model: AtariModel, precision: str) -> None:
    """Speed `model` up where this machine can; a line in the log says where it cannot, and what that costs."""
    chosen = cpu_kernels.best_precision() if precision == "auto" else precision
    reason = cpu_kernels.unavailable_reason(chosen)
    if reason and chosen == "bf16":
        logger.warning("precision: fp32 instead of bf16, since %s", reason)
        chosen, reason = "fp32", cpu_kernels.unavailable_reason("fp32")
    if reason:
        logger.warning("network: Paddle's own layers, about four times slower, since %s", reason)
        return
    model.use_cpu_kernels(chosen, cpu_threads.learner_threads())
    logger.info("network: oneDNN kernels, %s, %d threads to learn", chosen, cpu_threads.learner_threads())


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and Paddle; environments and actors have their own."""
    random.seed(seed)
    np.random.seed(seed)
    paddle.seed(seed)


def resolve_device(device: str) -> str:
    """Return the Paddle device for `--device`: "auto" is the first GPU where there is one, else the CPU.

    Raises:
        ConfigError: where a GPU is asked for that Paddle cannot use; the message says what is missing.
    """
    if device == "cpu":
        return "cpu"
    gpu_num = paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
    if device == "auto":
        return "gpu:0" if gpu_num else "cpu"
    if not paddle.is_compiled_with_cuda():
        raise ConfigError(
            f"device is {device!r}, but the installed Paddle {paddle.__version__} is the CPU build; install the "
            "GPU build with `bash scripts/setup.sh --gpu`, or use --device cpu"
        )
    index = int(device.partition(":")[2] or 0)
    if index >= gpu_num:
        raise ConfigError(
            f"device is {device!r}, but Paddle sees {gpu_num} GPUs; look at `nvidia-smi`, or use --device cpu"
        )
    return f"gpu:{index}"
