"""The little of oneDNN's C API that `cpu_kernels.py` needs, through ctypes.

Paddle's wheel carries oneDNN (`paddle/libs/libdnnl.so.3`) for its own use; nothing else has to be installed.
In oneDNN a *memory descriptor* says how a tensor lies in memory, a *memory* adds a buffer to it, and a
*primitive* is one operation compiled for fixed descriptors, which may then run any number of times.
Numbers below are those of `dnnl_types.h`, stable within oneDNN 3; `library` refuses any other version.
See https://uxlfoundation.github.io/oneDNN/.
"""

import contextlib
import ctypes
import functools
import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import paddle

MAJOR_VERSION = 3
SPIN_MS = 1  # how long a thread waits for the next primitive before it sleeps

# dnnl_data_type_t
BF16, F32, S32, U8 = 2, 3, 4, 6
_NUMPY_TYPES = {BF16: np.uint16, F32: np.float32, S32: np.int32, U8: np.uint8}
# dnnl_prop_kind_t
FORWARD_TRAINING, FORWARD_INFERENCE = 64, 96
# Where a primitive takes or puts a tensor (DNNL_ARG_*).
SOURCE, SECOND_SOURCE, RESULT, WEIGHTS, BIAS = 1, 2, 17, 33, 41
SOURCE_GRADIENT, RESULT_GRADIENT, WEIGHTS_GRADIENT, BIAS_GRADIENT = 129, 145, 161, 169
# dnnl_query_t: the layout that a primitive chose for one of its tensors.
_QUERIES = {SOURCE: 129, SOURCE_GRADIENT: 130, WEIGHTS: 131, WEIGHTS_GRADIENT: 132, RESULT: 133}
_QUERY_IMPLEMENTATION = 8
_CPU, _IN_ORDER, _TAG_ANY, _DIRECT_CONVOLUTION, _RELU, _SUBTRACTION = 1, 1, 1, 1, 0x20, 0x1FFF5
_STATUS = {1: "out of memory", 2: "invalid arguments", 3: "unimplemented", 6: "runtime error", 7: "not required"}


