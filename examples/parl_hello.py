"""PARL in one class: its methods run in another process, and so does its `print`.

    python examples/parl_hello.py

The decorator turns a class into a remote one: making an object takes one vacant CPU of the cluster, and each
call travels there and back. What the object prints does not come back. It goes to a log file on the machine
where the object lives. The address that `parl.connect` reports is a page that shows these files of all the
machines: with a cluster that stays, `bash scripts/start_cluster.sh`, open it in a browser.

    (a PARL cluster of this lesson's own at 127.0.0.1:49481)
    [12-01 09:54:46 MainThread @client.py:434] Remote actors log url: http://127.0.0.1:44165/logs?client_id=...
    calling greet()
    it ran in another process: True; what it printed did not appear here
    it stands in stdout.log there: hello PARL, from a process of the cluster
"""

import os
from pathlib import Path

import lesson  # before parl: it imports parl_compat, which makes `import parl` work on today's Python

import parl
from parl.utils import logger


@parl.remote_class
class Greeter:
    """Runs in a process of the cluster; PARL sends it this file, down to the end of this class."""

    def greet(self, name: str) -> tuple[int, str]:
        """Print there; return the process id and the folder of the log."""
        print(f"hello {name}, from a process of the cluster")
        return os.getpid(), logger.get_dir()


def main() -> None:
    with lesson.parl_cluster(cpu_num=1) as address:
        parl.connect(address)
        greeter = Greeter()
        print("calling greet()")
        remote_pid, log_dir = greeter.greet("PARL")
        print(f"it ran in another process: {remote_pid != os.getpid()}; what it printed did not appear here")
        print("it stands in stdout.log there:", Path(log_dir, "stdout.log").read_text().strip())


if __name__ == "__main__":
    main()
