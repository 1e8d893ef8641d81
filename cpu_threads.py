"""How many threads each part may use, in one place. Import it before NumPy or Paddle.

Two OpenMP programs whose threads wait by spinning make each other 10 to 100 times slower on two
cores, so nobody here spins (KMP_BLOCKTIME, OMP_WAIT_POLICY) and every runtime starts with one thread.
The learner then takes as many as `learner_threads` says. On a machine with C usable cores:

| part | threads | why |
|---|---|---|
| NumPy's BLAS | 1 | its products here are tiny |
| inference | 1 | a batch of one actor is small; the other core steps environments |
| learner | min(C, 8) | larger batches gain; past 8 the layers are too small to share out |
| environments, `local` | min(C, envs) per actor | sharing C out over the actors leaves a core idle at times |
| environments, remote actor | 1 | PARL gives each actor one CPU |
"""

import os
import warnings
import zlib  # noqa: F401  Paddle 2.6.2's GPU build must find it loaded, or the module cannot be imported after it

# Paddle looks for a C++ compiler's cache when it is imported; nothing is compiled here.
warnings.filterwarnings("ignore", message="No ccache found")

# One thread each, and none that waits by spinning.
THREAD_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "KMP_BLOCKTIME": "0",
    "OMP_WAIT_POLICY": "PASSIVE",
}
for _name, _value in THREAD_SETTINGS.items():
    os.environ.setdefault(_name, _value)

MAX_LEARNER_THREADS = 8


def usable_cores() -> int:
    """The number of cores that this process may run on (a container may grant fewer than there are)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def learner_threads() -> int:
    """Threads of the learner's kernels."""
    return min(usable_cores(), MAX_LEARNER_THREADS)


def env_threads(env_num: int) -> int:
    """Threads that step the `env_num` environments of each actor of this process."""
    return min(env_num, usable_cores())
