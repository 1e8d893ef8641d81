import hashlib
import logging
import os
import signal
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from cluster_tools import ROOT

import checkpoint
from checkpoint import Checkpoint, CheckpointError

RNG_STATE = np.random.default_rng(5).bit_generator.state


def make(sample_steps=12, scale=1.0):
    arrays = {
        "model/policy.bias": np.arange(6, dtype=np.float32) * scale,
        "optimizer/policy.bias/moment1": np.full((2, 3), scale, np.float32),
        "state/actions": np.array([], np.uint8),
    }
    counters = {"sample_steps": sample_steps, "elapsed_s": 1.5}
    return Checkpoint({"env_name": "PongNoFrameskip-v4", "seed": 3}, counters, arrays, {"rng": RNG_STATE})


def assert_equal(loaded, saved):
    assert (loaded.settings, loaded.counters, loaded.state) == (saved.settings, saved.counters, saved.state)
    assert loaded.arrays.keys() == saved.arrays.keys()
    for name, array in saved.arrays.items():
        assert loaded.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded.arrays[name], array)


def test_what_is_saved_is_loaded(tmp_path):
    saved = make()
    checkpoint.save(saved, tmp_path / "run" / "checkpoint.npz")
    assert_equal(checkpoint.load(tmp_path / "run" / "checkpoint.npz"), saved)


def test_the_file_can_be_read_without_this_project(tmp_path):
    checkpoint.save(make(), tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz", allow_pickle=False) as arrays:
        assert arrays["model/policy.bias"].tolist() == [0, 1, 2, 3, 4, 5]
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        for line in archive.read("SHA256SUMS").decode().splitlines():
            digest, name = line.split("  ")
            assert hashlib.sha256(archive.read(name)).hexdigest() == digest


def test_objects_are_neither_written_nor_read(tmp_path):
    objects = np.array([{"a": 1}], dtype=object)
    with pytest.raises(ValueError, match="allow_pickle"):
        checkpoint.save(Checkpoint({}, {}, {"model/a": objects}), tmp_path / "a.npz")
    assert not any(tmp_path.iterdir())
    np.save(tmp_path / "a.npy", objects, allow_pickle=True)
    content = (tmp_path / "a.npy").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("model/a.npy", content)
        archive.writestr("SHA256SUMS", f"{hashlib.sha256(content).hexdigest()}  model/a.npy\n")
    with pytest.raises(CheckpointError):
        checkpoint.load(tmp_path / "a.npz")


def test_a_write_cut_off_at_any_byte_leaves_the_one_before(tmp_path):
    checkpoint.save(make(12), checkpoint.step_path(tmp_path, 12))
    checkpoint.save(make(24), tmp_path / "whole.npz")
    content = (tmp_path / "whole.npz").read_bytes()
    partial = checkpoint.step_path(tmp_path, 24).with_name("step-000000000024.npz.partial")
    for length in range(0, len(content), 7):
        partial.write_bytes(content[:length])
        assert checkpoint.load_newest(tmp_path)[1].counters["sample_steps"] == 12
    checkpoint.prune(tmp_path, keep=1)
    assert not partial.exists()


def test_a_process_killed_while_it_saves_leaves_a_sound_checkpoint(tmp_path):
    code = """
import numpy as np, checkpoint, sys
from checkpoint import Checkpoint
arrays = {f"model/{i}": np.random.rand(100_000) for i in range(20)}
for step in range(10**6):
    checkpoint.save(Checkpoint({}, {"sample_steps": step}, arrays), checkpoint.step_path(sys.argv[1], step))
    checkpoint.prune(sys.argv[1], 2)
    print(step, flush=True)
"""
    for attempt in range(3):
        directory = tmp_path / str(attempt)
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(directory)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        reported = [int(process.stdout.readline()) for _ in range(2 + attempt)]
        process.send_signal(signal.SIGKILL)
        process.communicate()
        _, loaded = checkpoint.load_newest(directory)
        assert loaded.counters["sample_steps"] >= reported[-1]


def test_a_truncated_checkpoint_is_named_and_the_one_before_it_is_used(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("a2c"), "propagate", True)
    checkpoint.save(make(12), checkpoint.step_path(tmp_path, 12))
    damaged = checkpoint.step_path(tmp_path, 24)
    checkpoint.save(make(24), damaged)
    content = damaged.read_bytes()
    for length in range(0, len(content), 7):
        damaged.write_bytes(content[:length])
        caplog.clear()
        with caplog.at_level(logging.WARNING, "a2c"):
            path, loaded = checkpoint.load_newest(tmp_path)
        assert (path.name, loaded.counters["sample_steps"]) == ("step-000000000012.npz", 12)
        assert f"{damaged} is damaged" in caplog.text


def test_any_flipped_byte_is_noticed_or_harmless(tmp_path):
    path = tmp_path / "a.npz"
    checkpoint.save(make(), path)
    content = path.read_bytes()
    for index in range(len(content)):
        path.write_bytes(content[:index] + bytes([content[index] ^ 0xFF]) + content[index + 1 :])
        try:
            loaded = checkpoint.load(path)
        except CheckpointError as error:
            assert str(path) in str(error)
        else:
            assert_equal(loaded, make())


def test_a_wrong_checksum_is_named(tmp_path):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:  # the zip's own checksums are right
        archive.writestr("checkpoint.json", "{}")
        archive.writestr("SHA256SUMS", f"{'0' * 64}  checkpoint.json\n")
    with pytest.raises(CheckpointError, match=r"a\.npz is damaged: the checksum of checkpoint\.json is wrong"):
        checkpoint.load(path)


@pytest.mark.parametrize("content", [b"", b"weights", b"PK\x05\x06" + bytes(18)])
def test_a_file_that_is_no_checkpoint_is_an_error_that_names_it(tmp_path, content):
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.npz is damaged"):
        checkpoint.load(tmp_path / "a.npz")


def test_a_checkpoint_of_a_later_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT_VERSION", 2)
    checkpoint.save(make(), tmp_path / "a.npz")
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="has format 2"):
        checkpoint.load(tmp_path / "a.npz")