class _Version(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("major", "minor", "patch")]


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded oneDNN.

    Raises:
        OSError: where the wheel has none, or where its major version is not the one bound here.
    """
    path = Path(paddle.__file__).parent / "libs" / f"libdnnl.so.{MAJOR_VERSION}"
    dnnl = ctypes.CDLL(str(path))
    dnnl.dnnl_version.restype = ctypes.POINTER(_Version)
    version = dnnl.dnnl_version().contents
    if version.major != MAJOR_VERSION:
        raise OSError(f"{path} is oneDNN {version.major}.{version.minor}, not {MAJOR_VERSION}")
    dnnl.dnnl_memory_desc_get_size.restype = ctypes.c_size_t
    dnnl.dnnl_primitive_desc_query_md.restype = ctypes.c_void_p
    return dnnl


def _call(function: str, *arguments: object) -> None:
    status = getattr(library(), function)(*arguments)
    if status:
        raise RuntimeError(f"oneDNN: {function} failed with status {status} ({_STATUS.get(status, 'unknown')})")


class _Object:
    """An object of the library; destroyed with the last reference to it."""

    def __init__(self, kind: str, create: str, *arguments: object) -> None:
        self._destroy = getattr(library(), f"dnnl_{kind}_destroy")
        self._as_parameter_ = ctypes.c_void_p()  # what ctypes passes where this object is an argument
        _call(f"dnnl_{create}", ctypes.byref(self._as_parameter_), *arguments)

    def __del__(self) -> None:
        if getattr(self, "_as_parameter_", None):
            self._destroy(self._as_parameter_)


@functools.cache
def _engine() -> _Object:
    return _Object("engine", "engine_create", _CPU, ctypes.c_size_t(0))


_per_thread = threading.local()


def _stream() -> _Object:
    if not hasattr(_per_thread, "stream"):
        _per_thread.stream = _Object("stream", "stream_create", _engine(), _IN_ORDER)
    return _per_thread.stream


def _integers(values: Sequence[int]) -> ctypes.Array:
    return (ctypes.c_int64 * len(values))(*values)


class Descriptor(_Object):
    """How a tensor lies in memory: shape, data type and, unless the primitive is to choose, strides."""

    @classmethod
    def strided(cls, shape: Sequence[int], data_type: int, strides: Sequence[int]) -> "Descriptor":
        """A step along axis i moves `strides[i]` elements."""
        arguments = len(shape), _integers(shape), data_type, _integers(strides)
        return cls("memory_desc", "memory_desc_create_with_strides", *arguments)

    @classmethod
    def dense(cls, shape: Sequence[int], data_type: int) -> "Descriptor":
        """As a C-contiguous NumPy array."""
        return cls.strided(shape, data_type, [math.prod(shape[axis + 1 :]) for axis in range(len(shape))])

    @classmethod
    def channels_last(cls, shape: Sequence[int], data_type: int) -> "Descriptor":
        """`shape` is (batch, channels, height, width), the order in memory is NHWC."""
        _, channels, height, width = shape
        strides = channels * height * width, 1, width * channels, channels
        return cls.strided(shape, data_type, strides)

    @classmethod
    def any_layout(cls, shape: Sequence[int], data_type: int) -> "Descriptor":
        """The primitive chooses the layout that it is fastest with; ask it with `Operation.layout`."""
        arguments = len(shape), _integers(shape), data_type, _TAG_ANY
        return cls("memory_desc", "memory_desc_create_with_tag", *arguments)

    @property
    def nbytes(self) -> int:
        return library().dnnl_memory_desc_get_size(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Descriptor) and bool(library().dnnl_memory_desc_equal(self, other))

    __hash__ = None


class Memory(_Object):
    """A descriptor and the buffer behind it: its own, or one at an address that `point_to` sets later."""

    def __init__(self, descriptor: Descriptor, data_type: int | None = None) -> None:
        """`data_type`: own a zeroed buffer of it, seen through `array`; None: the caller gives an address."""
        self.descriptor, self.data_type, self.array = descriptor, data_type, None
        address = None
        if data_type is not None:
            # oneDNN's vector instructions are fastest from the start of a cache line, 64 bytes.
            buffer = np.zeros(descriptor.nbytes + 64, np.uint8)
            start = -buffer.ctypes.data % 64
            self.array = buffer[start : start + descriptor.nbytes].view(_NUMPY_TYPES[data_type])
            address = self.array.ctypes.data
        super().__init__("memory", "memory_create", descriptor, _engine(), ctypes.c_void_p(address))

    @property
    def address(self) -> int:
        return self.array.ctypes.data

    def point_to(self, address: int) -> None:
        """Use the buffer at `address`, which the caller keeps alive."""
        _call("dnnl_memory_set_data_handle", self, ctypes.c_void_p(address))


class _Argument(ctypes.Structure):
    _fields_ = [("place", ctypes.c_int), ("memory", ctypes.c_void_p)]


class Operation(_Object):
    """A primitive before it is bound to memory: its choice of implementation and of layouts."""

    def __init__(self, create: str, *arguments: object) -> None:
        super().__init__("primitive_desc", f"{create}_primitive_desc_create", *arguments)

    def layout(self, place: int) -> Descriptor:
        """The layout of the tensor at `place` (SOURCE, WEIGHTS, ...)."""
        borrowed = library().dnnl_primitive_desc_query_md(self, _QUERIES[place], 0)
        return Descriptor("memory_desc", "memory_desc_clone", ctypes.c_void_p(borrowed))

    @property
    def implementation(self) -> str:
        """oneDNN's name for the code chosen, such as `brgconv:avx512_core`; `ref` means very slow."""
        name = ctypes.c_char_p()
        _call("dnnl_primitive_desc_query", self, _QUERY_IMPLEMENTATION, 0, ctypes.byref(name))
        return name.value.decode()


class Primitive(_Object):
    """An operation on the given memory; a call runs it. Created for the number of threads set at the time."""

    def __init__(self, operation: Operation, memories: dict[int, Memory]) -> None:
        super().__init__("primitive", "primitive_create", operation)
        self.operation, self._memories = operation, memories
        pairs = [(place, memory._as_parameter_) for place, memory in memories.items()]
        self._arguments = (_Argument * len(pairs))(*pairs)

    def __call__(self) -> None:
        _call("dnnl_primitive_execute", self, _stream(), len(self._arguments), self._arguments)


def reorder(source: Memory, result: Memory) -> Primitive:
    """Copy between layouts and data types."""
    engine = _engine()
    operation = Operation("reorder", source.descriptor, engine, result.descriptor, engine, None)
    return Primitive(operation, {SOURCE: source, RESULT: result})


def subtract(minuend: Memory, subtrahend: Memory) -> Primitive:
    """`minuend -= subtrahend`, of one data type; axes of length 1 of the latter are repeated."""
    tensors = minuend.descriptor, subtrahend.descriptor, minuend.descriptor
    operation = Operation("binary", _engine(), _SUBTRACTION, *tensors, None)
    return Primitive(operation, {SOURCE: minuend, SECOND_SOURCE: subtrahend, RESULT: minuend})


