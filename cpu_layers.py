"""The layers of the Nature CNN's trunk as oneDNN primitives: geometry, weights, and the gradients of one layer.

`cpu_kernels.py` puts them together. Weights and gradients are float32 in Paddle's layouts at this file's
border; inside, each primitive has them in the layout and type that it is fastest with.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import paddle

import onednn
from onednn import F32, S32, U8, Affine, Descriptor, Memory, Operation, Primitive

FEATURES = 512


class Layer(NamedTuple):
    """One layer as oneDNN sees it; shapes without the batch, sides in (channels, height, width)."""

    source: tuple[int, ...]
    weights: tuple[int, ...]
    weights_strides: tuple[int, ...]  # of `weights` in the Paddle parameter
    result: tuple[int, ...]
    stride: int | None  # None: fully connected


def layers(env_dim: int) -> list[Layer]:
    """conv1 (on blocks of pixels), conv2, conv3 and fc for frames of `env_dim` pixels a side."""
    blocks = env_dim // 4  # 4x4 blocks of pixels along a side
    side1 = blocks - 1
    side2 = (side1 - 4) // 2 + 1
    side3 = side2 - 2
    inputs = 64 * side3 * side3
    return [
        Layer((64, blocks, blocks), (32, 64, 2, 2), (256, 1, 128, 64), (32, side1, side1), 1),
        Layer((32, side1, side1), (64, 32, 4, 4), (512, 16, 4, 1), (64, side2, side2), 2),
        Layer((64, side2, side2), (64, 64, 3, 3), (576, 9, 3, 1), (64, side3, side3), 1),
        # Paddle keeps this weight as [inputs, outputs], the inputs in (channel, height, width) order.
        Layer((inputs,), (FEATURES, inputs), (1, FEATURES), (FEATURES,), None),
    ]


def parameter_shapes(layers: list[Layer]) -> list[list[int]]:
    """The shapes of the Paddle parameters: weight and bias of each layer."""
    weights = [[32, 4, 8, 8], *(list(layer.weights) for layer in layers[1:3]), [*layers[3].source, FEATURES]]
    return [shape for weight, layer in zip(weights, layers, strict=True) for shape in (weight, [layer.weights[0]])]


def blocks_to_channels(weights: np.ndarray) -> np.ndarray:
    """conv1's weights [32, 4, 8, 8] as those of the 2x2 convolution, channels last: [32, 2, 2, 64]."""
    return weights.reshape(32, 4, 2, 4, 2, 4).transpose(0, 2, 4, 1, 3, 5).reshape(32, 2, 2, 64)


def channels_to_blocks(weights: np.ndarray) -> np.ndarray:
    """The inverse of `blocks_to_channels`."""
    return weights.reshape(32, 2, 2, 4, 4, 4).transpose(0, 3, 1, 4, 2, 5).reshape(32, 4, 8, 8)


def activation(batch: int, shape: Sequence[int], data_type: int) -> Descriptor:
    """The layout of all activations and their gradients, `shape` being that of one sample."""
    # Where primitives differ in layout, oneDNN converts, or falls back to reference code 1000 times slower.
    # Blocks of 8 channels, what oneDNN likes best on AVX2, gained 2% there when learning, lost when inferring.
    describe = Descriptor.channels_last if len(shape) == 3 else Descriptor.dense
    return describe((batch, *shape), data_type)


def _flat_as_image(batch: int, layer: Layer, data_type: int) -> Memory:
    return Memory(Descriptor.dense((batch, *layer.result), data_type))


def flatten(batch: int, layer: Layer, activations: Memory, data_type: int) -> tuple[Primitive, Memory]:
    """Copy the results of `layer`, a convolution, to [B, inputs] in the order of Paddle's `flatten`.

    Returns:
        The primitive, and the memory it writes, which is to be pointed to the flat result.
    """
    flat = _flat_as_image(batch, layer, data_type)
    return onednn.reorder(activations, flat), flat


def unflatten(batch: int, layer: Layer, flat: Memory, activations: Memory) -> Primitive:
    """The inverse of `flatten`."""
    view = _flat_as_image(batch, layer, flat.data_type)
    view.point_to(flat.address)
    return onednn.reorder(view, activations)


