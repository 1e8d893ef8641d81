"""A PARL cluster on this machine, on the loopback interface only unless told otherwise.

    python scripts/cluster.py start              # a master, a worker with one CPU per core, a monitor page
    python scripts/cluster.py join 10.0.0.5      # on another machine: add its CPUs to that master's cluster
    python scripts/cluster.py status
    python scripts/cluster.py stop

`bash scripts/start_cluster.sh`, `join_cluster.sh`, `cluster_status.sh` and `stop_cluster.sh` do the same.
"""

import argparse
import contextlib
import fcntl
import ipaddress
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
try:
    import parl_compat
    from cpu_threads import usable_cores

    from cluster_record import ClusterError, Record, records
except ModuleNotFoundError as missing:
    sys.exit(f"error: {sys.executable} has no module {missing.name}; run `bash scripts/setup.sh` first")

DEFAULT_PORT = 8010
START_S = 60.0  # a job needs about 1 s of a core to start, and each CPU starts one
POLL_S = 0.1
START_COMMAND = "`bash scripts/start_cluster.sh`"
STOP_COMMAND = "`bash scripts/stop_cluster.sh`"


def start(options: argparse.Namespace) -> None:
    """Start master, monitor and worker, unless they run already; return once all CPUs are vacant."""
    address = f"{options.host}:{options.port}"
    path = options.state_dir / f"{options.port}.json"
    if _runs_already(path):
        return
    _check_port(options.host, options.port)
    _warn_of_network(options.host)
    monitor_port, log_port = (str(_free_port(options.host)) for _ in range(2))
    record = Record(path, address, options.host, options.cpu_num, f"http://{options.host}:{monitor_port}")
    with _cleaning_up(record):
        master = ("--name", "master", "--port", str(options.port), "--monitor_port", monitor_port)
        record.launch("master", "start.py", *master)
        record.launch("monitor", "monitor.py", "--monitor_port", monitor_port, "--address", address)
        _wait(record, "the master", lambda: _cpus(address) is not None)
        _launch_worker(record, log_port)
        _wait(record, "the worker", lambda: (_cpus(address) or (0, 0))[1] >= options.cpu_num)
        _wait(record, "the monitor", lambda: _accepts(options.host, int(monitor_port)))
    print(f"the PARL cluster runs at {address} with {_plural(options.cpu_num)}")
    print(f"  monitor  {record.monitor_url}")
    print(f"  logs     {options.state_dir}")
    here = address == f"127.0.0.1:{DEFAULT_PORT}"
    print(f"next: python train.py{'' if here else f' --master_address {address}'}")
    print("      bash scripts/cluster_status.sh")
    if not ipaddress.IPv4Address(options.host).is_loopback:
        print(f"      bash scripts/join_cluster.sh {address}   (on another machine)")
    print("      bash scripts/stop_cluster.sh")


def join(options: argparse.Namespace) -> None:
    """Start a worker here that gives its CPUs to the master at `options.address`."""
    address = options.address if ":" in options.address else f"{options.address}:{DEFAULT_PORT}"
    try:
        before = sum(parl_compat.cluster_cpus(address))
        host = parl_compat.local_address_towards(address)
    except ConnectionError as error:
        reason = str(error).partition(";")[0]
        raise ClusterError(
            f"{reason}; start it there with `bash scripts/start_cluster.sh --host ITS_ADDRESS`, since without "
            "--host a master answers on its own machine only"
        ) from error
    _warn_of_network(host)
    number = 1
    while (path := options.state_dir / f"worker-{address.replace(':', '-')}-{number}.json").exists():
        number += 1
    record = Record(path, address, host, options.cpu_num)
    with _cleaning_up(record):
        _launch_worker(record, str(_free_port(host)))
        _wait(record, "the worker", lambda: sum(_cpus(address) or (0, 0)) >= before + options.cpu_num)
    print(f"{_plural(options.cpu_num)} of this machine joined the PARL cluster at {address}")
    print(f"  log   {record.log('worker')}")
    print(f"next: bash scripts/cluster_status.sh --master_address {address}")
    print("      bash scripts/stop_cluster.sh   (ends the worker here, not the cluster there)")


