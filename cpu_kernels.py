"""The Nature CNN's trunk on a CPU: forward and backward on oneDNN primitives.

    trunk = CpuTrunk([conv1.weight, conv1.bias, ..., fc.weight, fc.bias])
    features = trunk.features(obs)      # a Paddle tensor; `loss.backward()` fills the parameters' `.grad`
    optimizer.step()
    trunk.refresh()                     # the primitives work on copies of the weights
    features = trunk.infer(obs)         # NumPy in, NumPy out, no gradients

The parameters stay ordinary Paddle tensors, so loss, optimizer and checkpoints know nothing of this file.
Plain Paddle computes convolutions one sample at a time; this is several times faster. What makes it so:

- conv1 (8x8, stride 4, 4 channels) is a 2x2 convolution with stride 1 over 64 channels, once each 4x4 block
  of pixels is seen as 16 channels ("space to depth"): the same sums, in a form that fills vector registers;
- the scale 1/255 of the pixels is folded into conv1's weights, so bytes are only converted, not divided;
- bias and ReLU are applied while a result is in a register, and activations stay in one layout throughout;
- conv1's input, the largest tensor, only ever exists for a slice of the batch that fits the cache.

`onednn.py` binds the library, `cpu_layers.py` makes the primitives of a layer.
"""

import functools
import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import paddle
from paddle.autograd import PyLayer, PyLayerContext

import cpu_layers
import onednn
from cpu_layers import FEATURES, InputSlice, Weights, WeightsGradient
from onednn import BF16, F32, Memory, Primitive

DATA_TYPES = {"fp32": F32, "bf16": BF16}
ITEM_BYTES = {F32: 4, BF16: 2}
MAX_PLANS = 4  # batch sizes remembered, for inference and for learning: each holds its activations
SLICE = 16  # samples per thread: their conv1 input, 0.1 MB each, stays in or near the second-level cache


@functools.cache
def unavailable_reason(precision: str) -> str | None:
    """Why `CpuTrunk` cannot serve `precision` ("fp32" or "bf16") here; None where it can."""
    if precision not in DATA_TYPES:
        raise ValueError(f"precision is {precision!r}; choose one of {', '.join(DATA_TYPES)}")
    try:
        onednn.library()
    except OSError as error:
        return f"Paddle's oneDNN cannot be used: {error}"
    if precision == "bf16" and not {"avx512_bf16", "amx_bf16"} & _cpu_flags():
        return "the CPU has neither AVX512-BF16 nor AMX, without which bf16 is slower than fp32"
    return None


def best_precision() -> str:
    """The faster of the precisions that this CPU computes in hardware."""
    return "fp32" if unavailable_reason("bf16") else "bf16"


def _cpu_flags() -> set[str]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


class CpuTrunk:
    """Features of observations, for acting and for learning; to be used by one Python thread.

    Args:
        parameters: weight and bias of conv1, conv2, conv3 and fc: float32 Paddle tensors on the CPU.
        env_dim: side of the frames in pixels, D, a multiple of 4.
        precision: "fp32", or "bf16" for weights' copies, activations and their gradients; the parameters
            and their gradients are float32 either way.
        train_threads: cores that `features` and its backward pass use; `infer` uses one.
    """

    def __init__(
        self,
        parameters: list[paddle.Tensor],
        env_dim: int = 84,
        precision: str = "fp32",
        train_threads: int = 1,
    ) -> None:
        reason = unavailable_reason(precision)
        if reason:
            raise RuntimeError(f"{reason}; use the plain layers instead")
        if env_dim % 4 or env_dim < 36:
            raise ValueError(f"env_dim is {env_dim}; the kernels need a multiple of 4, 36 or more")
        self.layers = cpu_layers.layers(env_dim)
        shapes = cpu_layers.parameter_shapes(self.layers)
        if [parameter.shape for parameter in parameters] != shapes:
            raise ValueError(f"parameters have {[p.shape for p in parameters]}, env_dim {env_dim} needs {shapes}")
        if not all(parameter.place.is_cpu_place() for parameter in parameters):
            raise ValueError("parameters are on another device; move them to the CPU, or use the plain layers")
        self.parameters, self.env_dim, self.train_threads = list(parameters), env_dim, train_threads
        self.data_type = DATA_TYPES[precision]
        pairs = zip(self.layers, parameters[::2], parameters[1::2], strict=True)
        self.weights = [Weights(layer, weight, bias, self.data_type) for layer, weight, bias in pairs]
        self.weights_version = 0
        self._inference_plans: OrderedDict[int, _Plan] = OrderedDict()
        self._training_plans: OrderedDict[int, _TrainingPlan] = OrderedDict()
        self.refresh()

    def refresh(self) -> None:
        """Take over the parameters' values; to be called after every change of them."""
        self.weights_version += 1
        for weights in self.weights:
            weights.refresh()

    def infer(self, obs: np.ndarray) -> np.ndarray:
        """Return the features, float32 [B, 512], of `obs` uint8 [B, 4, D, D]."""
        obs = self._checked(obs)
        with onednn.num_threads(1):
            plan = _recall(self._inference_plans, len(obs), lambda: _Plan(self, len(obs), SLICE))
            return plan.forward(obs)

    def features(self, obs: np.ndarray) -> paddle.Tensor:
        """`infer` as a Paddle tensor through which gradients reach the parameters.

        Its backward pass must run before the next `features` of the same batch size, and before `refresh`.
        """
        return _TrunkFunction.apply(self, self._checked(obs), *self.parameters)

    def training_plan(self, batch: int) -> "_TrainingPlan":
        """The primitives for `batch` samples, made for the number of threads that is set now."""
        return _recall(self._training_plans, batch, lambda: _TrainingPlan(self, batch))

    def _checked(self, obs: np.ndarray) -> np.ndarray:
        side = self.env_dim
        if obs.dtype != np.uint8 or obs.shape[1:] != (4, side, side) or not len(obs):
            raise ValueError(f"obs are {obs.dtype} {list(obs.shape)}, not uint8 [B, 4, {side}, {side}] with B > 0")
        return np.ascontiguousarray(obs)