def _weights_layout(layer: Layer, data_type: int) -> Descriptor:
    """What a primitive of `layer` shall have its weights, or their gradient, in."""
    if layer.stride is None and data_type == F32:
        # A plain matrix product is as fast on Paddle's own layout, and 6.4 MB need no copy to another and back.
        return Descriptor.strided(layer.weights, F32, layer.weights_strides)
    return Descriptor.any_layout(layer.weights, data_type)


class Normalization:
    """Mean and standard deviation of the pixels, as the kernels need them."""

    def __init__(self, mean: paddle.Tensor, std: paddle.Tensor, data_type: int) -> None:
        """`mean`: float32 [D, D], whole numbers; `std`: float32 [1]; both in grey levels."""
        self._mean, self._std = mean, std
        side = mean.shape[0] // 4
        self._plain = Memory(activation(1, (64, side, side), F32), F32)
        self.mean = Memory(activation(1, (64, side, side), data_type), data_type)  # [1, 64, D/4, D/4]
        self._convert = onednn.reorder(self._plain, self.mean)
        self.refresh()

    def refresh(self) -> None:
        """Take over the values of the Paddle tensors."""
        self.scale = np.float32(1 / self._std.item())  # folded into conv1's weights, not applied to pixels
        side = self._mean.shape[0] // 4
        blocks = self._mean.numpy().reshape(side, 4, side, 4).transpose(0, 2, 1, 3).reshape(side, side, 16)
        self._plain.array.reshape(side, side, 4, 16)[:] = blocks[:, :, None]  # the same for all four frames
        with onednn.num_threads(1):
            self._convert()


class Weights:
    """A layer's parameters, and copies of them in the layouts that primitives want.

    Outside `refresh` nothing reads the Paddle tensors' memory, which Paddle may move or free.
    """

    def __init__(
        self,
        layer: Layer,
        weight: paddle.Tensor,
        bias: paddle.Tensor,
        data_type: int,
        normalization: Normalization | None = None,
    ) -> None:
        """`normalization`: of the input, for conv1."""
        self.bias = Memory(Descriptor.dense((layer.weights[0],), F32), F32)
        self._weight, self._bias, self.data_type = weight, bias, data_type
        self._normalization = normalization
        layout = Descriptor.strided(layer.weights, F32, layer.weights_strides)
        self._parameter = Memory(layout, F32 if normalization else None)
        self._copies: list[tuple[Memory, Primitive]] = []  # a few: kernels choose among few layouts

    def in_layout(self, layout: Descriptor) -> Memory:
        """A copy of the weights in `layout`, which `refresh` keeps up to date."""
        for memory, _ in self._copies:
            if memory.descriptor == layout:
                return memory
        memory = Memory(layout, self.data_type)
        with onednn.num_threads(1):
            self._copies.append((memory, onednn.reorder(self._parameter, memory)))
        self.refresh()
        return memory

    def refresh(self) -> None:
        """Take over the values of the Paddle parameters."""
        self.bias.array[:] = self._bias.numpy()
        if self._normalization:
            weights = blocks_to_channels(self._weight.numpy()).ravel()
            self._parameter.array[:] = weights * self._normalization.scale
        else:
            self._parameter.point_to(self._weight.data_ptr())
        with onednn.num_threads(1):
            for _, copy in self._copies:
                copy()


def forward_primitive(layer: Layer, weights: Weights, source: Memory, result: Memory) -> Primitive:
    """`result = relu(layer(source))`."""
    operation = Affine(layer.stride).forward(
        source.descriptor,
        _weights_layout(layer, weights.data_type),
        weights.bias.descriptor,
        result.descriptor,
        onednn.FORWARD_INFERENCE,
    )
    tensors = {onednn.SOURCE: source, onednn.RESULT: result, onednn.BIAS: weights.bias}
    tensors[onednn.WEIGHTS] = weights.in_layout(operation.layout(onednn.WEIGHTS))
    return Primitive(operation, tensors)


def _backward_hint(layer: Layer, source: Memory, result_gradient: Memory, data_type: int) -> Operation:
    """What both backward operations want to know of the forward one."""
    weights = _weights_layout(layer, data_type)
    bias = Descriptor.dense(layer.weights[:1], F32)
    tensors = source.descriptor, weights, bias, result_gradient.descriptor
    return Affine(layer.stride).forward(*tensors, relu=False)


