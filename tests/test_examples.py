"""The lessons run as a user runs them, and what they compute is right."""

import importlib.util
import os
import random
import re
import subprocess
import sys

import pytest
from cluster_tools import ROOT, running_cluster

EXAMPLES = ROOT / "examples"
HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="needs Ray: pip install -r requirements-ray.txt")


@pytest.mark.parametrize("lesson", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_a_lesson_is_short(lesson):
    assert len(lesson.read_text().splitlines()) < 80


def load(name):
    """Import a module from examples/."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def output_of(lesson, *options, master_address="localhost:1"):
    """Run a lesson from another folder; return what it printed. No master answers at port 1."""
    finished = subprocess.run(
        [sys.executable, str(EXAMPLES / lesson), *options],
        env={**os.environ, "PARL_MASTER_ADDRESS": master_address},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "Traceback" not in finished.stderr, finished.stderr
    return finished.stdout


def factors_by_division(number):
    factors, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors + [number] if number > 1 else factors


def test_fermat_factors_small_numbers_of_every_kind():
    factor = load("workloads").factor
    for number in range(2, 2_000):
        assert factor(number) == factors_by_division(number)


@pytest.mark.parametrize(
    "number, expected",
    [
        (3 * 9_999_991, [3, 9_999_991]),  # as far apart as two factors can lie
        (2**20, [2] * 20),
        (3**15, [3] * 15),
        (9_973**2, [9_973, 9_973]),
        (15_485_863, [15_485_863]),
        (2 * 7_368_787, [2, 7_368_787]),
        (99_991 * 99_989, [99_989, 99_991]),
    ],
)
def test_fermat_factors_numbers_that_are_hard_for_it(number, expected):
    assert load("workloads").factor(number) == expected


def test_fermat_factors_across_blocks(monkeypatch):
    workloads = load("workloads")
    monkeypatch.setattr(workloads, "BLOCK", 7)
    numbers = [random.Random(0).randrange(2, 20_000) for _ in range(100)]
    for number in numbers:
        assert workloads.factor(number) == factors_by_division(number)


@pytest.mark.parametrize("number", [-3, 0, 1, 10**10])
def test_fermat_refuses_numbers_out_of_range(number):
    with pytest.raises(ValueError, match=f"number is {number}"):
        load("workloads").factor(number)


@pytest.fixture(scope="module")
def wide_cluster(tmp_path_factory):
    """As many CPUs as the largest lesson asks for."""
    with running_cluster(tmp_path_factory.mktemp("cluster"), cpu_num=5) as running:
        yield running.address


def test_parl_hello_prints_there_and_not_here_on_a_cluster_of_its_own():
    output = output_of("parl_hello.py")
    assert "cluster of this lesson's own" in output
    assert "log url" in output
    assert "another process: True" in output
    assert [line for line in output.splitlines() if line.startswith("hello")] == []
    assert "stdout.log there: hello PARL" in output


def test_parallel_speedup_has_a_line_for_each_way(wide_cluster):
    output = output_of("parallel_speedup.py", "--quick", master_address=wide_cluster)
    ways = ["serial", "threads", "processes", "PARL, wait=True", "PARL, wait=True, threads", "PARL, wait=False"]
    ways += ["Ray"] if HAS_RAY else []
    for way in ways:
        assert re.search(rf"^{way} +[\d.]+ s +[\d.]+x +[\d.]+ s +[\d.]+x", output, re.MULTILINE), output


@needs_ray
def test_ray_basics_shows_what_its_headings_say():
    output = output_of("ray_basics.py")
    assert re.findall(r"the task of ([\d.]+) s", output) == ["0.3", "0.6", "0.9"]


@needs_ray
def test_parameter_server_solves_cartpole_on_ray_and_on_parl(wide_cluster):
    output = output_of("parameter_server.py", master_address=wide_cluster)
    lines = re.findall(r"^(\w+), servers: (\d); games of (\d+) steps", output, re.MULTILINE)
    assert [line[:2] for line in lines] == [("Ray", "1"), ("Ray", "2"), ("PARL", "1"), ("PARL", "2")]
    assert all(int(steps) >= 400 for *_, steps in lines)


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_a_lesson_on_ray_names_the_command_that_installs_it():
    finished = subprocess.run([sys.executable, str(EXAMPLES / "ray_basics.py")], capture_output=True, text=True)
    assert finished.returncode == 1
    assert finished.stderr.startswith("error: Ray is not installed") and finished.stderr.count("\n") == 1
