"""Checkpoints: plain arrays and JSON in one file, written whole or not at all. No pickle.

    save(Checkpoint(settings, counters, arrays, state), path)
    path, checkpoint = resolve("train_log/train")  # a file, a run directory, or its checkpoints directory

A file is an .npz: `numpy.load(path)["model/policy.bias"]` reads an array. Beside the arrays it holds
`checkpoint.json` and `SHA256SUMS`, the checksum of every other member; after `unzip`, `sha256sum -c` takes it.

    python checkpoint.py train_log/train --out pong.npz

writes what there is to share of a run: its newest weights in half precision, a tenth of the size. evaluate.py and
--init_from take it; a run cannot be resumed from it.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import io
import json
import logging
import os
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from a2c_config import Parser, exit_status

logger = logging.getLogger("a2c")

FORMAT_VERSION = 1
DIRECTORY = "checkpoints"  # within a run directory
BEST = "best.npz"

_JSON, _SUMS = "checkpoint.json", "SHA256SUMS"
_PARTIAL = ".partial"  # ends the name of a file that is still being written
_WHERE = "name a run, such as train_log/train, which `python train.py` makes, or docs/pong.npz"  # to find one


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names it and what is wrong."""


@dataclass(frozen=True)
class Checkpoint:
    """All that a run needs to go on, or to be judged.

    settings: the run's settings by name.
    counters: sample_steps, updates, ...: numbers by name.
    arrays: by name: "model/...", "optimizer/...", "actor0/...".
    state: what else goes on, ready for JSON: states of random number generators, recent scores.
    """

    settings: dict[str, Any]
    counters: dict[str, float]
    arrays: dict[str, np.ndarray]
    state: dict[str, Any] = field(default_factory=dict)


def save(checkpoint: Checkpoint, path: str | Path) -> None:
    """Write `checkpoint` to `path`; a kill at any byte leaves what was there before.

    Raises:
        OSError: where it cannot be written.
    """
    with _writing(Path(path)) as file, zipfile.ZipFile(file, "w") as archive:
        sums = []
        for name, content in _members(checkpoint):
            archive.writestr(zipfile.ZipInfo(name), content)
            sums.append(f"{hashlib.sha256(content).hexdigest()}  {name}\n")
        archive.writestr(zipfile.ZipInfo(_SUMS), "".join(sums))


