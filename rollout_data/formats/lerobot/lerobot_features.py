"""Fields as LeRobot's features: their descriptions, columns and pictures.

One rule: numbers keep their dtype and pictures their pixels, unless video is asked for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from storage.core.fields import Field
from storage.errors import UsageError

from ..encoded_images import decode_picture, encode_picture
from ..input_checks import optional
from ..parquet import arrow, as_rows
from .lerobot_language import describe, hub_feature

SCALARS = {"timestamp": "float32", **dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), "int64")}
#: What the option `video` may be -> the encoder of ffmpeg, and its settings.
ENCODERS = {"h264": ("libx264", {"crf": "23"}), "av1": ("libsvtav1", {"crf": "30"})}
#: Encoders of video that is encoded again in its own codec: those of `ENCODERS`, and codecs of other sets.
OTHER_ENCODERS = {
    "hevc": ("libx265", {"crf": "25", "x265-params": "log-level=none"}),
    "vp9": ("libvpx-vp9", {"crf": "25", "b:v": "0"}),
}
_KEY_FRAME_EVERY = 2
_CHANNELS = (1, 3, 4)
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Column:
    """A field of ours and the feature that it becomes.

    Attributes:
        field: Ours.
        name: The feature.
        kind: "number", "string", "image", "depth" or "video".
        unit: Of depth.
        codec: Of video.
        about: Description of a video that is copied from another LeRobot set; None for other fields.
    """

    field: Field
    name: str
    kind: str
    unit: str = ""
    codec: str = ""
    about: Mapping[str, Any] | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of its numbers, as written: bfloat16 becomes float32."""
        return np.dtype("<f4") if self.field.dtype == "bfloat16" else self.field.numpy_dtype

    @property
    def is_picture(self) -> bool:
        """Whether it has colours, or shades of grey, from 0 to 255."""
        return self.kind in ("image", "video")

    def feature(self, fps: float) -> dict[str, Any]:
        """Describe it as `meta/info.json` does."""
        if self.about is not None:
            return dict(self.about)
        shape = list(self.field.shape) or [1]
        names = None
        if self.kind in ("image", "depth", "video"):
            names = ["height", "width", "channels"]
            shape = shape if len(shape) == 3 else [*shape, 1]
        dtype = {"number": self.dtype.name, "depth": "image"}.get(self.kind, self.kind)
        about: dict[str, Any] = {"dtype": dtype, "shape": shape, "names": names}
        if self.kind == "depth":
            about["info"] = {"is_depth_map": True, "depth_unit": self.unit}
        elif self.kind == "video":
            sizes = {f"video.{name}": size for name, size in zip(("height", "width", "channels"), shape, strict=True)}
            coding = {"video.codec": self.codec, "video.pix_fmt": "yuv420p", "video.is_depth_map": False}
            about["info"] = {**sizes, **coding, "video.fps": fps, "has_audio": False}
        return about


def column_of(
    field: Field, units: Mapping[str, str], codec: str, is_v3: bool, about: Mapping[str, Any] | None = None
) -> Column:
    """Return the column of a field.

    Args:
        field: Of the recording.
        units: Units of depth, which version 2 has no pictures for.
        codec: Of pictures as video; "" for PNG.
        is_v3: Whether the version is 3.
        about: Description of the video if it is copied from another LeRobot set.
    """
    head, _, rest = field.name.partition("/")
    name = {"observation": "observation.state", "reward": "next.reward"}.get(field.name, field.name.replace("/", "."))
    is_picture = is_picture_field(field)
    is_depth = is_v3 and field.name in units and len(field.shape) == 2 and field.dtype in ("uint16", "float32")
    if (is_picture or is_depth) and head == "observation" and rest:
        name = f"observation.images.{rest.removeprefix('images').lstrip('./').replace('/', '.') or 'camera'}"
    elif not is_v3 and not is_picture:  # whose readers take every feature with "image" in its name for pictures
        name = name.replace("images.", "").replace("image", "picture")
    if is_picture and codec:
        if about is None:
            check_encodable(field)
        return Column(field, name, "video", codec=codec, about=about)
    if is_picture:
        return Column(field, name, "image")
    return Column(field, name, "depth" if is_depth else "number", units.get(field.name, ""))


