"""The directory that one run of train.py writes to."""

import fcntl
import shutil
from datetime import datetime
from pathlib import Path


class RunDirectory:
    """A run's own directory: created, locked against a second run, an older run's content moved aside.

    With `resume` it must hold a run already, which is left where it is.

    Raises:
        FileExistsError: where another run writes there now, or where it holds something that is no run.
        FileNotFoundError: where it holds no run to resume.
        OSError: where it cannot be written.
    """

    def __init__(self, path: str, resume: bool = False) -> None:
        self.path = Path(path)
        if resume and not (self.path / "config.json").is_file():
            raise FileNotFoundError(
                f"there is no run to resume in {path} (it has no config.json); start one with "
                f"`python train.py --run_dir {path}`"
            )
        if self._has_content() and not (self.path / "config.json").is_file():
            raise FileExistsError(
                f"run_dir is {path!r}, which exists and is no run of train.py (it has no config.json); choose "
                "another --run_dir"
            )
        lock_path = self.path.with_name(self.path.name + ".lock")
        lock_path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = lock_path.open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileExistsError(
                f"another run is writing to {path} now; wait for it, or choose another --run_dir"
            ) from None
        self.moved_to = None
        if not resume:
            self.moved_to = self._move_old_run_aside()
            self.path.mkdir()

    def close(self) -> None:
        self._lock.close()

    def _has_content(self) -> bool:
        return self.path.exists() and not (self.path.is_dir() and not any(self.path.iterdir()))

    def _move_old_run_aside(self) -> Path | None:
        if not self._has_content():
            shutil.rmtree(self.path, ignore_errors=True)
            return None
        started = datetime.fromtimestamp((self.path / "config.json").stat().st_mtime)
        aside = self.path.with_name(f"{self.path.name}-{started:%Y%m%d-%H%M%S}")
        for count in range(1, 1000):
            if not aside.exists():
                break
            aside = self.path.with_name(f"{self.path.name}-{started:%Y%m%d-%H%M%S}-{count}")
        self.path.rename(aside)
        return aside