def backward_data_primitive(
    layer: Layer, weights: Weights, source_gradient: Memory, result_gradient: Memory
) -> Primitive:
    """`source_gradient` from `result_gradient`, the latter before the layer's ReLU."""
    operation = Affine(layer.stride).backward_data(
        source_gradient.descriptor,
        _weights_layout(layer, weights.data_type),
        result_gradient.descriptor,
        _backward_hint(layer, source_gradient, result_gradient, weights.data_type),
    )
    tensors = {onednn.SOURCE_GRADIENT: source_gradient, onednn.RESULT_GRADIENT: result_gradient}
    tensors[onednn.WEIGHTS] = weights.in_layout(operation.layout(onednn.WEIGHTS))
    return Primitive(operation, tensors)


class WeightsGradient:
    """The gradients of one layer's parameters, written to addresses given at each call."""

    def __init__(self, layer: Layer, source: Memory, result_gradient: Memory, data_type: int) -> None:
        self._bias = Memory(Descriptor.dense(layer.weights[:1], F32))
        self._weights = Memory(Descriptor.strided(layer.weights, F32, layer.weights_strides))
        self.operation = Affine(layer.stride).backward_weights(
            source.descriptor,
            # Sums over the batch, so float32 with bf16 too.
            _weights_layout(layer, F32) if data_type == F32 else Descriptor.any_layout(layer.weights, F32),
            self._bias.descriptor,
            result_gradient.descriptor,
            _backward_hint(layer, source, result_gradient, data_type),
        )
        layout = self.operation.layout(onednn.WEIGHTS_GRADIENT)
        direct = layout == self._weights.descriptor
        chosen = self._weights if direct else Memory(layout, F32)
        tensors = {onednn.SOURCE: source, onednn.RESULT_GRADIENT: result_gradient}
        tensors |= {onednn.WEIGHTS_GRADIENT: chosen, onednn.BIAS_GRADIENT: self._bias}
        self._compute = Primitive(self.operation, tensors)
        self._copies = [] if direct else [onednn.reorder(chosen, self._weights)]

    def __call__(self, weights_address: int, bias_address: int) -> None:
        """Write float32 gradients, the weights' with the layer's `weights_strides`."""
        self._bias.point_to(bias_address)
        self._weights.point_to(weights_address)
        for primitive in (self._compute, *self._copies):
            primitive()


class InputSlice:
    """conv1, from bytes to activations and from their gradients to its own, on `samples` samples of a batch."""

    def __init__(
        self, layer: Layer, weights: Weights, normalization: Normalization, samples: int, training: bool
    ) -> None:
        side = layer.source[1]
        # A row of 4 pixels in a block is one 32-bit word: words are moved first, then bytes converted.
        shape = samples, 4, side, 4, side  # frame, row of blocks, row in the block, column of blocks
        self._obs = Memory(Descriptor.dense(shape, S32))
        self._words = Memory(Descriptor.strided(shape, S32, (side * side * 16, 4, side * 16, 1, 16)), S32)
        pixels = Memory(activation(samples, layer.source, U8))
        pixels.point_to(self._words.address)
        source = Memory(activation(samples, layer.source, weights.data_type), weights.data_type)
        self._load = (
            onednn.reorder(self._obs, self._words),
            onednn.reorder(pixels, source),
            onednn.subtract(source, normalization.mean),
        )
        self._result = Memory(activation(samples, layer.result, weights.data_type))
        self._forward = forward_primitive(layer, weights, source, self._result)
        if training:
            self._result_gradient = Memory(self._result.descriptor)
            self._gradient = WeightsGradient(layer, source, self._result_gradient, weights.data_type)
            self._weights_gradient = np.empty((32, 2, 2, 64), np.float32)
            self._bias_gradient = np.empty(32, np.float32)

    def forward(self, obs_address: int, result_address: int) -> None:
        """Read bytes at `obs_address`, write activations at `result_address`."""
        self._obs.point_to(obs_address)
        self._result.point_to(result_address)
        for primitive in (*self._load, self._forward):
            primitive()

    def backward(self, obs_address: int, result_gradient_address: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the slice's share of the gradients, float32 [32, 2, 2, 64] and [32], until the next call."""
        # Converting the bytes again costs less than fetching them, converted, from main memory.
        self._obs.point_to(obs_address)
        self._result_gradient.point_to(result_gradient_address)
        for primitive in self._load:
            primitive()
        self._gradient(self._weights_gradient.ctypes.data, self._bias_gradient.ctypes.data)
        return self._weights_gradient, self._bias_gradient