def load(path: str | Path) -> Checkpoint:
    """Read the checkpoint in `path`, and check every byte that counts.

    Raises:
        CheckpointError: where there is none, or it is damaged.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {path}; {_WHERE}") from None
    # zipfile answers damage with all of these; RuntimeError and NotImplementedError where a flipped bit
    # asks for a password or a method.
    except (OSError, zipfile.BadZipFile, ValueError, EOFError, RuntimeError, OverflowError) as error:
        raise _damaged(path, str(error) or type(error).__name__) from error
    _check_sums(path, members)
    try:
        content = json.loads(members.pop(_JSON))
        version = content.pop("format_version")
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"the checkpoint {path} has format {version}, but this program reads {FORMAT_VERSION}; read it "
                "with the version of the project that wrote it"
            )
        arrays = {name.removesuffix(".npy"): _read_array(member) for name, member in members.items()}
        return Checkpoint(arrays=arrays, **content)
    except (KeyError, TypeError) as error:
        raise _damaged(path, f"{_JSON} is incomplete ({error})") from error


def step_path(directory: str | Path, sample_steps: int) -> Path:
    """Where the checkpoint after `sample_steps` belongs in `directory`; names sort by age."""
    return Path(directory) / f"step-{sample_steps:012d}.npz"


def newest(directory: str | Path) -> Path | None:
    """The newest step-*.npz in `directory`, unread; None where there is none."""
    return max(Path(directory).glob("step-*.npz"), default=None)


def load_newest(directory: str | Path) -> tuple[Path, Checkpoint]:
    """Load the newest sound step-*.npz in `directory`; a warning names each damaged one that is passed over.

    Raises:
        CheckpointError: where there is none, or all are damaged.
    """
    reasons = []
    for path in sorted(Path(directory).glob("step-*.npz"), reverse=True):
        try:
            return path, load(path)
        except CheckpointError as error:
            logger.warning("%s; trying the one before it", error)
            reasons.append(str(error))
    if reasons:
        raise CheckpointError(f"no sound checkpoint in {directory}: " + "; ".join(reasons))
    raise CheckpointError(f"there is no checkpoint in {directory}; {_WHERE}")


def resolve(path: str | Path) -> tuple[Path, Checkpoint]:
    """Load `path`: a checkpoint, or the newest sound one of a run directory or a checkpoints directory.

    Raises:
        CheckpointError: where there is none, or it is damaged.
    """
    path = Path(path)
    if not path.is_dir():
        return path, load(path)
    return load_newest(path / DIRECTORY if (path / DIRECTORY).is_dir() else path)


def prune(directory: str | Path, keep: int) -> None:
    """Delete all but the newest `keep` step-*.npz, and what a killed run left half written."""
    directory = Path(directory)
    outdated = sorted(directory.glob("step-*.npz"))[:-keep]
    for path in [*outdated, *directory.glob(f"*{_PARTIAL}")]:
        path.unlink(missing_ok=True)


def without_training_state(checkpoint: Checkpoint, dtype: str | None = None) -> Checkpoint:
    """Only what acting needs: model, settings and counters, the weights as `dtype` ("float16") if given."""
    arrays = {name: array for name, array in checkpoint.arrays.items() if name.startswith("model/")}
    if dtype:
        arrays = {name: array.astype(dtype) for name, array in arrays.items()}
    return dataclasses.replace(checkpoint, arrays=arrays, state={})


def model_weights(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """The network's weights by parameter name, float32 whatever they were stored as."""
    return {
        name.removeprefix("model/"): array.astype(np.float32)
        for name, array in checkpoint.arrays.items()
        if name.startswith("model/")
    }


def write_text(path: str | Path, text: str) -> None:
    """Replace a text file whole or not at all."""
    with _writing(Path(path)) as file:
        file.write(text.encode())


def _members(checkpoint: Checkpoint) -> Iterator[tuple[str, bytes]]:
    for name, array in checkpoint.arrays.items():
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, np.asanyarray(array), allow_pickle=False)
        yield f"{name}.npy", buffer.getvalue()
    content = {name: getattr(checkpoint, name) for name in ("settings", "counters", "state")}
    yield _JSON, json.dumps({"format_version": FORMAT_VERSION, **content}, indent=1).encode()


def _read_array(content: bytes) -> np.ndarray:
    return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)


def _check_sums(path: Path, members: dict[str, bytes]) -> None:
    """Remove SHA256SUMS from `members` once every other member agrees with it."""
    if _SUMS not in members:
        raise _damaged(path, f"it has no {_SUMS}, so it is none of train.py's")
    lines = members.pop(_SUMS).decode(errors="replace").splitlines()
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    for name in sums.keys() ^ members.keys():
        raise _damaged(path, f"{name} is {'missing' if name in sums else f'not in {_SUMS}'}")
    for name, content in members.items():
        if hashlib.sha256(content).hexdigest() != sums[name]:
            raise _damaged(path, f"the checksum of {name} is wrong")


def _damaged(path: Path, how: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint {path} is damaged: {how}")


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[BinaryIO]:
    """Write a file beside `path` that takes its place once all of it is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + _PARTIAL)
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # else a power cut could forget the new name
    finally:
        os.close(directory)


def main(options: argparse.Namespace) -> int:
    path, full = resolve(options.checkpoint)
    save(without_training_state(full, options.dtype), options.out)
    print(f"written: {options.out}, {Path(options.out).stat().st_size / 1e6:.2f} MB, the weights of {path}")
    print(f"next: python evaluate.py --checkpoint {options.out}")
    return 0


def _parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("checkpoint", metavar="PATH", help="a checkpoint, a run or a directory of checkpoints")
    parser.add_argument("--out", required=True, metavar="FILE.npz", help="the small checkpoint")
    parser.add_argument(
        "--dtype", choices=("float16", "float32"), default="float16", help="of the weights [float16]"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(exit_status(main, _parse()))
