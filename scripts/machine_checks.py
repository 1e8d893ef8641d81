"""What the doctor `check_env.py` asks of the machine itself. Runs on Python 3.6, with nothing installed."""

import contextlib
import platform
import re
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

from cpu_threads import usable_cores

MIN_FREE_MEMORY_MB = 1000  # one process of the trainer takes about 500
MIN_FREE_DISK_MB = 500  # checkpoints and curves of one run, with room
VISUALDL_PORT = 8040


class Failure(Exception):
    """Something that training cannot do without."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.fix = fix

    @classmethod
    def of(cls, error: Exception, fix: str) -> "Failure":
        """Our own errors read "what is wrong; what to do"; `fix` is for all others."""
        what, _, own_fix = " ".join(str(error).split()).partition("; ")
        return cls(what or type(error).__name__, own_fix or fix)


class Note(Failure):
    """Something that could be better."""


def check_cpu() -> str:
    flags = cpu_flags()
    if platform.machine() == "x86_64" and flags and "avx" not in flags:
        raise Failure("this CPU has no AVX, without which Paddle crashes", "use another machine")
    wanted = {"AVX2": "avx2", "AVX-512": "avx512f", "AMX": "amx_tile"}
    has = {name: flag in flags for name, flag in wanted.items()}
    has["bf16"] = bool({"avx512_bf16", "amx_bf16"} & flags)
    sets = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in has.items())
    return f"{usable_cores()} usable cores ({sets if flags else 'instruction sets unknown'})"


def check_memory() -> str:
    memory = free_memory_mb()
    if memory is None:
        return "unknown on this system"
    if memory < MIN_FREE_MEMORY_MB:
        raise Failure(
            f"{memory} MB are free, {MIN_FREE_MEMORY_MB} are needed",
            "end other programs, or train with --engine local",
        )
    return f"{memory} MB free"


def existing_parent(path: Path) -> Path:
    return next(folder for folder in [path, *path.parents] if folder.exists())


def check_disk(run_dir: str) -> str:
    folder = existing_parent(Path(run_dir).absolute())
    free = shutil.disk_usage(folder).free // 2**20
    if free < MIN_FREE_DISK_MB:
        raise Failure(
            f"{free} MB are free for {run_dir}, {MIN_FREE_DISK_MB} are needed",
            "free some, or choose another --run_dir",
        )
    try:
        with tempfile.NamedTemporaryFile(dir=str(folder)):
            pass
    except OSError as error:
        raise Failure(f"{folder} cannot be written ({error.strerror})", "choose another --run_dir") from error
    return f"{free} MB free for {run_dir}, which can be written"


def check_ports() -> str:
    if accepts("127.0.0.1", VISUALDL_PORT):
        raise Note(
            f"port {VISUALDL_PORT} is taken; VisualDL will use the next free one", "read the URL that it prints"
        )
    return f"{VISUALDL_PORT} is free for VisualDL"


def cpu_flags() -> "set[str]":
    """The instruction sets as Linux names them, such as `avx2`; empty where the system does not say."""
    match = re.search(r"^flags\s*:(.*)", _text("/proc/cpuinfo"), re.MULTILINE)
    return set(match.group(1).split()) if match else set()


def free_memory_mb() -> "int | None":
    """What may still be used here, in a container too; None where the system does not say."""
    limits = []
    available = re.search(r"MemAvailable:\s+(\d+)", _text("/proc/meminfo"))
    if available:
        limits.append(int(available.group(1)) // 1024)
    limit, used = _text("/sys/fs/cgroup/memory.max"), _text("/sys/fs/cgroup/memory.current")
    if limit.strip().isdigit() and used.strip().isdigit():
        limits.append((int(limit) - int(used)) // 2**20)
    return min(limits) if limits else None


def gpu_names() -> "list[str]":
    """The NVIDIA GPUs, whether Paddle can use them or not."""
    if not shutil.which("nvidia-smi"):
        return []
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        result = subprocess.run(
            ["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20
        )
        return re.findall(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", result.stdout.decode(errors="replace"), re.MULTILINE)
    return []


def accepts(host: str, port: int) -> bool:
    """Whether anything takes a connection there."""
    with contextlib.suppress(OSError, UnicodeError), socket.create_connection((host, port), timeout=1):
        return True
    return False


def _text(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text()
    return ""
