"""The Nature CNN's trunk on a CPU: forward and backward on oneDNN primitives.

    trunk = CpuTrunk([conv1.weight, conv1.bias, ..., fc.weight, fc.bias], obs_mean, obs_std)
    features = trunk.features(obs)      # a Paddle tensor; `loss.backward()` fills the parameters' `.grad`
    optimizer.step()
    trunk.refresh()                     # the primitives work on copies of the weights
    features = trunk.infer(obs)         # NumPy in, NumPy out, no gradients

    trunk.keep_for(batch_obs)           # from here on `infer` keeps what it computes of parts of batch_obs,
    features = trunk.features(batch_obs)  # and once all of it is known, this has nothing left to compute

The parameters stay ordinary Paddle tensors, so loss, optimizer and checkpoints know nothing of this file.
Plain Paddle computes convolutions one sample at a time; this is several times faster. What makes it so:

- conv1 (8x8, stride 4, 4 channels) is a 2x2 convolution with stride 1 over 64 channels, once each 4x4 block
  of pixels is seen as 16 channels ("space to depth"): the same sums, in a form that fills vector registers;
- the pixels' scale is folded into conv1's weights, so bytes are only converted and centred, not divided;
- bias and ReLU are applied while a result is in a register, and activations stay in one layout throughout;
- conv1's input, the largest tensor, only ever exists for a slice of the batch that fits the cache;
- A2C learns with the very weights that it acted with, so the activations of acting serve to learn from.

`onednn.py` binds the library, `cpu_layers.py` makes the primitives of a layer.
"""

import functools
import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle.autograd import PyLayer, PyLayerContext

