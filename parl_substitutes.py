"""What PARL's modules see in place of other packages: used by `parl_compat` only.

`import_for_parl` is the `__import__` of PARL's modules. Nobody else in the process sees these substitutes.
"""

import builtins
import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

SHORTEST_WAIT_MS = 10_000  # PARL gives up after 0.5 s or 0.9 s: too early on a busy machine

host = os.environ.get("XPARL_HOST") or "127.0.0.1"  # where PARL's sockets listen, and what they advertise


def _changed(module: types.ModuleType, **changes: Any) -> types.ModuleType:
    """Return a stand-in for `module`: what is not in `changes` is looked up there, when it is used."""
    stand_in = types.ModuleType(module.__name__)
    stand_in.__dict__.update(changes, __getattr__=functools.partial(getattr, module))
    return stand_in


def _zmq() -> types.ModuleType:
    import zmq

    class Socket(zmq.Socket):
        def bind(self, addr: str) -> Any:
            return super().bind(addr.replace("tcp://*", f"tcp://{host}", 1))

        def setsockopt(self, option: int, value: Any) -> None:
            too_short = option == zmq.RCVTIMEO and 0 < value < 1000
            super().setsockopt(option, SHORTEST_WAIT_MS if too_short else value)

    class Context(zmq.Context):
        _socket_class = Socket
        _instance = None  # else `Context.instance()` would be the program's own, without our sockets

        def __del__(self) -> None:
            """Do not terminate: called by the garbage collector, that can wait for ever for an open socket."""

    return _changed(zmq, Context=Context)


def _grpc() -> types.ModuleType:
    import grpc

    def server(*args: Any, **kwargs: Any) -> grpc.Server:
        made = grpc.server(*args, **kwargs)
        add_port = made.add_insecure_port
        made.add_insecure_port = lambda address: add_port(address.replace("[::]", host, 1))
        return made

    def insecure_channel(target: str, options: list) -> grpc.Channel:
        # Instead of PARL's way, which deletes the proxy settings of the whole program.
        return grpc.insecure_channel(target, [*options, ("grpc.enable_http_proxy", 0)])

    return _changed(grpc, server=server, insecure_channel=insecure_channel)


def _flask() -> types.ModuleType:
    import flask

    class Flask(flask.Flask):
        def run(self, host: str, port: int) -> None:  # PARL asks for every interface
            super().run(globals()["host"], port)

    return _changed(flask, Flask=Flask)


def _multiprocessing() -> Any:
    import multiprocessing

    # A context of its own: through the module, PARL would settle the start method of the whole program.
    return multiprocessing.get_context("fork")


def _threading() -> types.ModuleType:
    class Thread(threading.Thread):
        def setDaemon(self, daemonic: bool) -> None:  # the original warns at each call
            self.daemon = daemonic

    return _changed(threading, Thread=Thread)


def _framework_probe() -> Any:
    """Stand in for `multiprocessing` where PARL imports Paddle in a forked child to see if it is there."""

    def process(target: Callable, args: tuple[dict]) -> types.SimpleNamespace:
        has_paddle = importlib.util.find_spec("paddle") is not None
        args[0].update(_HAS_PADDLE=has_paddle, _HAS_FLUID=False, _HAS_TORCH=False)
        return types.SimpleNamespace(start=lambda: None, join=lambda: None)

    return types.SimpleNamespace(Manager=lambda: types.SimpleNamespace(dict=dict), Process=process)


def _pkg_resources() -> Any:
    def distribution(name: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(version=importlib.metadata.version(name))

    return types.SimpleNamespace(get_distribution=distribution)


_SUBSTITUTES: dict[str, Callable[[], Any]] = {
    "zmq": functools.cache(_zmq),
    "grpc": functools.cache(_grpc),
    "flask": functools.cache(_flask),
    "multiprocessing": functools.cache(_multiprocessing),
    "threading": functools.cache(_threading),
    "pkg_resources": functools.cache(_pkg_resources),
    # PARL turns all warnings of the whole program on, and `ResourceWarning` off.
    "warnings": functools.cache(lambda: _changed(warnings, simplefilter=lambda *args, **kwargs: None)),
}


def import_for_parl(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    """`__import__` as PARL's modules see it."""
    if level:
        return builtins.__import__(name, globals, locals, fromlist, level)
    importer = (globals or {}).get("__name__", "")
    if name.partition(".")[0] == "pyarrow":
        raise ModuleNotFoundError("pyarrow is hidden from PARL, which needs one older than 2.0", name=name)
    if name == "multiprocessing" and importer == "parl.utils.utils":
        return _framework_probe()
    if name == "os" and importer.startswith("parl.remote.grpc_heartbeat"):
        return types.SimpleNamespace(environ={}, getppid=os.getppid)
    if name in _SUBSTITUTES:
        return _SUBSTITUTES[name]()
    return builtins.__import__(name, globals, locals, fromlist, level)


def heartbeat_messages() -> dict[str, type]:
    """Build the two messages of PARL's `heartbeat.proto`; its generated code fails on protobuf 4 and later."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    proto = descriptor_pb2.FileDescriptorProto(name="heartbeat.proto", syntax="proto3")
    # PARL fills `extra_message`, which its own proto calls `extra_msg`; only the number is sent.
    layout = {
        "Request": [("client_id", 1, field.TYPE_STRING), ("tag", 2, field.TYPE_BYTES)]
        + [("instance_id", 4, field.TYPE_STRING), ("extra_message", 8, field.TYPE_STRING)],
        "Reply": [("tag", 1, field.TYPE_BYTES), ("extra_message", 8, field.TYPE_STRING)],
    }
    for message, fields in layout.items():
        described = proto.message_type.add(name=message)
        for name, number, kind in fields:
            described.field.add(name=name, number=number, type=kind, label=field.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()  # a pool of our own: names as plain as these may be taken
    pool.Add(proto)
    if hasattr(message_factory, "GetMessageClass"):
        make_class = message_factory.GetMessageClass
    else:  # protobuf before 4.22
        make_class = message_factory.MessageFactory(pool).GetPrototype
    return {message: make_class(pool.FindMessageTypeByName(message)) for message in layout}


PARL_BUILTINS = {**builtins.__dict__, "__import__": import_for_parl}


class _Loader(importlib.machinery.SourceFileLoader):
    patches: ClassVar[dict[str, Callable[[Any], None]]] = {}

    def exec_module(self, module: Any) -> None:
        module.__dict__["__builtins__"] = PARL_BUILTINS
        if module.__name__ == "parl.remote.grpc_heartbeat.heartbeat_pb2":
            module.__dict__.update(heartbeat_messages())
            return
        with _hushed() if module.__name__ == "parl" else contextlib.nullcontext():
            super().exec_module(module)
        if module.__name__ in self.patches:
            self.patches[module.__name__](module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "parl":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Drop what PARL says while it is imported: its arguments and its backend."""

    def is_serious(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING

    logger = logging.getLogger("PARL")
    logger.addFilter(is_serious)
    try:
        yield
    finally:
        logger.removeFilter(is_serious)


def install(patches: dict[str, Callable[[Any], None]]) -> None:
    """Load PARL's modules with substitutes from now on, and call `patches[name](module)` after each."""
    _Loader.patches = patches
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if "parl" in sys.modules:
        raise ImportError("parl was imported before parl_compat; import parl_compat first")
    sys.meta_path.insert(0, _Finder())
    warnings.filterwarnings("ignore", "No ccache found")  # Paddle's, about compilers that nobody here uses
