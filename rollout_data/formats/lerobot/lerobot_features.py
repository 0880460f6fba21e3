"""Fields of a recording as LeRobot features: descriptions, Arrow columns and encoded pictures.

A feature is LeRobot's word for a field: a column of the data files, or a camera. Numbers keep their
dtype. Pictures keep their pixels unless the option `video` is set.
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

#: Maps the columns that LeRobot adds to every row to their dtypes.
SCALARS = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
#: Maps values of the option `video` to the ffmpeg encoder and its settings.
ENCODERS = {"h264": ("libx264", {"crf": "23"}), "av1": ("libsvtav1", {"crf": "30"})}
#: Maps other codecs of LeRobot videos to the encoder and settings for encoding such a video again.
OTHER_ENCODERS = {
    "hevc": ("libx265", {"crf": "25", "x265-params": "log-level=none"}),
    "vp9": ("libvpx-vp9", {"crf": "25", "b:v": "0"}),
}
#: Number of frames from one key frame to the next.
_KEY_FRAME_INTERVAL = 2
#: Numbers of channels that a picture can have.
_CHANNELS = (1, 3, 4)
_PICTURE_AXES = ("height", "width", "channels")
#: Maps field names of this library to the fixed feature names of LeRobot.
_FEATURE_NAMES = {"observation": "observation.state", "reward": "next.reward"}
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class FeatureColumn:
    """A field of the recording, and how it is written as a LeRobot feature.

    Attributes:
        field: Field of the recording.
        name: Name of the feature.
        kind: "number", "string", "image", "depth" or "video". "image" and "depth" are PNG or TIFF
            pictures in a column.
        unit: Unit of depth: "mm" or "m"; "" for other fields.
        codec: Codec of video; "" for other fields.
        copied_description: Description of a video that is copied from another LeRobot dataset;
            None for other fields.
    """

    field: Field
    name: str
    kind: str
    unit: str = ""
    codec: str = ""
    copied_description: Mapping[str, Any] | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the written numbers: bfloat16 becomes float32."""
        if self.field.dtype == "bfloat16":
            return np.dtype("<f4")
        return self.field.numpy_dtype

    @property
    def is_picture(self) -> bool:
        """Whether the column has colors or shades of grey from 0 to 255."""
        return self.kind in ("image", "video")

    def description(self, fps: float) -> dict[str, Any]:
        """Return the description of the feature for `meta/info.json`."""
        if self.copied_description is not None:
            return dict(self.copied_description)

        shape = list(self.field.shape) or [1]
        names = None
        if self.kind in ("image", "depth", "video"):
            names = list(_PICTURE_AXES)
            if len(shape) != 3:
                shape = [*shape, 1]

        dtypes = {"number": self.dtype.name, "depth": "image"}
        description: dict[str, Any] = {
            "dtype": dtypes.get(self.kind, self.kind),
            "shape": shape,
            "names": names,
        }
        if self.kind == "depth":
            description["info"] = {"is_depth_map": True, "depth_unit": self.unit}
        elif self.kind == "video":
            description["info"] = {
                **{f"video.{axis}": size for axis, size in zip(_PICTURE_AXES, shape, strict=True)},
                "video.codec": self.codec,
                "video.pix_fmt": "yuv420p",
                "video.is_depth_map": False,
                "video.fps": fps,
                "has_audio": False,
            }
        return description


def column_of(
    field: Field,
    units: Mapping[str, str],
    codec: str,
    is_v3: bool,
    copied_description: Mapping[str, Any] | None = None,
) -> FeatureColumn:
    """Choose how a field is written: as video, pictures, depth or numbers.

    Args:
        field: Field of the recording.
        units: Maps depth fields to units.
        codec: Codec of pictures as video; "" for PNG.
        is_v3: Whether the dataset is written in version 3.
        copied_description: Description of the video if it is copied from another LeRobot dataset.
    """
    is_picture = is_picture_field(field)
    has_depth = field.name in units and len(field.shape) == 2
    # Version 2 has no feature for depth, so its depth is written as numbers.
    is_depth = is_v3 and has_depth and field.dtype in ("uint16", "float32")
    name = _feature_name(field, is_picture, is_depth, is_v3)
    if is_picture and codec:
        if copied_description is None:
            check_encodable(field)
        return FeatureColumn(
            field, name, "video", codec=codec, copied_description=copied_description
        )
    if is_picture:
        return FeatureColumn(field, name, "image")
    kind = "depth" if is_depth else "number"
    return FeatureColumn(field, name, kind, units.get(field.name, ""))