def _recall(plans: OrderedDict, batch: int, make: Callable[[], "_Plan"]) -> "_Plan":
    """The plan for `batch`, new if need be; the one unused for longest makes room."""
    if batch not in plans:
        while len(plans) >= MAX_PLANS:
            plans.popitem(last=False)
        plans[batch] = make()
    plans.move_to_end(batch)
    return plans[batch]


class _Plan:
    """Everything allocated and compiled for one batch size."""

    def __init__(self, trunk: CpuTrunk, batch: int, slice_samples: int, training: bool = False) -> None:
        self.batch, layers = batch, trunk.layers
        self._shapes = cpu_layers.parameter_shapes(layers)
        self.activations = [
            Memory(cpu_layers.activation(batch, layer.result, data_type), data_type)
            for layer, data_type in zip(layers, [trunk.data_type] * 3 + [F32], strict=True)
        ]
        self._sample_bytes = math.prod(layers[0].result) * ITEM_BYTES[trunk.data_type]
        sizes = [slice_samples] * (batch // slice_samples)
        sizes += [batch % slice_samples] if batch % slice_samples else []
        slices = {size: InputSlice(layers[0], trunk.weights[0], size, training) for size in set(sizes)}
        self.slices = [(sum(sizes[:index]), slices[size]) for index, size in enumerate(sizes)]
        flat = cpu_layers.activation(batch, layers[3].source, trunk.data_type)
        # What layers 1, 2 and 3 read; fc does not read conv3's result, but a copy in Paddle's order.
        self.sources = [*self.activations[:2], Memory(flat, trunk.data_type)]
        self._forward = [
            cpu_layers.forward_primitive(
                layers[i], trunk.weights[i], self.sources[i - 1], self.activations[i], training
            )
            for i in (1, 2, 3)
        ]
        flatten = cpu_layers.flatten(batch, layers[2], self.activations[2], self.sources[2])
        self._forward.insert(2, flatten)

    def forward(self, obs: np.ndarray) -> np.ndarray:
        """Return the features, float32 [B, 512], of contiguous `obs` uint8 [B, 4, D, D]."""
        for start, input_slice in self.slices:
            result = self.activations[0].address + start * self._sample_bytes
            input_slice.forward(obs[start:].ctypes.data, result)
        for primitive in self._forward:
            primitive()
        return self.activations[3].array.reshape(self.batch, FEATURES).copy()


class _TrainingPlan(_Plan):
    """A plan that keeps the activations of one `forward` for the `backward` that follows it."""

    def __init__(self, trunk: CpuTrunk, batch: int) -> None:
        super().__init__(trunk, batch, SLICE * trunk.train_threads, training=True)
        self.generation = 0  # counts forward passes: a backward pass needs the activations of its own
        gradients = [Memory(activation.descriptor, trunk.data_type) for activation in self.activations[:3]]
        features_gradient = Memory(self.activations[3].descriptor, F32)
        self._incoming, self._first_gradient = features_gradient, gradients[0]
        self._start = [onednn.relu_backward(self.activations[3], features_gradient)]
        if trunk.data_type != F32:
            converted = Memory(cpu_layers.activation(batch, (FEATURES,), trunk.data_type), trunk.data_type)
            self._start.append(onednn.reorder(features_gradient, converted))
            features_gradient = converted
        gradients.append(features_gradient)
        self._steps = [self._backward_step(trunk, gradients, index) for index in (3, 2, 1)]

    def _backward_step(
        self, trunk: CpuTrunk, gradients: list[Memory], index: int
    ) -> tuple[int, WeightsGradient, list[Primitive]]:
        layer, weights = trunk.layers[index], trunk.weights[index]
        activation, activation_gradient = self.activations[index - 1], gradients[index - 1]
        source, source_gradient, unflatten = self.sources[index - 1], activation_gradient, []
        if source is not activation:
            source_gradient = Memory(source.descriptor, trunk.data_type)
            below = trunk.layers[index - 1]
            unflatten.append(cpu_layers.unflatten(self.batch, below, source_gradient, activation_gradient))
        weights_gradient = WeightsGradient(layer, source, gradients[index], trunk.data_type)
        data = cpu_layers.backward_data_primitive(layer, weights, source_gradient, gradients[index])
        relu = onednn.relu_backward(activation, activation_gradient)
        return index, weights_gradient, [data, *unflatten, relu]

    def forward(self, obs: np.ndarray) -> np.ndarray:
        self.generation += 1
        return super().forward(obs)

    def backward(self, obs: np.ndarray, features_gradient: np.ndarray) -> list[paddle.Tensor]:
        """Return the gradients of all parameters, from that of the features, float32 [B, 512]."""
        # New tensors each time: Paddle takes them over, and may free or change them.
        parameters_gradients = [paddle.empty(shape, "float32") for shape in self._shapes]
        self._incoming.array[:] = features_gradient.ravel()
        for primitive in self._start:
            primitive()
        for index, weights_gradient, data_primitives in self._steps:
            weight, bias = parameters_gradients[2 * index : 2 * index + 2]
            weights_gradient(weight.data_ptr(), bias.data_ptr())
            for primitive in data_primitives:
                primitive()
        parameters_gradients[:2] = self._first_layer_gradients(obs)
        return parameters_gradients

    def _first_layer_gradients(self, obs: np.ndarray) -> tuple[paddle.Tensor, paddle.Tensor]:
        weight, bias = np.zeros((32, 2, 2, 64), np.float32), np.zeros(32, np.float32)
        for start, input_slice in self.slices:
            gradient = self._first_gradient.address + start * self._sample_bytes
            slice_weight, slice_bias = input_slice.backward(obs[start:].ctypes.data, gradient)
            weight += slice_weight
            bias += slice_bias
        weight = cpu_layers.channels_to_blocks(weight) * cpu_layers.PIXEL_SCALE
        return paddle.to_tensor(weight), paddle.to_tensor(bias)


class _TrunkFunction(PyLayer):
    """Paddle's view of the trunk: a function of the parameters with a hand-written gradient."""

    @staticmethod
    def forward(
        ctx: PyLayerContext, trunk: CpuTrunk, obs: np.ndarray, *parameters: paddle.Tensor
    ) -> paddle.Tensor:
        with onednn.num_threads(trunk.train_threads):
            plan = trunk.training_plan(len(obs))
            features = plan.forward(obs)
        # `ctx` also keeps the observations alive, from which the backward pass starts again.
        ctx.trunk, ctx.plan, ctx.obs = trunk, plan, obs
        ctx.versions = plan.generation, trunk.weights_version
        return paddle.to_tensor(features, place=paddle.CPUPlace())

    @staticmethod
    def backward(ctx: PyLayerContext, features_gradient: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
        if ctx.versions != (ctx.plan.generation, ctx.trunk.weights_version):
            raise RuntimeError(
                f"the activations of this batch of {len(ctx.obs)} are gone: `features` of the same batch size, or "
                "`refresh`, ran between forward and backward; call `backward` first"
            )
        with onednn.num_threads(ctx.trunk.train_threads):
            return tuple(ctx.plan.backward(ctx.obs, np.ascontiguousarray(features_gradient.numpy())))
