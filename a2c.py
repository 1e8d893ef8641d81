"""Advantage Actor-Critic (Mnih et al. 2016, arXiv:1602.01783): the loss, and one update of the weights."""

from typing import NamedTuple

import parl_compat  # noqa: F401  makes `import parl` work

import numpy as np
import paddle
import parl

from a2c_config import A2CConfig


class Losses(NamedTuple):
    """Means over the batch; each a float32 scalar tensor."""

    loss: paddle.Tensor
    policy_loss: paddle.Tensor
    value_loss: paddle.Tensor
    entropy: paddle.Tensor


def a2c_loss(
    logits: paddle.Tensor,
    values: paddle.Tensor,
    actions: paddle.Tensor,
    advantages: paddle.Tensor,
    target_values: paddle.Tensor,
    vf_loss_coeff: float,
    entropy_coeff: float,
) -> Losses:
    """The loss of a batch of B sample steps, whose gradient is the A2C update.

    Args:
        logits: float32 [B, A].
        values, advantages, target_values: float32 [B]; no gradient flows into the last two.
        actions: int64 [B].
        vf_loss_coeff, entropy_coeff: weights of the value loss and of the entropy bonus.

    Mnih et al. 2016, section 4 and its supplement; means, so that the step does not grow with B.
    """
    # Written out: paddle.distribution.Categorical normalises log_prob and entropy differently.
    all_log_probs = logits - paddle.logsumexp(logits, axis=-1, keepdim=True)
    log_probs = paddle.take_along_axis(all_log_probs, actions.unsqueeze(-1), axis=-1).squeeze(-1)
    entropy = -(all_log_probs.exp() * all_log_probs).sum(axis=-1).mean()
    policy_loss = -(advantages * log_probs).mean()
    value_loss = (values - target_values).square().mean()
    loss = policy_loss + vf_loss_coeff * value_loss - entropy_coeff * entropy
    return Losses(loss, policy_loss, value_loss, entropy)


@paddle.no_grad()
def clip_gradients(parameters: list[paddle.Tensor], max_grad_norm: float) -> float:
    """Scale all gradients so that their global norm is at most `max_grad_norm`; return the norm before.

    `max_grad_norm` 0 leaves them as they are. Pascanu et al. 2013, arXiv:1211.5063, algorithm 1.
    """
    gradients = [parameter.grad for parameter in parameters]
    # A dot product needs no second array of the gradients' size, as square().sum() would.
    squares = [paddle.dot(gradient.flatten(), gradient.flatten()) for gradient in gradients]
    grad_norm = paddle.add_n(squares).sqrt().item()
    if max_grad_norm and grad_norm > max_grad_norm:
        for gradient in gradients:
            gradient.scale_(max_grad_norm / grad_norm)
    return grad_norm


class A2C(parl.Algorithm):
    """One synchronous, on-policy gradient step per batch.

    Args:
        model: the network.
        config: the run's settings.
        compiled: learn with the network as one graph (`paddle.jit.to_static`), for a GPU, which waits for
            Python between small kernels; the CPU kernels cannot be traced.
    """

    def __init__(self, model: parl.Model, config: A2CConfig, compiled: bool = False) -> None:
        super().__init__(model)
        self.config = config
        self.optimizer = _make_optimizer(config, model.parameters())
        self._forward = paddle.jit.to_static(model.forward) if compiled else model.forward

    def predict(self, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return `logits` float32 [N, A] and `values` float32 [N] of `obs` uint8 [N, 4, D, D]."""
        return self.model.infer(obs)

    def learning_rate(self, sample_steps: int) -> float:
        """The rate after `sample_steps`: linear from `start_lr` to 0 at the end of the run."""
        return self.config.start_lr * self._share_left(sample_steps)

    def entropy_coeff(self, sample_steps: int) -> float:
        """The weight of the entropy bonus after `sample_steps`; constant without `entropy_decay`."""
        decay = self._share_left(sample_steps) if self.config.entropy_decay else 1.0
        return self.config.entropy_coeff * decay

    def _share_left(self, sample_steps: int) -> float:
        return max(0.0, 1.0 - sample_steps / self.config.max_sample_steps)

    def get_state(self) -> dict[str, np.ndarray]:
        """The optimizer's accumulators by parameter and slot, e.g. "fc.weight/moment1_0"."""
        # Paddle numbers its parameters per process; the names within the network are the same everywhere.
        names = {parameter.name: name for name, parameter in self.model.named_parameters()}
        state = {}
        for key, value in self.optimizer.state_dict().items():
            parameter = next((parameter for parameter in names if key.startswith(parameter + "_")), None)
            if parameter:
                state[f"{names[parameter]}/{key.removeprefix(parameter + '_')}"] = value.numpy()
        return state

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `get_state` returned; ValueError where a name does not fit this network."""
        parameters = {name: parameter.name for name, parameter in self.model.named_parameters()}
        unknown = [key for key in state if key.rpartition("/")[0] not in parameters]
        if unknown:
            raise ValueError(f"the optimizer's state holds {unknown[0]!r}, which this network does not have")
        self.optimizer.set_state_dict(
            {
                f"{parameters[key.rpartition('/')[0]]}_{key.rpartition('/')[2]}": paddle.to_tensor(value)
                for key, value in state.items()
            }
        )

    def learn(
        self,
        obs: np.ndarray,
        actions: np.ndarray,
        advantages: np.ndarray,
        target_values: np.ndarray,
        sample_steps: int,
    ) -> dict[str, float]:
        """Update the weights once; shapes and dtypes as in `a2c_loss`, `obs` uint8 [B, 4, D, D].

        Returns:
            policy_loss, value_loss, entropy, grad_norm (before clipping) and learning_rate.

        Raises:
            FloatingPointError: where the loss or a gradient is not finite; the weights are left as they were.
        """
        place = self.model.place
        losses = a2c_loss(
            *self._forward(self.model.as_input(obs)),
            *(paddle.to_tensor(array, place=place) for array in (actions, advantages, target_values)),
            self.config.vf_loss_coeff,
            self.entropy_coeff(sample_steps),
        )
        losses.loss.backward()
        grad_norm = clip_gradients(self.model.parameters(), self.config.max_grad_norm)
        if not np.isfinite(grad_norm):
            self.optimizer.clear_grad()
            raise FloatingPointError(
                f"the gradients' norm is {grad_norm} after {sample_steps} sample steps: training has "
                f"diverged; start again with a smaller --start_lr than {self.config.start_lr}"
            )
        learning_rate = self.learning_rate(sample_steps)
        self.optimizer.set_lr(learning_rate)
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.model.refresh()
        return {
            "policy_loss": losses.policy_loss.item(),
            "value_loss": losses.value_loss.item(),
            "entropy": losses.entropy.item(),
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
        }


def _make_optimizer(config: A2CConfig, parameters: list[paddle.Tensor]) -> paddle.optimizer.Optimizer:
    if config.optimizer == "rmsprop":
        # Paddle adds epsilon inside the root, as TensorFlow and the A3C paper do; PyTorch adds it outside.
        return paddle.optimizer.RMSProp(
            config.start_lr, rho=0.99, epsilon=config.optimizer_epsilon, parameters=parameters
        )
    return paddle.optimizer.Adam(
        config.start_lr, epsilon=config.optimizer_epsilon, parameters=parameters, use_multi_tensor=True
    )