def _feature_name(field: Field, is_picture: bool, is_depth: bool, is_v3: bool) -> str:
    head, _, rest = field.name.partition("/")
    if (is_picture or is_depth) and head == "observation" and rest:
        camera = rest.removeprefix("images").lstrip("./").replace("/", ".")
        return f"observation.images.{camera or 'camera'}"
    name = _FEATURE_NAMES.get(field.name, field.name.replace("/", "."))
    if is_v3 or is_picture:
        return name
    # Readers of version 2 treat every feature with "image" in its name as a picture.
    return name.replace("images.", "").replace("image", "picture")


def is_picture_field(field: Field) -> bool:
    """Return whether a field contains pictures with 8 bits per channel."""
    return field.dtype == "uint8" and len(field.shape) == 3 and field.shape[2] in _CHANNELS


def check_encodable(field: Field) -> None:
    """Raise `UsageError` if the encoders do not accept pictures of this size."""
    height, width, num_channels = field.shape
    if height % 2 or width % 2 or num_channels != 3:
        raise UsageError(
            f"pictures of {field.name!r} have shape {field.shape}, but video needs an even height, "
            "an even width and three channels. Pass video=''."
        )


def arrow_column(column: FeatureColumn, parts: Iterable[Array], start: int) -> Any:
    """Return the Arrow array of consecutive rows.

    Args:
        column: Column of the rows.
        parts: The rows in parts, `[n, *shape]` each. A part is freed before the next part is read.
        start: Frame of the first row, for the names of pictures.
    """
    if column.kind in ("image", "depth"):
        return _picture_array(parts, start)

    pyarrow, _ = arrow()
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


def _picture_array(parts: Iterable[Array], start: int) -> Any:
    pyarrow, _ = arrow()
    pictures: list[tuple[bytes, str]] = []
    for part in parts:
        for row in part:
            name = f"frame-{start + len(pictures):06d}.png"
            pictures.append((encode_picture(row), name))
    fields = [("bytes", pyarrow.binary()), ("path", pyarrow.string())]
    return pyarrow.array(pictures, pyarrow.struct(fields))


def read_column(column: FeatureColumn, array: Any, where: str) -> Array:
    """Convert a written Arrow array of numbers or depth pictures back to rows: `[n, *shape]`."""
    shape = column.field.shape
    if column.kind == "number":
        return as_rows([array], shape, where)
    return np.stack([decode_picture(row["bytes"], where, shape) for row in array.to_pylist()])


def hub_features(features: Mapping[str, Mapping[str, Any]], languages: Mapping[str, Any]) -> str:
    """Return the description of columns for the package `datasets`, as JSON.

    Only types that old releases of `datasets` know are used. lerobot up to 0.3 recognizes pictures
    only by this description.

    Args:
        features: Maps feature names to descriptions as in `meta/info.json`.
        languages: Maps names of language features to Arrow types.
    """
    columns: dict[str, Any] = {}
    for name, description in features.items():
        shape = tuple(description["shape"])
        dtype = description["dtype"]
        value = {"dtype": dtype, "_type": "Value"}
        if name in languages:
            columns[name] = hub_feature(describe(languages[name]))
        elif dtype == "image":
            columns[name] = {"_type": "Image"}
        elif shape == (1,):
            columns[name] = value
        elif len(shape) == 1:
            columns[name] = {"feature": value, "length": shape[0], "_type": "Sequence"}
        else:
            columns[name] = {"shape": shape, "dtype": dtype, "_type": f"Array{len(shape)}D"}
    return json.dumps({"info": {"features": columns}})


def write_video(path: Path, parts: Iterable[Array], fps: float, codec: str) -> None:
    """Encode pictures as MP4. Many key frames make it fast to read single frames.

    Args:
        path: File to write.
        parts: Pictures in parts, uint8 `[n, H, W, 3]` each.
        fps: Frames per second.
        codec: "h264", "av1", "hevc" or "vp9".
    """
    av = optional("av", "av", "video", "video")
    os.environ.setdefault("SVT_LOG", "1")  # By default, the AV1 encoder prints lines for each file.
    encoder, settings = {**ENCODERS, **OTHER_ENCODERS}[codec]
    options = {**settings, "g": str(_KEY_FRAME_INTERVAL)}
    rate = Fraction(fps).limit_denominator(1 << 16)
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream(encoder, rate=rate, options=options)
        stream.pix_fmt = "yuv420p"
        pictures = (picture for part in parts for picture in part)
        for number, picture in enumerate(pictures):
            if number == 0:  # PyAV accepts no size after the encoder has started.
                stream.height, stream.width = picture.shape[:2]
            pixels = np.ascontiguousarray(picture)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = number
            frame.time_base = 1 / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