def test_where_nothing_is_sound_every_reason_is_given(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        checkpoint.resolve(tmp_path)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        checkpoint.resolve(tmp_path / "missing.npz")
    for sample_steps in (1, 2):
        checkpoint.step_path(tmp_path, sample_steps).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no sound checkpoint .*0002\.npz is damaged.*0001\.npz is damaged"):
        checkpoint.resolve(tmp_path)


def test_a_file_a_run_and_a_directory_of_checkpoints_resolve(tmp_path):
    path = checkpoint.step_path(tmp_path / checkpoint.DIRECTORY, 999)
    checkpoint.save(make(7), checkpoint.step_path(path.parent, 7))
    checkpoint.save(make(999), path)
    checkpoint.save(make(5), path.with_name(checkpoint.BEST))
    for named in (path, tmp_path, path.parent):
        assert checkpoint.resolve(named)[0] == path
    assert checkpoint.newest(path.parent) == path
    assert checkpoint.resolve(path.with_name(checkpoint.BEST))[1].counters["sample_steps"] == 5


def test_the_newest_and_the_best_are_kept(tmp_path):
    checkpoint.save(make(), tmp_path / checkpoint.BEST)
    for sample_steps in (8, 16, 1_000_000, 24):
        checkpoint.save(make(sample_steps), checkpoint.step_path(tmp_path, sample_steps))
    checkpoint.prune(tmp_path, keep=2)
    names = ["best.npz", "step-000000000024.npz", "step-000001000000.npz"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_shipped_checkpoint_has_only_the_model_and_may_be_half_as_large(tmp_path):
    small = checkpoint.without_training_state(make(scale=0.1), dtype="float16")
    checkpoint.save(small, tmp_path / "small.npz")
    loaded = checkpoint.load(tmp_path / "small.npz")
    assert list(loaded.arrays) == ["model/policy.bias"] and loaded.arrays["model/policy.bias"].dtype == np.float16
    assert (loaded.state, loaded.settings["seed"], loaded.counters["sample_steps"]) == ({}, 3, 12)
    (weights,) = checkpoint.model_weights(loaded).values()
    assert weights.dtype == np.float32
    np.testing.assert_allclose(weights, make(scale=0.1).arrays["model/policy.bias"], rtol=1e-3)


def test_the_command_writes_the_small_checkpoint_or_says_why_not(tmp_path):
    run, out = tmp_path / "run", tmp_path / "small.npz"
    command = [sys.executable, "checkpoint.py", str(run), "--out", str(out)]
    missing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert missing.returncode == 1 and not out.exists()
    assert missing.stderr.startswith(f"error: there is no checkpoint {run}; name a run")
    assert missing.stderr.count("\n") == 1
    checkpoint.save(make(), checkpoint.step_path(run / checkpoint.DIRECTORY, 12))
    written = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert written.returncode == 0 and f"python evaluate.py --checkpoint {out}" in written.stdout
    assert checkpoint.load(out).arrays["model/policy.bias"].dtype == np.float16


def test_a_full_disk_leaves_the_old_file_and_no_rest(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    checkpoint.save(make(12), path)

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(make(24), path)
    monkeypatch.undo()
    assert checkpoint.load(path).counters["sample_steps"] == 12
    assert [file.name for file in tmp_path.iterdir()] == ["a.npz"]
