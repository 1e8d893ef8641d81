"""The doctor: looks at all that training needs. One cause, one fix.

    python scripts/check_env.py
    python scripts/check_env.py --env_name BreakoutNoFrameskip-v4 --master_address 10.0.0.5:8010

A line each: `ok`; `note -> hint`, where training works all the same; `FAIL -> what to do`. The exit status is 1
where anything failed.
"""

# Runs on Python 3.6 and later, with nothing installed, so that it can say so.
import argparse
import importlib
import importlib.util
import platform
import re
import sys
import warnings
import zlib  # noqa: F401  before Paddle 2.6, whose own copy of it breaks one that is loaded later
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import machine_checks
from machine_checks import Failure, Note

ROOT = Path(__file__).resolve().parent.parent
SETUP = "bash scripts/setup.sh"
ANEW = f"rm -r .venv && {SETUP}"
SUPPORTED_PYTHON = ((3, 10), (3, 11), (3, 12))
MODULES = {  # where a package's module is not called like the package
    "paddlepaddle": "paddle",
    "ale-py": "ale_py",
    "opencv-python-headless": "cv2",
    "protobuf": "google.protobuf",
    "pyzmq": "zmq",
    "pillow": "PIL",
    "grpcio": "grpc",
    "flask-cors": "flask_cors",
    "nvidia-ml-py": "pynvml",
}


def check_python() -> str:
    version = platform.python_version()
    if sys.version_info[:2] not in SUPPORTED_PYTHON:
        found = ROOT / ".venv/bin/python"
        raise Failure(
            f"{sys.executable} is Python {version}; 3.10, 3.11 or 3.12 is needed",
            f"{found} scripts/check_env.py" if found.exists() else f"PYTHON=/path/to/python3.11 {SETUP}",
        )
    return f"{version} ({sys.executable})"


def requirements() -> "dict[str, str]":
    """The version that each package must have, such as ">=3", by its name."""
    lines = (ROOT / "requirements-common.txt").read_text().splitlines()
    found = [re.match(r"([\w-]+)([^#]*)", line) for line in lines]
    return {"paddlepaddle": "", **{match[1]: match[2].strip() for match in found if match}}


def has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def installed_version(package: str) -> str:
    """Import the package and return its version, "" where it has none."""
    import importlib.metadata

    try:
        module = importlib.import_module(MODULES.get(package, package))
    except Exception as error:
        words = f"{package} does not import: {error}"
        if "cannot open shared object file" in words:
            raise Failure(words, "apt-get install libgomp1 libstdc++6 zlib1g") from error
        raise Failure(words, ANEW) from error
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # it came under another name, as paddlepaddle-gpu
        return getattr(module, "__version__", "")


def check_packages() -> str:
    wanted = requirements()
    missing = [package for package in wanted if not has_module(MODULES.get(package, package))]
    if missing:
        is_elsewhere = (ROOT / ".venv/setup.stamp").exists() and Path(sys.prefix).resolve() != ROOT / ".venv"
        raise Failure(
            f"{sys.executable} lacks {', '.join(missing)}",
            ".venv/bin/python scripts/check_env.py" if is_elsewhere else SETUP,
        )
    versions = {package: installed_version(package) for package in wanted}
    from packaging.specifiers import SpecifierSet

    wrong = [
        f"{package} is {version}, not {wanted[package]}"
        for package, version in versions.items()
        if package != "protobuf" and version and version not in SpecifierSet(wanted[package], prereleases=True)
    ]
    if wrong:
        raise Failure(", ".join(wrong), f"{sys.executable} -m pip install -r requirements-common.txt")
    return ", ".join(f"{package} {version}" for package, version in versions.items())


def check_protobuf() -> str:
    from google import protobuf

    version = tuple(int(part) for part in protobuf.__version__.split(".")[:2])
    if version < (3, 20):
        raise Failure(f"protobuf {protobuf.__version__} is too old for VisualDL, which needs 3.20", SETUP)
    if version >= (4, 0):
        raise Note(
            f"protobuf {protobuf.__version__}: fine here, but PARL programs without parl_compat need 3.20",
            "pip install protobuf==3.20.3",
        )
    return f"{protobuf.__version__}, good for VisualDL and PARL"


def check_parl() -> str:
    if not has_module("parl"):
        raise Failure("parl is not installed", SETUP)
    try:
        import parl_compat  # noqa: F401, I001  makes `import parl` work
        import parl
    except Exception as error:
        raise Failure.of(error, ANEW) from error
    if parl.__version__ != "2.2.1":
        raise Failure(f"PARL is {parl.__version__}, but 2.2.1 is needed", "pip install --no-deps parl==2.2.1")
    return parl.__version__


