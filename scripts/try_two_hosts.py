"""A cluster of two machines, tried on one: two network namespaces with addresses of their own, joined by a cable.

    sudo .venv/bin/python scripts/try_two_hosts.py                  # PARL
    sudo .venv/bin/python scripts/try_two_hosts.py --engine ray     # Ray, with requirements-ray.txt

A master starts on the first host, a worker on the second joins it, and `train.py` on the first trains on both, by
the very commands that README names for several machines. Nothing of this machine's own network is used, and
nothing is left of the two when the program ends. Linux only; a namespace needs root.
"""

import argparse
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from a2c_config import Parser, exit_status

ROOT = Path(__file__).resolve().parent.parent
ADDRESSES = "10.77.0.1", "10.77.0.2"
RAY_PORT = 6379
COMMAND_S = 180.0


class HostError(OSError):
    """Something that the two hosts need and this machine does not give; the message is one sentence."""


class Host:
    """One network namespace; as a context manager it exists as long as the block, and so do its processes."""

    def __init__(self, name: str, address: str, environment: dict[str, str]) -> None:
        self.name, self.address, self._environment = name, address, environment

    def __enter__(self) -> "Host":
        _ip("netns", "add", self.name)
        return self

    def __exit__(self, *_: object) -> None:
        # Again, until none is left that one of them started meanwhile.
        while pids := _ip("netns", "pids", self.name).split():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.1)
        _ip("netns", "del", self.name)

    def plug_in(self, cable: str) -> None:
        """Give this host the interface `cable` with its address."""
        _ip("link", "set", cable, "netns", self.name)
        _ip("-n", self.name, "link", "set", "lo", "up")
        _ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", cable)
        _ip("-n", self.name, "link", "set", cable, "up")

    def run(self, *command: str, quiet: bool = False) -> None:
        """Run `command` on this host, each of its lines printed behind the host's address."""
        # Not a pipe: the processes of a cluster outlive the command, and would hold it open.
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env=self._environment,
            )
            status = _wait(process)
            output.seek(0)
            lines = output.read().splitlines()
        for line in [] if quiet and not status else lines:
            print(f"{self.address}  {line}", flush=True)
        if status:
            raise HostError(f"on {self.address} `{' '.join(command)}` ended with status {status}")


def _wait(process: subprocess.Popen) -> int:
    try:
        return process.wait(COMMAND_S)
    except BaseException as error:
        process.kill()
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise HostError(f"`{' '.join(process.args)}` did not end within {COMMAND_S:g} s") from None
        raise


def _ip(*arguments: str) -> str:
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        raise HostError("there is no command ip; install it: `apt-get install iproute2`") from None
    if done.returncode:
        raise HostError(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip()}")
    return done.stdout


@contextlib.contextmanager
def two_hosts(environment: dict[str, str]) -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other and nothing else."""
    names = [f"a2c-{os.getpid()}-{number}" for number in (1, 2)]
    cables = [f"a2c{os.getpid()}v{number}" for number in (1, 2)]
    with contextlib.ExitStack() as stack:
        hosts = [
            stack.enter_context(Host(name, address, environment))
            for name, address in zip(names, ADDRESSES, strict=True)
        ]
        _ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        try:
            for host, cable in zip(hosts, cables, strict=True):
                host.plug_in(cable)
        except HostError:
            subprocess.run(
                ["ip", "link", "del", cables[0]], capture_output=True
            )  # plugged in, it goes with its host
            raise
        yield hosts[0], hosts[1]


def on_parl(first: Host, second: Host, training: list[str], folder: str) -> None:
    cluster = sys.executable, "scripts/cluster.py"
    states = [("--state_dir", str(Path(folder, name))) for name in ("first", "second")]
    first.run(*cluster, "start", "--host", first.address, "--cpu_num", "1", *states[0])
    try:
        second.run(*cluster, "join", first.address, "--cpu_num", "1", *states[1])
        time.sleep(3)  # a worker tells the master of its CPUs with its next heartbeat
        first.run(*cluster, "status", *states[0])
        address = f"{first.address}:8010"
        first.run(sys.executable, "train.py", "--engine", "parl", "--master_address", address, *training)
    finally:
        for host, state in ((second, states[1]), (first, states[0])):
            host.run(*cluster, "stop", *state, quiet=True)


def on_ray(first: Host, second: Host, training: list[str], folder: str) -> None:
    ray = Path(sys.executable).with_name("ray")
    if not ray.exists():
        raise HostError(f"there is no command {ray}; install it: pip install -r requirements-ray.txt")
    head = f"{first.address}:{RAY_PORT}"
    options = "--num-cpus", "1", "--disable-usage-stats"
    # In a folder of its own: in Ray's usual one it would tell other programs here to use this cluster.
    port = "--port", str(RAY_PORT), "--include-dashboard", "false", "--temp-dir", str(Path(folder, "ray"))
    first.run(str(ray), "start", "--head", "--node-ip-address", first.address, *port, *options, quiet=True)
    second.run(str(ray), "start", "--address", head, "--node-ip-address", second.address, *options, quiet=True)
    time.sleep(5)  # until the head knows what the other offers
    first.run(str(ray), "status", "--address", head)
    first.run(sys.executable, "train.py", "--engine", "ray", "--ray_address", head, *training)


def run(options: argparse.Namespace) -> int:
    """Train on both hosts, which exist for as long as it takes."""
    if os.geteuid():
        raise HostError(f"network namespaces need root; run `sudo {sys.executable} {sys.argv[0]}`")
    # Ray's processes obey only who has the token; a user shares ~/.ray/auth_token, these two an environment.
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with tempfile.TemporaryDirectory(prefix="two-hosts-") as folder, two_hosts(environment) as hosts:
        training = ["--actor_num", "2", "--max_sample_steps", options.max_sample_steps]
        training += ["--log_metrics_interval_s", "2", "--run_dir", str(Path(folder, "train"))]
        {"parl": on_parl, "ray": on_ray}[options.engine](*hosts, training, folder)
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        prog="scripts/try_two_hosts.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--engine", choices=("parl", "ray"), default="parl", help="on what [%(default)s]")
    parser.add_argument("--max_sample_steps", default="4000", help="length of the training [%(default)s]")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return exit_status(run, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