def status(options: argparse.Namespace) -> None:
    """Print the CPUs of one or of all recorded clusters, and which of our processes live."""
    ours = records(options.state_dir)
    addresses = list(dict.fromkeys(record.address for record in ours))
    if options.master_address:
        addresses = [options.master_address]
    if not addresses:
        raise ClusterError(f"no PARL cluster of this project runs on this machine; start one with {START_COMMAND}")
    silent = 0
    for address in addresses:
        try:
            used, vacant = parl_compat.cluster_cpus(address)
            print(f"PARL cluster at {address}: {used} used and {vacant} vacant CPUs")
        except ConnectionError as error:
            silent += 1
            print(f"error: {error}" if len(addresses) == 1 else f"{address}: {error}", file=sys.stderr)
        for record in ours:
            if _same_master(record.address, address):
                _print_processes(record)
    if silent == len(addresses):
        sys.exit(1)


def stop(options: argparse.Namespace) -> None:
    """End the recorded processes, and no others."""
    ours = records(options.state_dir)
    chosen = [record for record in ours if options.port in (None, _port(record))]
    if not chosen:
        where = "" if options.port is None else f" with port {options.port}"
        others = ", ".join(str(_port(record)) for record in ours)
        hint = f"there is one with port {others}" if others else f"start one with {START_COMMAND}"
        print(f"nothing to stop: no PARL cluster of this project{where} runs on this machine; {hint}")
    # Joined workers first: a worker whose master is gone writes warnings into its log.
    for record in sorted(chosen, key=lambda record: record.path.stem.isdecimal()):
        record.remove()
        if record.path.stem.isdecimal():
            _wait_until_free(record.host, _port(record))
            print(f"stopped the PARL cluster at {record.address}")
        else:
            print(f"stopped the worker that had joined {record.address}")


def _runs_already(path: Path) -> bool:
    if not path.exists():
        return False
    record = Record.load(path)
    ended = record.ended()
    if len(ended) == len(record.processes):
        record.remove()  # of before a reboot, or killed by somebody else
        return False
    cpus = _cpus(record.address)
    if ended or cpus is None:
        problem = f"its {' and '.join(ended)} ended" if ended else "its master does not answer"
        raise ClusterError(
            f"the PARL cluster at {record.address} is broken, {problem} (logs in {path.parent}); "
            f"run {STOP_COMMAND}, then {START_COMMAND}"
        )
    print(
        f"the PARL cluster at {record.address} runs already: {cpus[0]} used and {cpus[1]} vacant CPUs; "
        f"to change it, run {STOP_COMMAND} first"
    )
    return True


def _check_port(host: str, port: int) -> None:
    try:
        _bind(host, port)
    except PermissionError as error:
        raise ClusterError(f"port {port} needs root's rights; choose another with --port") from error
    except OSError as error:
        if not _accepts(host, port):
            raise ClusterError(f"cannot listen at {host}:{port} ({error.strerror}); check --host") from error
        cpus = _cpus(f"{host}:{port}")
        taken = "another program" if cpus is None else f"a PARL cluster ({sum(cpus)} CPUs) from elsewhere"
        raise ClusterError(
            f"port {port} is taken by {taken}; choose another with --port, e.g. {port + 10}"
        ) from error


def _bind(host: str, port: int) -> int:
    with socket.socket() as probe:
        # As the master itself does: connections that were just closed do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return probe.getsockname()[1]


def _free_port(host: str) -> int:
    return _bind(host, 0)


def _accepts(host: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((host, port), timeout=1).close()
        return True
    return False


def _cpus(address: str) -> tuple[int, int] | None:
    with contextlib.suppress(ConnectionError):
        return parl_compat.cluster_cpus(address)
    return None


def _launch_worker(record: Record, log_server_port: str) -> None:
    where = ("--address", record.address, "--log_server_port", log_server_port)
    record.launch("worker", "start.py", "--name", "worker", "--cpu_num", str(record.cpu_num), *where)


@contextlib.contextmanager
def _cleaning_up(record: Record) -> Iterator[None]:
    """Leave nothing behind where the block fails or is interrupted."""
    try:
        record.save()  # a folder that cannot be written shows before anything runs
        yield
    except BaseException:
        record.remove()
        raise


def _wait(record: Record, what: str, is_ready: Callable[[], bool]) -> None:
    wait_s = START_S + record.cpu_num
    deadline = time.monotonic() + wait_s
    while not is_ready():
        for name in record.ended():
            raise ClusterError(f"the {name} ended while it started; its log ended with\n{record.log_tail(name)}")
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{what} was not ready after {wait_s:g} s (logs in {record.path.parent}); run this again with fewer "
                f"CPUs (--cpu_num, now {record.cpu_num})"
            )
        time.sleep(POLL_S)