def is_picture_field(field: Field) -> bool:
    """Return whether a field holds pictures of 8 bits."""
    return field.dtype == "uint8" and len(field.shape) == 3 and field.shape[2] in _CHANNELS


def check_encodable(field: Field) -> None:
    """Raise if the encoders do not take pictures of this size."""
    if field.shape[0] % 2 or field.shape[1] % 2 or field.shape[2] != 3:
        expected = "pictures of even height and width, and three channels"
        raise UsageError("write video", f"of {field.name!r}", expected, str(field.shape), "Write with video=''")


def arrow_column(column: Column, parts: Iterable[Array], start: int) -> Any:
    """Make the column of an episode of its rows from `start` on; each part is freed before the next is read."""
    pyarrow, _ = arrow()
    if column.kind in ("image", "depth"):
        pictures = [encode_picture(row) for part in parts for row in part]
        kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
        return pyarrow.array([(data, f"frame-{frame:06d}.png") for frame, data in enumerate(pictures, start)], kind)
    rows = np.concatenate(list(parts))
    shape = column.field.shape
    values = pyarrow.array(rows.reshape(-1))
    if prod(shape) == 1 and len(shape) < 2:
        return values
    if len(shape) == 1:
        return pyarrow.FixedSizeListArray.from_arrays(values, shape[0])
    for size in reversed(shape):
        offsets = np.arange(0, len(values) + 1, size, dtype=np.int32)
        values = pyarrow.ListArray.from_arrays(pyarrow.array(offsets), values)
    return values


def read_column(column: Column, array: Any, where: str) -> Array:
    """Read rows of numbers or depth from what `arrow_column` made: `[n, *shape]`."""
    if column.kind == "number":
        return as_rows([array], column.field.shape, where)
    return np.stack([decode_picture(row["bytes"], where, column.field.shape) for row in array.to_pylist()])


def hub_features(features: Mapping[str, Mapping[str, Any]], languages: Mapping[str, Any]) -> str:
    """Describe columns as the package `datasets` does, in types that its old releases know.

    lerobot up to 0.3 takes pictures for pictures only where a file says so. `languages`: name -> Arrow type.
    """
    found: dict[str, Any] = {}
    for name, about in features.items():
        shape = tuple(about["shape"])
        value = {"dtype": about["dtype"], "_type": "Value"}
        if name in languages:
            found[name] = hub_feature(describe(languages[name]))
        elif about["dtype"] == "image":
            found[name] = {"_type": "Image"}
        elif shape == (1,):
            found[name] = value
        elif len(shape) == 1:
            found[name] = {"feature": value, "length": shape[0], "_type": "Sequence"}
        else:
            found[name] = {"shape": shape, "dtype": about["dtype"], "_type": f"Array{len(shape)}D"}
    return json.dumps({"info": {"features": found}})


def write_video(path: Path, parts: Iterable[Array], fps: float, codec: str) -> None:
    """Encode the pictures of an episode, `[n, H, W, 3]` each part, as MP4 with many key frames."""
    av = optional("av", "av", "video", "video")
    os.environ.setdefault("SVT_LOG", "1")  # otherwise the AV1 encoder prints lines for each file
    encoder, settings = {**ENCODERS, **OTHER_ENCODERS}[codec]
    rate = Fraction(fps).limit_denominator(1 << 16)
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream(encoder, rate=rate, options={**settings, "g": str(_KEY_FRAME_EVERY)})
        stream.pix_fmt = "yuv420p"
        for number, row in enumerate(row for part in parts for row in part):
            if number == 0:  # once the encoder has begun, PyAV takes no size
                stream.height, stream.width = row.shape[:2]
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(row), format="rgb24")
            frame.pts, frame.time_base = number, 1 / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