def check_device() -> str:
    import paddle

    names = machine_checks.gpu_names()
    if not paddle.is_compiled_with_cuda():
        if names:
            raise Note(
                f"there is a GPU ({names[0]}), but the installed Paddle {paddle.__version__} is the CPU build",
                f"{SETUP} --gpu",
            )
        return f"CPU (Paddle {paddle.__version__}, its CPU build; no GPU found)"
    count = paddle.device.cuda.device_count()
    if not count:
        raise Note(
            f"Paddle {paddle.__version__} is the GPU build, but sees no GPU; it trains on the CPU",
            "check the driver with `nvidia-smi`" if names else f"{SETUP} --cpu",
        )
    try:
        paddle.set_device("gpu:0")
        paddle.nn.Conv2D(4, 32, 8, 4)(paddle.zeros([1, 4, 84, 84])).mean().item()
    except Exception as error:
        raise Failure(
            f"a convolution on the GPU fails: {str(error).strip().splitlines()[-1]}", f"{SETUP} --gpu"
        ) from error
    return f"{count} GPU (Paddle {paddle.__version__}, CUDA {paddle.version.cuda()}; {', '.join(names)})"


def check_rom(env_name: str) -> str:
    from atari_games import resolve_env_name, rom_dir

    try:
        game = resolve_env_name(env_name)
    except (ValueError, OSError) as error:
        raise Failure.of(error, "python scripts/install_roms.py --list") from error
    return f"{env_name} has its ROM, {rom_dir() / game.rom_id}.bin"


def check_env(env_name: str) -> str:
    import ale_py

    from env_utils import make_env

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    env = make_env(env_name, seed=0)
    obs, _ = env.reset()
    next_obs, reward, *_ = env.step(0)
    env.close()
    if obs.shape != next_obs.shape or not next_obs.any():
        raise Failure(f"{env_name} shows a black screen {next_obs.shape}", ANEW)
    return f"{env_name} reset and stepped: obs {next_obs.dtype} {list(next_obs.shape)}, reward {reward:g}"


def check_cluster(address: str) -> str:
    import parl_compat

    host, _, port = address.rpartition(":")
    try:
        used, vacant = parl_compat.cluster_cpus(address)
    except ConnectionError as error:
        if not (host and port.isdecimal() and 0 < int(port) < 65536):
            raise Failure.of(error, "see --help") from error
        if machine_checks.accepts(host, int(port)):
            other = int(port) % 65000 + 10
            raise Failure(
                f"port {port} of {host} is taken by something that is no PARL master",
                f"bash scripts/start_cluster.sh --port {other}, then --master_address {host}:{other}",
            ) from error
        raise Note.of(error, "bash scripts/start_cluster.sh") from error
    if not vacant:
        raise Note(f"the cluster at {address} has no vacant CPU, {used} are used", "bash scripts/join_cluster.sh")
    return f"{address} answers: {used} CPUs used, {vacant} vacant"


def run_check(check, *arguments) -> "tuple[str, str]":
    """Return the status of one check and its sentence; whatever goes wrong is a failure, never a traceback."""
    try:
        return "ok", check(*arguments)
    except Failure as problem:
        return "note" if isinstance(problem, Note) else "FAIL", f"{problem} -> {problem.fix}"
    except Exception as error:
        words = " ".join(str(error).split()) or "no reason given"
        return "FAIL", f"{type(error).__name__}: {words} -> {ANEW}"


def run_checks(env_name: str, master_address: str, run_dir: str) -> bool:
    """Print a line each; return whether nothing failed. A check waits for those that it names last."""
    checks = (
        ("python", check_python, (), ()),
        ("cpu", machine_checks.check_cpu, (), ()),
        ("memory", machine_checks.check_memory, (), ()),
        ("disk", machine_checks.check_disk, (run_dir,), ()),
        ("packages", check_packages, (), ("python", "cpu")),
        ("protobuf", check_protobuf, (), ("packages",)),
        ("parl", check_parl, (), ("packages",)),
        ("device", check_device, (), ("packages",)),
        ("rom", check_rom, (env_name,), ("packages",)),
        ("env", check_env, (env_name,), ("rom",)),
        ("cluster", check_cluster, (master_address,), ("parl",)),
        ("ports", machine_checks.check_ports, (), ()),
    )
    stopped, skipped = [], []
    for name, check, arguments, needs in checks:
        if any(need in stopped + skipped for need in needs):
            skipped.append(name)
            continue
        status, sentence = run_check(check, *arguments)
        if status == "FAIL":
            stopped.append(name)
        print(f"{status:4} {name:9} {sentence}", flush=True)
    if skipped:
        print(f"skip {', '.join(skipped)}: to be looked at once {' and '.join(stopped)} is mended")
    return not stopped


def parse_arguments(argv: "list[str] | None") -> argparse.Namespace:
    description, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env_name", default="PongNoFrameskip-v4", help="the game [%(default)s]")
    parser.add_argument(
        "--master_address", default="localhost:8010", metavar="HOST:PORT", help="the cluster [%(default)s]"
    )
    parser.add_argument("--run_dir", default="train_log/train", help="where a run will write [%(default)s]")
    return parser.parse_args(argv)


def main(argv: "list[str] | None" = None) -> int:
    arguments = parse_arguments(argv)
    warnings.simplefilter("ignore")  # Paddle's about compilers, PARL's about its own code
    if not run_checks(arguments.env_name, arguments.master_address, arguments.run_dir):
        return 1
    print("next: python train.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
