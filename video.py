"""Write what the emulator shows to an MP4 that browsers play, or to a small GIF.

with Mp4Writer("game.mp4") as video:
    add_frame_listener(env, video.add)  # env = make_env(..., render_mode="rgb_array")
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import cv2
import gymnasium
import numpy as np
from gymnasium.wrappers import AtariPreprocessing
from PIL import Image

FRAMES_PER_S = 60  # of the console and of the emulator


class _FrameListener(gymnasium.Wrapper):
    def __init__(self, env: gymnasium.Env, listener: Callable[[np.ndarray], None]) -> None:
        super().__init__(env)
        self._listener = listener

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        result = self.env.step(action)
        self._listener(self.env.render())
        return result


def add_frame_listener(env: gymnasium.Env, listener: Callable[[np.ndarray], None]) -> None:
    """Call `listener` with every frame, uint8 [H, W, 3], that the emulator draws while `env` steps.

    `env` comes from `make_env(..., render_mode="rgb_array")`. Its own `render` would show one frame in four:
    the listener sits inside the frame skip. Frames of a game's random start are not shown.
    """
    layer = env
    while not isinstance(layer, AtariPreprocessing):
        layer = layer.env
    layer.env = _FrameListener(layer.env, listener)


def _enlarged(frame: np.ndarray, scale: int) -> np.ndarray:
    return cv2.resize(frame, None, fx=scale, fy=scale, interpolation=cv2.INTER_NEAREST)


class _Writer:
    """A file that appears under its name only when it is whole."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f"there is no directory {self.path.parent} for {path}; make it first")
        self._unfinished = self.path.with_name(f".{self.path.name}.part")

    def __enter__(self) -> Any:
        return self

    def __exit__(self, error_type: type | None, *_: object) -> None:
        try:
            self._finish(discard=error_type is not None)
            if error_type is None:
                self._unfinished.replace(self.path)
        finally:
            self._unfinished.unlink(missing_ok=True)

    def _finish(self, discard: bool) -> None:
        raise NotImplementedError


class Mp4Writer(_Writer):
    """H.264, yuv420p, the index before the pictures: what every browser plays, at the console's 60 frames/s.

    Each pixel becomes `scale` x `scale` pixels; `scale` is even, or frames have even sides.
    """

    def __init__(self, path: str, scale: int = 3) -> None:
        super().__init__(path)
        self._scale = scale
        self._container = av.open(str(self._unfinished), "w", format="mp4", options={"movflags": "+faststart"})
        self._stream = self._container.add_stream("libx264", rate=FRAMES_PER_S)
        self._stream.pix_fmt = "yuv420p"
        self._stream.options = {"crf": "20", "preset": "veryfast"}

    def add(self, frame: np.ndarray) -> None:
        """Append a frame, uint8 [H, W, 3]."""
        frame = _enlarged(frame, self._scale)
        if not self._stream.codec_context.is_open:
            self._stream.height, self._stream.width = frame.shape[:2]
        self._container.mux(self._stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))

    def _finish(self, discard: bool) -> None:
        if not discard:
            self._container.mux(self._stream.encode())
        self._container.close()


class GifWriter(_Writer):
    """The first `seconds` of what is added, every fourth frame (15 per s), in the console's exact colours."""

    FRAME_MS = 70  # GIF counts in 1/100 s: the nearest to 4 frames of 1/60 s

    def __init__(self, path: str, seconds: float, scale: int = 2) -> None:
        super().__init__(path)
        self._scale = scale
        self._most = round(seconds * FRAMES_PER_S)
        self._count = 0
        self._frames: list[np.ndarray] = []

    def add(self, frame: np.ndarray) -> None:
        """Append a frame, uint8 [H, W, 3], if it is among those to be shown."""
        if self._count < self._most and self._count % 4 == 0:
            self._frames.append(frame.copy())
        self._count += 1

    def _finish(self, discard: bool) -> None:
        if discard or not self._frames:
            return
        # The console has 128 colours, a GIF up to 256: no colour is lost, and none flickers.
        pixels = np.stack(self._frames).astype(np.uint32) @ np.uint32([1 << 16, 1 << 8, 1])
        colours, indices = np.unique(pixels, return_inverse=True)
        palette = (colours[:, None] >> np.uint32([16, 8, 0]) & 255).astype(np.uint8).tobytes()
        images = []
        for frame in indices.reshape(pixels.shape).astype(np.uint8):
            image = Image.fromarray(_enlarged(frame, self._scale), "P")
            image.putpalette(palette)
            images.append(image)
        images[0].save(
            self._unfinished,
            format="GIF",
            save_all=True,
            append_images=images[1:],
            duration=self.FRAME_MS,
            loop=0,
            optimize=False,
        )