import cpu_layers
import onednn
from cpu_layers import FEATURES, InputSlice, Normalization, Weights, WeightsGradient
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
        obs_mean: float32 [D, D], whole grey levels, subtracted from every frame; D is a multiple of 4.
        obs_std: float32 [1], grey levels; frames are divided by it.
        precision: "fp32", or "bf16" for weights' copies, activations and their gradients; the parameters
            and their gradients are float32 either way.
        train_threads: cores that `features` and its backward pass use; `infer` uses one.
    """

    def __init__(
        self,
        parameters: list[paddle.Tensor],
        obs_mean: paddle.Tensor,
        obs_std: paddle.Tensor,
        precision: str = "fp32",
        train_threads: int = 1,
    ) -> None:
        reason = unavailable_reason(precision)
        if reason:
            raise RuntimeError(f"{reason}; use the plain layers instead")
        env_dim = obs_mean.shape[0]
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
        self.normalization = Normalization(obs_mean, obs_std, self.data_type)
        self.weights = [
            Weights(layer, weight, bias, self.data_type, None if index else self.normalization)
            for index, (layer, weight, bias) in enumerate(
                zip(self.layers, parameters[::2], parameters[1::2], strict=True)
            )
        ]
        self.weights_version = 0
        self._inference_plans: OrderedDict[int, tuple[_Forward, _Activations]] = OrderedDict()
        self._training_plans: OrderedDict[int, _TrainingPlan] = OrderedDict()
        self._kept: _KeptForward | None = None
        self.refresh()

    def refresh(self) -> None:
        """Take over the values of parameters, mean and standard deviation; to be called after every change."""
        self.weights_version += 1
        self.normalization.refresh()
        for weights in self.weights:
            weights.refresh()

    def infer(self, obs: np.ndarray) -> np.ndarray:
        """Return the features, float32 [B, 512], of `obs` uint8 [B, 4, D, D]."""
        obs = self._checked(obs)
        with onednn.num_threads(1):
            forward, own = _recall(self._inference_plans, len(obs), lambda: self._inference_plan(len(obs)))
            if self._kept and self._kept.covers(obs, self.weights_version):
                return forward(obs, *self._kept.place(obs))
            return forward(obs, own)

    def keep_for(self, batch_obs: np.ndarray) -> None:
        """Let `infer` on parts of `batch_obs`, uint8 [B, 4, D, D], keep what the next `features` needs.

        It holds until `refresh`. `batch_obs` may still be unwritten; a part must not change once inferred.
        """
        with onednn.num_threads(self.train_threads):
            self._kept = _KeptForward(self.training_plan(len(batch_obs)), batch_obs, self.weights_version)

    def _inference_plan(self, batch: int) -> "tuple[_Forward, _Activations]":
        return _Forward(self, batch, _slices(self, batch, SLICE)), _Activations(self, batch)

    def features(self, obs: np.ndarray) -> paddle.Tensor:
        """`infer` as a Paddle tensor through which gradients reach the parameters.

        Its backward pass must run before the next `features` of the same batch size, and before `refresh`.
        """
        return _TrunkFunction.apply(self, self._checked(obs), *self.parameters)

    def training_plan(self, batch: int) -> "_TrainingPlan":
        """The primitives for `batch` samples, made for the number of threads that is set now."""
        return _recall(self._training_plans, batch, lambda: _TrainingPlan(self, batch))

    def forward(self, obs: np.ndarray) -> "tuple[_TrainingPlan, np.ndarray]":
        """The forward pass before a backward pass: what holds its activations, and the features."""
        kept = self._kept
        if kept and kept.is_complete(obs, self.weights_version):
            kept.plan.generation += 1
            return kept.plan, kept.plan.activations.features(0, len(obs))
        with onednn.num_threads(self.train_threads):
            plan = self.training_plan(len(obs))
            if kept and kept.plan is plan:
                self._kept = None  # its activations are overwritten
            return plan, plan.forward(obs)

    def _checked(self, obs: np.ndarray) -> np.ndarray:
        side = self.env_dim
        if obs.dtype != np.uint8 or obs.shape[1:] != (4, side, side) or not len(obs):
            raise ValueError(f"obs are {obs.dtype} {list(obs.shape)}, not uint8 [B, 4, {side}, {side}] with B > 0")
        return np.ascontiguousarray(obs)


def _recall(plans: OrderedDict, batch: int, make: Callable[[], Any]) -> Any:
    """The plan for `batch`, new if need be; the one unused for longest makes room."""
    if batch not in plans:
        while len(plans) >= MAX_PLANS:
            plans.popitem(last=False)
        plans[batch] = make()
    plans.move_to_end(batch)
    return plans[batch]


class _Activations:
    """Room for the results of every layer on `batch` samples."""

    def __init__(self, trunk: CpuTrunk, batch: int) -> None:
        data_type, layers = trunk.data_type, trunk.layers
        types = [data_type] * 3 + [F32]
        self.results = [
            Memory(cpu_layers.activation(batch, layer.result, result_type), result_type)
            for layer, result_type in zip(layers, types, strict=True)
        ]
        # What fc reads: conv3's results in the order of Paddle's `flatten`.
        self.flat = Memory(cpu_layers.activation(batch, layers[3].source, data_type), data_type)
        self.sample_bytes = [
            math.prod(layer.result) * ITEM_BYTES[t] for layer, t in zip(layers, types, strict=True)
        ]

    def features(self, start: int, stop: int) -> np.ndarray:
        """A copy of the features, float32 [stop - start, 512], of samples `start` to `stop`."""
        return self.results[3].array.reshape(-1, FEATURES)[start:stop].copy()


class _Forward:
    """The forward pass of `batch` samples, to any place in an `_Activations`."""

    def __init__(self, trunk: CpuTrunk, batch: int, slices: "_Slices") -> None:
        self.batch, layers, data_type = batch, trunk.layers, trunk.data_type
        self._slices = slices
        self._results = [
            Memory(cpu_layers.activation(batch, layer.result, result_type))
            for layer, result_type in zip(layers, [data_type] * 3 + [F32], strict=True)
        ]
        flat = Memory(cpu_layers.activation(batch, layers[3].source, data_type))
        flatten, flat_as_image = cpu_layers.flatten(batch, layers[2], self._results[2], data_type)
        self._flats = flat, flat_as_image
        sources = [None, *self._results[:2], flat]
        self._primitives = [
            cpu_layers.forward_primitive(layers[i], trunk.weights[i], sources[i], self._results[i])
            for i in (1, 2, 3)
        ]
        self._primitives.insert(2, flatten)

    def __call__(self, obs: np.ndarray, activations: _Activations, start: int = 0) -> np.ndarray:
        """Compute contiguous `obs` uint8 [B, 4, D, D] into samples `start`... of `activations`.

        Returns:
            Their features, float32 [B, 512].
        """
        addresses = [
            memory.address + start * sample_bytes
            for memory, sample_bytes in zip(activations.results, activations.sample_bytes, strict=True)
        ]
        for memory, address in zip(self._results, addresses, strict=True):
            memory.point_to(address)
        for memory in self._flats:
            memory.point_to(activations.flat.address + start * activations.sample_bytes[2])
        for first, input_slice in self._slices:
            result = addresses[0] + first * activations.sample_bytes[0]
            input_slice.forward(obs[first:].ctypes.data, result)
        for primitive in self._primitives:
            primitive()
        return activations.features(start, start + self.batch)


_Slices = list[tuple[int, InputSlice]]


def _slices(trunk: CpuTrunk, batch: int, samples: int, training: bool = False) -> _Slices:
    """What computes conv1 of samples 0, `samples`, 2 * `samples`, ...; those of one size are shared."""
    sizes = {start: min(samples, batch - start) for start in range(0, batch, samples)}
    first = trunk.layers[0], trunk.weights[0], trunk.normalization
    made = {size: InputSlice(*first, size, training) for size in set(sizes.values())}
    return [(start, made[size]) for start, size in sizes.items()]


class _KeptForward:
    """Which samples of a batch have been through the forward pass already, with which weights."""

    def __init__(self, plan: "_TrainingPlan", batch_obs: np.ndarray, weights_version: int) -> None:
        self.plan, self.weights_version = plan, weights_version
        self._obs = batch_obs  # referenced, so that no other array can come to lie at its address
        self._sample_bytes = batch_obs[0].nbytes
        self._known = np.zeros(len(batch_obs), bool)

    def covers(self, obs: np.ndarray, weights_version: int) -> bool:
        """Whether `obs` are samples of this batch, and the weights are still those of its other samples."""
        offset = obs.ctypes.data - self._obs.ctypes.data
        inside = offset >= 0 and offset + obs.nbytes <= self._obs.nbytes and not offset % self._sample_bytes
        return inside and weights_version == self.weights_version

    def place(self, obs: np.ndarray) -> tuple[_Activations, int]:
        """Where the activations of `obs` belong; they count as known from now on."""
        start = (obs.ctypes.data - self._obs.ctypes.data) // self._sample_bytes
        self._known[start : start + len(obs)] = True
        return self.plan.activations, start

    def is_complete(self, obs: np.ndarray, weights_version: int) -> bool:
        """Whether the forward pass of `obs` as a whole has nothing left to compute."""
        return len(obs) == len(self._known) and self.covers(obs, weights_version) and bool(self._known.all())


class _TrainingPlan:
    """Everything allocated and compiled to learn from batches of one size."""

    def __init__(self, trunk: CpuTrunk, batch: int) -> None:
        self.batch, layers, self._normalization = batch, trunk.layers, trunk.normalization
        self.generation = 0  # counts forward passes: a backward pass needs the activations of its own
        self.activations = _Activations(trunk, batch)
        self._shapes = cpu_layers.parameter_shapes(layers)
        self._slices = _slices(trunk, batch, SLICE * trunk.train_threads, training=True)
        self._forward = _Forward(trunk, batch, self._slices)
        results = self.activations.results
        gradients = [Memory(result.descriptor, trunk.data_type) for result in results[:3]]
        features_gradient = Memory(results[3].descriptor, F32)
        self._incoming, self._first_gradient = features_gradient, gradients[0]
        self._start = [onednn.relu_backward(results[3], features_gradient)]
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
        activation, activation_gradient = self.activations.results[index - 1], gradients[index - 1]
        source, source_gradient, unflatten = activation, activation_gradient, []
        if index == 3:
            source = self.activations.flat
            source_gradient = Memory(source.descriptor, trunk.data_type)
            unflatten.append(
                cpu_layers.unflatten(self.batch, trunk.layers[2], source_gradient, activation_gradient)
            )
        weights_gradient = WeightsGradient(layer, source, gradients[index], trunk.data_type)
        data = cpu_layers.backward_data_primitive(layer, weights, source_gradient, gradients[index])
        relu = onednn.relu_backward(activation, activation_gradient)
        return index, weights_gradient, [data, *unflatten, relu]

    def forward(self, obs: np.ndarray) -> np.ndarray:
        """Return the features, float32 [B, 512], of contiguous `obs` uint8 [B, 4, D, D]."""
        self.generation += 1
        return self._forward(obs, self.activations)

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
        for start, input_slice in self._slices:
            gradient = self._first_gradient.address + start * self.activations.sample_bytes[0]
            slice_weight, slice_bias = input_slice.backward(obs[start:].ctypes.data, gradient)
            weight += slice_weight
            bias += slice_bias
        weight = cpu_layers.channels_to_blocks(weight) * self._normalization.scale
        return paddle.to_tensor(weight), paddle.to_tensor(bias)


class _TrunkFunction(PyLayer):
    """Paddle's view of the trunk: a function of the parameters with a hand-written gradient."""

    @staticmethod
    def forward(
        ctx: PyLayerContext, trunk: CpuTrunk, obs: np.ndarray, *parameters: paddle.Tensor
    ) -> paddle.Tensor:
        plan, features = trunk.forward(obs)
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