def _relu_attribute() -> _Object:
    # The primitive applies the ReLU to each result while that is still in a register.
    post_operations = _Object("post_ops", "post_ops_create")
    zero = ctypes.c_float(0)
    _call("dnnl_post_ops_append_eltwise", post_operations, _RELU, zero, zero)
    attribute = _Object("primitive_attr", "primitive_attr_create")
    _call("dnnl_primitive_attr_set_post_ops", attribute, post_operations)
    return attribute


class Affine:
    """A convolution without padding, or, where `stride` is None, a fully connected layer."""

    def __init__(self, stride: int | None) -> None:
        self._kind = "inner_product" if stride is None else "convolution"
        self._algorithm, self._geometry = (), ()
        if stride is not None:
            none = _integers((0, 0))
            self._algorithm = (_DIRECT_CONVOLUTION,)
            self._geometry = (_integers((stride, stride)), none, none, none)  # dilation and padding: none

    def forward(
        self,
        source: Descriptor,
        weights: Descriptor,
        bias: Descriptor,
        result: Descriptor,
        propagation: int = FORWARD_TRAINING,
        relu: bool = True,
    ) -> Operation:
        """`relu(affine(source))`; without `relu` it serves as the hint that both backward passes need."""
        kind = _engine(), propagation, *self._algorithm
        attribute = _relu_attribute() if relu else None
        tensors = source, weights, bias, result
        return Operation(f"{self._kind}_forward", *kind, *tensors, *self._geometry, attribute)

    def backward_data(
        self, source_gradient: Descriptor, weights: Descriptor, result_gradient: Descriptor, hint: Operation
    ) -> Operation:
        """The gradient with respect to the source."""
        tensors = source_gradient, weights, result_gradient
        arguments = _engine(), *self._algorithm, *tensors, *self._geometry, hint, None
        return Operation(f"{self._kind}_backward_data", *arguments)

    def backward_weights(
        self,
        source: Descriptor,
        weights_gradient: Descriptor,
        bias_gradient: Descriptor,
        result_gradient: Descriptor,
        hint: Operation,
    ) -> Operation:
        """The gradients with respect to weights and bias, summed over the batch."""
        tensors = source, weights_gradient, bias_gradient, result_gradient
        arguments = _engine(), *self._algorithm, *tensors, *self._geometry, hint, None
        return Operation(f"{self._kind}_backward_weights", *arguments)


def relu_backward(activation: Memory, gradient: Memory) -> Primitive:
    """Set `gradient`, in place, to 0 where `activation`, the result of a ReLU, is 0; both of one layout."""
    layout, zero, engine = activation.descriptor, ctypes.c_float(0), _engine()
    relu = _RELU, layout, layout
    hint = Operation("eltwise_forward", engine, FORWARD_TRAINING, *relu, zero, zero, None)
    operation = Operation("eltwise_backward", engine, *relu, layout, zero, zero, hint, None)
    tensors = {SOURCE: activation, RESULT_GRADIENT: gradient, SOURCE_GRADIENT: gradient}
    return Primitive(operation, tensors)


@functools.cache
def _openmp_runtimes() -> list[ctypes.CDLL]:
    # libdnnl was linked against libgomp, but in Paddle's process Intel's libiomp5 comes first and answers
    # the same names; which of the two serves is the dynamic linker's affair, so both are set alike.
    runtimes = [library()]
    intel = Path(paddle.__file__).parent / "libs" / "libiomp5.so"
    if intel.exists():
        runtimes.append(ctypes.CDLL(str(intel)))
    return runtimes


def set_num_threads(count: int) -> None:
    """Let primitives that this Python thread creates and calls from now on use `count` threads."""
    for runtime in _openmp_runtimes():
        runtime.omp_set_num_threads(count)
        if hasattr(runtime, "kmp_set_blocktime"):
            # Primitives follow each other closely: a thread that slept between two would be late for each. Where
            # one thread suffices the others sleep at once, as `cpu_threads` wants it.
            runtime.kmp_set_blocktime(SPIN_MS if count > 1 else 0)


@contextlib.contextmanager
def num_threads(count: int) -> Iterator[None]:
    """`set_num_threads` for the length of a `with` block.

    A primitive fixes its share-out when it is created, so it must be called under the count of its creation.
    """
    previous = _openmp_runtimes()[-1].omp_get_max_threads()
    set_num_threads(count)
    try:
        yield
    finally:
        set_num_threads(previous)
