"""scripts/try_two_hosts.py: a cluster of two machines, for which two network namespaces stand."""

import importlib.util
import os
import shutil
import subprocess
import sys

import pytest
from cluster_tools import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import try_two_hosts


def namespaces():
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() or not shutil.which("ip"), reason="needs root and iproute2")
@pytest.mark.parametrize("engine", ["parl", "ray"])
def test_actors_of_both_hosts_take_part(engine):
    if not importlib.util.find_spec(engine):
        pytest.skip(f"{engine} is not installed")
    before = namespaces()
    command = [sys.executable, str(ROOT / "scripts" / "try_two_hosts.py"), "--engine", engine]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "actors: 1 on 10.77.0.1, 1 on 10.77.0.2" in ran.stdout
    assert "steps 4,096/4,000" in ran.stdout
    assert namespaces() == before


def test_without_root_the_command_that_has_it_is_named(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert try_two_hosts.main([]) == 1
    assert "run `sudo " in capsys.readouterr().err


def test_without_iproute2_its_package_is_named(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    assert try_two_hosts.main([]) == 1
    assert "apt-get install iproute2" in capsys.readouterr().err
