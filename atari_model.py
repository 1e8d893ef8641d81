"""The network: one convolutional trunk, a policy head and a value head (Mnih et al. 2015 and 2016)."""

import parl_compat  # noqa: F401  makes `import parl` work

import numpy as np
import paddle
import paddle.nn as nn
import paddle.nn.functional as F
import parl

from cpu_kernels import CpuTrunk

CONVOLUTIONS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # (channels, kernel, stride), Mnih et al. 2015
FEATURES = 512


def _orthogonal(gain: float) -> paddle.ParamAttr:
    return paddle.ParamAttr(initializer=nn.initializer.Orthogonal(gain=gain))


class AtariModel(parl.Model):
    """Policy and value of a stack of four grey frames, from one forward pass.

    Args:
        action_num: size of the action set, A.
        env_dim: side of the frames, pixels.
    """

    def __init__(self, action_num: int, env_dim: int = 84) -> None:
        super().__init__()
        channels, side = 4, env_dim
        convolutions = []
        # Orthogonal weights, gain sqrt(2) before a ReLU; a small policy head starts near uniform.
        for filters, kernel, stride in CONVOLUTIONS:
            convolutions.append(nn.Conv2D(channels, filters, kernel, stride, weight_attr=_orthogonal(2**0.5)))
            channels, side = filters, (side - kernel) // stride + 1
        self.convolutions = nn.LayerList(convolutions)
        self.fc = nn.Linear(channels * side * side, FEATURES, weight_attr=_orthogonal(2**0.5))
        self.policy_head = nn.Linear(FEATURES, action_num, weight_attr=_orthogonal(0.01))
        self.value_head = nn.Linear(FEATURES, 1, weight_attr=_orthogonal(1.0))
        # Saved and sent along with the parameters, but not learnt; see `normalize_observations`.
        self.register_buffer("obs_mean", paddle.zeros([env_dim, env_dim]))
        self.register_buffer("obs_std", paddle.full([1], 255.0))
        self.action_num, self.env_dim = action_num, env_dim
        self._trunk: CpuTrunk | None = None
        self._mixed_precision = False

    def use_cpu_kernels(self, precision: str, train_threads: int) -> None:
        """Run the trunk on `cpu_kernels.py` from now on; arguments and errors as those of `CpuTrunk`.

        Who changes the parameters other than by `set_weights` must call `refresh` then.
        """
        affine = [*self.convolutions, self.fc]
        parameters = [parameter for layer in affine for parameter in (layer.weight, layer.bias)]
        self._trunk = CpuTrunk(parameters, self.obs_mean, self.obs_std, precision, train_threads)
        self.refresh()

    def use_mixed_precision(self) -> None:
        """Let a GPU compute the trunk's products in bf16 from now on; weights and gradients stay float32."""
        self._mixed_precision = True

    def refresh(self) -> None:
        """Take over the parameters' values into what the CPU kernels work on."""
        if self._trunk:
            self._trunk.refresh()
            heads = self.policy_head, self.value_head
            self._heads_weight = np.concatenate([head.weight.numpy() for head in heads], axis=1)
            self._heads_bias = np.concatenate([head.bias.numpy() for head in heads])

    def normalize_observations(self, mean: np.ndarray, std: float) -> None:
        """From now on the network sees `(frame - mean) / std` instead of `frame / 255`.

        Most of a game's picture never changes. Centred, that part is 0, every filter sees what moves, and the
        policy leaves random play after a quarter of the sample steps (docs/tuning.md). Burda et al. 2018,
        arXiv:1810.12894, section 2.4, with one standard deviation for all pixels.

        Args:
            mean: [D, D], grey levels 0..255; rounded to whole ones.
            std: grey levels.
        """
        shape = list(self.obs_mean.shape)
        if list(mean.shape) != shape or not std > 0:
            raise ValueError(f"mean is {list(mean.shape)} and std {std}, not {shape} and above 0")
        self.obs_mean.set_value(np.rint(mean).astype(np.float32))
        self.obs_std.set_value(np.array([std], np.float32))
        self.refresh()

    def keep_forward(self, batch_obs: np.ndarray) -> None:
        """Let the next `forward` of `batch_obs`, uint8 [B, 4, D, D], use what `infer` computes of its parts."""
        if self._trunk:
            self._trunk.keep_for(batch_obs)

    @property
    def place(self) -> paddle.base.core.Place:
        """The device that holds the weights."""
        return self.fc.weight.place

    def as_input(self, obs: np.ndarray) -> np.ndarray | paddle.Tensor:
        """`obs` as `forward` wants them: uint8 [B, 4, D, D], on the device where the plain layers run."""
        # Frames travel as bytes and are scaled where the network runs: a quarter of the traffic.
        return obs if self._trunk else paddle.to_tensor(obs, place=self.place)

    def forward(self, obs: np.ndarray | paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return `logits` float32 [B, A] and `values` float32 [B] of `as_input(obs)`."""
        features = self._features(obs)
        return self.policy_head(features), self.value_head(features).squeeze(-1)

    def infer(self, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`forward` without gradients; NumPy in and out."""
        if self._trunk:
            # A Paddle call costs more than these two small products.
            outputs = self._trunk.infer(obs) @ self._heads_weight + self._heads_bias
            return outputs[:, :-1], outputs[:, -1]
        with paddle.no_grad():
            logits, values = self.forward(self.as_input(obs))
        return logits.numpy(), values.numpy()

    def set_weights(self, weights: dict[str, np.ndarray]) -> None:
        """Copy `weights` (float32 by name, as from `get_weights`) into parameters and buffers.

        Raises:
            ValueError: where a name or a shape does not fit this network.
        """
        parameters = self.state_dict()
        if parameters.keys() != weights.keys():
            raise ValueError(f"weights hold {sorted(weights)}, the network needs {sorted(parameters)}")
        for name, parameter in parameters.items():
            if list(weights[name].shape) != parameter.shape:
                raise ValueError(f"{name} is {list(weights[name].shape)}, the network needs {parameter.shape}")
            parameter.set_value(weights[name])
        self.refresh()

    def _features(self, obs: np.ndarray | paddle.Tensor) -> paddle.Tensor:
        if self._trunk:
            return self._trunk.features(obs)
        hidden = (obs.astype("float32") - self.obs_mean) / self.obs_std
        with paddle.amp.auto_cast(self._mixed_precision, dtype="bfloat16"):
            for convolution in self.convolutions:
                hidden = F.relu(convolution(hidden))
            features = F.relu(self.fc(hidden.flatten(1)))
        return features.astype("float32")
