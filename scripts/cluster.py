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
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
try:
    import parl_compat
    from cpu_threads import usable_cores

    import cluster_ports as ports
    from cluster_options import DEFAULT_PORT, command_line
    from cluster_record import ClusterError, Record, records
except ModuleNotFoundError as missing:
    sys.exit(f"error: {sys.executable} has no module {missing.name}; run `bash scripts/setup.sh` first")

START_COMMAND = "`bash scripts/start_cluster.sh`"
STOP_COMMAND = "`bash scripts/stop_cluster.sh`"


def start(options: argparse.Namespace) -> None:
    """Start master, monitor and worker, unless they run already; return once all CPUs are vacant."""
    address = f"{options.host}:{options.port}"
    path = options.state_dir / f"{options.port}.json"
    if _runs_already(path):
        return
    ports.check_port(options.host, options.port)
    ports.warn_of_network(options.host)
    monitor_port, log_server_port = (ports.free_port(options.host) for _ in range(2))
    record = Record(path, address, options.host, options.cpu_num, f"http://{options.host}:{monitor_port}")
    with record.removed_on_failure():
        where = ("--port", str(options.port), "--monitor_port", str(monitor_port))
        record.launch("master", "start.py", "--name", "master", *where)
        record.launch("monitor", "monitor.py", "--monitor_port", str(monitor_port), "--address", address)
        record.wait_until(lambda: ports.cpus(address) is not None, "the master")
        record.launch_worker(log_server_port)
        record.wait_until(lambda: (ports.cpus(address) or (0, 0))[1] >= options.cpu_num, "the worker")
        record.wait_until(lambda: ports.accepts(options.host, monitor_port), "the monitor")
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
    address = options.address
    try:
        before = sum(parl_compat.cluster_cpus(address))
        host = parl_compat.local_address_towards(address)
    except ConnectionError as error:
        reason = str(error).partition(";")[0]
        raise ClusterError(
            f"{reason}; start it there with `bash scripts/start_cluster.sh --host ITS_ADDRESS`, since without "
            "--host a master answers on its own machine only"
        ) from error
    ports.warn_of_network(host)
    number = 1
    while (path := options.state_dir / f"worker-{address.replace(':', '-')}-{number}.json").exists():
        number += 1
    record = Record(path, address, host, options.cpu_num)
    with record.removed_on_failure():
        record.launch_worker(ports.free_port(host))
        record.wait_until(lambda: sum(ports.cpus(address) or (0, 0)) >= before + options.cpu_num, "the worker")
    print(f"{_plural(options.cpu_num)} of this machine joined the PARL cluster at {address}")
    print(f"  log   {record.log('worker')}")
    print(f"next: bash scripts/cluster_status.sh --master_address {address}")
    print("      bash scripts/stop_cluster.sh   (ends the worker here, not the cluster there)")


def status(options: argparse.Namespace) -> None:
    """Print the CPUs of one or of all recorded clusters, and which of our processes live."""
    ours = records(options.state_dir)
    addresses: list[str] = []
    for record in ours:
        if not any(ports.is_same(record.address, known) for known in addresses):
            addresses.append(record.address)
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
            if ports.is_same(record.address, address):
                _print_processes(record)
    if silent == len(addresses):
        sys.exit(1)


def stop(options: argparse.Namespace) -> None:
    """End the recorded processes, and no others."""
    ours = records(options.state_dir)
    chosen = [record for record in ours if options.port in (None, _port(record))]
    if not chosen:
        where = "" if options.port is None else f" with port {options.port}"
        others = " and ".join(sorted({str(_port(record)) for record in ours}))
        hint = f"there is one with port {others}" if others else f"start one with {START_COMMAND}"
        print(f"nothing to stop: no PARL cluster of this project{where} runs on this machine; {hint}")
    # Joined workers first: a worker whose master is gone writes warnings into its log.
    for record in sorted(chosen, key=lambda record: record.path.stem.isdecimal()):
        record.remove()
        if record.path.stem.isdecimal():
            ports.wait_until_free(record.host, _port(record))
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
    cpus = ports.cpus(record.address)
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


def _print_processes(record: Record) -> None:
    ended = record.ended()
    for started in record.processes:
        state = f"ended, see {record.log(started.name)}" if started.name in ended else "runs"
        print(f"  {started.name:8} pid {started.pid}: {state}")
    if record.monitor_url:
        print(f"  page     {record.monitor_url}")


def _port(record: Record) -> int:
    return int(record.address.rpartition(":")[2])


def _plural(cpu_num: int) -> str:
    return f"{cpu_num} CPU" + ("s" if cpu_num > 1 else "")


@contextlib.contextmanager
def _alone(state_dir: Path) -> Iterator[None]:
    """Let two commands at once take turns, so that the second sees what the first did."""
    state_dir.mkdir(parents=True, exist_ok=True)
    with (state_dir / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another cluster command to end", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(argv: list[str] | None = None) -> int:
    """Run one command; say what went wrong in one sentence."""
    options = command_line(__doc__, ROOT / ".cluster", start, join, status, stop).parse_args(argv)
    options.state_dir = options.state_dir.absolute()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # clean up as for Ctrl-C
    cpu_num = getattr(options, "cpu_num", 0)
    if cpu_num > usable_cores():
        print(f"note: --cpu_num {cpu_num} is more than the {usable_cores()} cores here; actors will share them")
    try:
        changes = options.run in (start, join) or (options.run is stop and options.state_dir.is_dir())
        with _alone(options.state_dir) if changes else contextlib.nullcontext():
            options.run(options)
    except (ClusterError, ConnectionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"error: {error.filename or options.state_dir} cannot be used ({error.strerror}); mend that, or name "
            "another folder with --state_dir",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; run `bash scripts/cluster_status.sh` to see what runs", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
