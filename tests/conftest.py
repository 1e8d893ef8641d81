"""Shared by all tests."""

from collections.abc import Iterator

import cpu_threads  # noqa: F401  before NumPy and Paddle start their threads

import numpy as np
import pytest
from cluster_tools import Cluster, running_cluster


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of 2 CPUs for all tests that leave it as it was."""
    with running_cluster(tmp_path_factory.mktemp("cluster"), cpu_num=2) as running:
        yield running
