"""The command line of `cluster.py`."""

import argparse
import ipaddress
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from cpu_threads import usable_cores

DEFAULT_PORT = 8010

Command = Callable[[argparse.Namespace], None]


def command_line(
    description: str, state_dir: Path, start: Command, join: Command, status: Command, stop: Command
) -> argparse.ArgumentParser:
    """Build the parser; the chosen command is the attribute `run` of what it parses."""
    parser = _Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.commands = parser.add_subparsers(required=True, metavar="{start,join,status,stop}")
    starting = parser.add_command(start, state_dir)
    _add_cpu_num(starting)
    starting.add_argument(
        "--port", type=_port, default=DEFAULT_PORT, help=f"where the master answers [{DEFAULT_PORT}]"
    )
    starting.add_argument(
        "--host",
        type=_host,
        default="127.0.0.1",
        help="this machine's address for other machines, on a trusted network only [127.0.0.1: none]",
    )
    joining = parser.add_command(join, state_dir)
    joining.add_argument(
        "address", type=_address, help=f"where the master answers, ADDRESS[:PORT] [port {DEFAULT_PORT}]"
    )
    _add_cpu_num(joining)
    showing = parser.add_command(status, state_dir)
    showing.add_argument("--master_address", type=_address, help="one cluster, HOST[:PORT] [all recorded ones]")
    stopping = parser.add_command(stop, state_dir)
    stopping.add_argument("--port", type=_port, help="end only what belongs to this port [all recorded]")
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(1, f"error: {message}; see `{self.prog} --help`\n")

    def add_command(self, command: Command, state_dir: Path) -> argparse.ArgumentParser:
        text = command.__doc__ or ""
        added = self.commands.add_parser(command.__name__, help=text.rstrip("."), description=text)
        added.set_defaults(run=command)
        added.add_argument(
            "--state_dir",
            type=Path,
            default=state_dir,
            help=f"folder of the records and logs [{state_dir.name} in the project]",
        )
        return added


def _add_cpu_num(parser: argparse.ArgumentParser) -> None:
    cores = usable_cores()
    parser.add_argument(
        "--cpu_num",
        type=_cpu_num,
        default=cores,
        help=f"how many actors can run here at once [{cores}, one per core]",
    )


def _cpu_num(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of CPUs; give 1 or more")
    return int(text)


def _port(text: str) -> int:
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


def _address(text: str) -> str:
    host, colon, port = text.partition(":")
    if not host:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no address; give ADDRESS[:PORT], such as 10.0.0.5:{DEFAULT_PORT}"
        )
    return f"{host}:{_port(port) if colon else DEFAULT_PORT}"