def _wait_until_free(host: str, port: int) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            _bind(host, port)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ClusterError(f"the cluster is stopped, but port {port} is still taken ({error})") from error
        time.sleep(POLL_S)


def _print_processes(record: Record) -> None:
    ended = record.ended()
    for started in record.processes:
        state = f"ended, see {record.log(started.name)}" if started.name in ended else "runs"
        print(f"  {started.name:8} pid {started.pid}: {state}")
    if record.monitor_url:
        print(f"  page     {record.monitor_url}")


def _port(record: Record) -> int:
    return int(record.address.rpartition(":")[2])


def _same_master(address: str, other: str) -> bool:
    def resolved(address: str) -> str:
        host, _, port = address.rpartition(":")
        with contextlib.suppress(OSError, UnicodeError):
            host = socket.gethostbyname(host)
        return f"{host}:{port}"

    return resolved(address) == resolved(other)


def _plural(cpu_num: int) -> str:
    return f"{cpu_num} CPU" + ("s" if cpu_num > 1 else "")


def _warn_of_network(host: str) -> None:
    if not ipaddress.IPv4Address(host).is_loopback:
        print(
            f"warning: the cluster's processes here listen at {host}; PARL unpickles what it receives, so whoever "
            "reaches them can run any program as you; do this on a trusted, private network only",
            file=sys.stderr,
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(1, f"error: {message}; see {self.prog} --help\n")


def _cpu_num(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of CPUs; give 1 or more")
    return int(text)


def _port_number(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text} is no port; give 1 to 65535")
    return int(text)


def _host(text: str) -> str:
    try:
        address = ipaddress.IPv4Address(socket.gethostbyname(text))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text} is no IPv4 address or known name") from error
    if address.is_unspecified:
        raise argparse.ArgumentTypeError(
            f"{text} means every network; give the address at which the other machines reach this one"
        )
    return str(address)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{start,join,status,stop}")

    def add(command: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
        text = (command.__doc__ or "").rstrip(".")
        added = commands.add_parser(command.__name__, help=text, description=command.__doc__)
        added.set_defaults(run=command)
        added.add_argument(
            "--state_dir",
            type=Path,
            default=ROOT / ".cluster",
            help="folder of records and logs [.cluster in the project]",
        )
        return added

    cores = usable_cores()
    cpus = {
        "type": _cpu_num,
        "default": cores,
        "help": f"actors that can run at once [{cores}, one per core]",
    }
    starting = add(start)
    starting.add_argument("--cpu_num", **cpus)
    starting.add_argument(
        "--port", type=_port_number, default=DEFAULT_PORT, help=f"where the master answers [{DEFAULT_PORT}]"
    )
    starting.add_argument(
        "--host",
        type=_host,
        default="127.0.0.1",
        help="this machine's address for other machines, on a trusted network only [127.0.0.1: none]",
    )
    joining = add(join)
    joining.add_argument("address", help=f"the master, ADDRESS[:PORT]; the port is {DEFAULT_PORT} if left out")
    joining.add_argument("--cpu_num", **cpus)
    add(status).add_argument("--master_address", help="HOST:PORT of one cluster [all recorded ones]")
    add(stop).add_argument("--port", type=_port_number, help="end only what belongs to this port [all recorded]")
    return parser


@contextlib.contextmanager
def _alone(state_dir: Path) -> Iterator[None]:
    """Let two commands at once take turns, so that the second sees what the first did."""
    state_dir.mkdir(parents=True, exist_ok=True)
    with (state_dir / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(argv: list[str] | None = None) -> int:
    """Run one command; say what went wrong in one sentence."""
    options = _parser().parse_args(argv)
    options.state_dir = options.state_dir.absolute()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # clean up as for Ctrl-C
    cpu_num = getattr(options, "cpu_num", 0)
    if cpu_num > usable_cores():
        print(f"note: {cpu_num} CPUs on {_plural(usable_cores()).replace('CPU', 'core')}: actors will share them")
    try:
        if options.command in ("start", "join") or options.state_dir.is_dir():
            with _alone(options.state_dir):
                options.run(options)
        else:
            options.run(options)
    except (ClusterError, ConnectionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"error: {options.state_dir} cannot be used ({error.strerror}); name another with --state_dir",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; run `bash scripts/cluster_status.sh` to see what runs", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
