"""The description of a LeRobot dataset, `meta/info.json`: version, names of files, features.

A feature is LeRobot's word for a field: a column of the data files, or a camera. If a description
contradicts the data, shape and dtype of the field are those of the data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from storage.core.arguments import is_real, is_whole
from storage.core.fields import DTYPES, Field
from storage.errors import CorruptFileError, ForeignFileError, UnsafeFileError

from ..encoded_images import picture_format
from ..format_detection import LEROBOT_INFO
from ..input_checks import file_inside, read_object
from ..parquet import first_row
from ..video_frames import DepthCoding
from .lerobot_language import describe, fits_json

#: Maximum bytes of `meta/info.json`. The parsed objects take 20 times as much memory.
MAX_OBJECT_BYTES = 1 << 24
#: Columns with row numbers. These columns are checked, and do not become fields.
INDEX_COLUMNS = ("episode_index", "frame_index", "index")
#: Key of `meta/info.json` that is True while the dataset is being written.
UNFINISHED = "is_unfinished"
#: Pattern of a replacement field in a template, such as `{chunk_index:03d}`: name and format.
_FIELD = re.compile(r"\{(\w+)(?::((?:0?\d)?d?))?\}", re.ASCII)
#: Replacement fields of file name templates whose values are numbers.
_NUMBERS = ("chunk_index", "file_index", "episode_chunk", "episode_index")
_DEFAULT_CHUNKS_SIZE = 1000
#: Maps versions to the default templates for names of data files and video files.
TEMPLATES = {
    "v3.0": (
        "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    ),
    "v2.1": (
        "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    ),
}
_OBSERVATION = "observation"
#: Fields with such a name, or with such a first part of the name. If they have one number per step,
#: they are read as `[T, 1]`. Other fields are read as `[T]`.
_VECTOR_GROUPS = (_OBSERVATION, "action")
#: Numbers of channels that a picture can have.
_CHANNELS = (1, 3, 4)
#: Maximum number of dimensions of a feature.
_MAX_DIMENSIONS = 8
#: Exclusive upper limit of the height, width and channels of a video.
_MAX_VIDEO_SIZE = 1 << 16


@dataclass(frozen=True)
class Info:
    """The description of a dataset, with checked values.

    Attributes:
        path: Folder of the dataset.
        content: Parsed content of `meta/info.json`.
        major: Major version, 2 or 3.
        fps: Frames per second.
        features: Maps feature names to descriptions.
        data_path: Template of the names of data files.
        video_path: Template of the names of video files.
    """

    path: Path
    content: Mapping[str, Any]
    major: int
    fps: float
    features: Mapping[str, Mapping[str, Any]]
    data_path: str
    video_path: str

    @property
    def cameras(self) -> list[str]:
        """Names of the features that are stored in video files."""
        features = self.features.items()
        return [name for name, description in features if description.get("dtype") == "video"]

    @property
    def chunks_size(self) -> int:
        """Number of episodes (version 2) or files (version 3) in a folder."""
        return int(self.content.get("chunks_size", _DEFAULT_CHUNKS_SIZE))


def read_info(path: Path) -> Info:
    """Read and check the description of a dataset.

    Raises:
        ForeignFileError: The dataset has another version, or is stored with Lance.
        DataFileError: The description is damaged.
    """
    file = file_inside(path, LEROBOT_INFO)
    content = read_object(file, MAX_OBJECT_BYTES)
    version = _checked_version(path, content)
    usual_data_path, usual_video_path = TEMPLATES["v3.0" if version == 3 else "v2.1"]
    features: Any = content.get("features")
    fps: Any = content.get("fps")
    data_path: Any = content.get("data_path") or usual_data_path
    video_path: Any = content.get("video_path") or usual_video_path

    def check(name: str, value: Any, is_valid: bool) -> None:
        if not is_valid:
            raise CorruptFileError(f"{str(file)!r} has an invalid {name!r}: {repr(value)[:80]}.")

    check("features", features, _are_objects(features))
    check("fps", fps, is_real(fps) and 0 < float(fps) < float("inf"))
    check("data_path", data_path, isinstance(data_path, str))
    check("video_path", video_path, isinstance(video_path, str))
    for name, least in (("total_episodes", 0), ("total_frames", 0), ("chunks_size", 1)):
        value = content.get(name)
        if value is not None:
            check(name, value, is_whole(value) and least <= value < 1 << 60)

    numbers = dict.fromkeys(_NUMBERS, 0)
    file_name(data_path, numbers, path)
    file_name(video_path, {**numbers, "video_key": ""}, path)
    return Info(path, content, version, float(fps), features, data_path, video_path)


def _are_objects(features: Any) -> bool:
    if not isinstance(features, dict):
        return False
    return all(isinstance(feature, dict) for feature in features.values())


def _checked_version(path: Path, content: Mapping[str, Any]) -> int:
    """Return the major version, 2 or 3; raise `ForeignFileError` for other datasets."""
    version = str(content.get("codebase_version"))
    if content.get("storage_format") == "lance":
        raise ForeignFileError(
            f"{str(path)!r} has storage_format 'lance', which is not supported. Convert the set "
            "to storage_format 'parquet' with lerobot."
        )
    if not re.fullmatch(r"v?(2\.[01]|3\.\d+)", version):
        raise ForeignFileError(
            f"{str(path)!r} has codebase_version {version[:40]!r}. Versions v3.0, v2.1 and v2.0 "
            "are supported."
        )
    return int(version.lstrip("v")[0])


def file_name(template: str, values: Mapping[str, int | str], where: Path) -> str:
    """Return a file name from a template. Replacement fields must be plain names.

    Args:
        template: Template such as "data/chunk-{chunk_index:03d}.parquet".
        values: Maps names of replacement fields to values.
        where: Folder of the dataset, for errors.

    Raises:
        CorruptFileError: The template has a replacement field without a value.
        UnsafeFileError: The file would be outside of the folder.
    """
    rest = _FIELD.sub("", template)
    is_valid = "{" not in rest and "}" not in rest
    for name, number_format in _FIELD.findall(template):
        is_text = isinstance(values.get(name), str)
        if name not in values or (is_text and number_format):
            is_valid = False
    if not is_valid:
        raise CorruptFileError(
            f"{str(where / LEROBOT_INFO)!r} has the invalid file name template {template[:80]!r}. "
            f"A template may contain {', '.join(values)}."
        )
    if template.startswith("/") or ".." in template.split("/"):
        raise UnsafeFileError(
            f"{str(where / LEROBOT_INFO)!r} names files outside of the set: {template[:80]!r}. "
            "Files outside are not read."
        )
    return _FIELD.sub(lambda match: format(values[match[1]], match[2] or ""), template)


@dataclass(frozen=True)
class Feature:
    """A feature of a dataset, and the properties of the field that it becomes.

    Attributes:
        source: Name of the feature: a column or camera.
        name: Name of the field.
        kind: "number", "text", "language", "image", "video" or "annotation". The column of an
            annotation contains numbers of tasks or subtasks. Its field contains their texts.
        shape: Shape of a row of the feature.
        dtype: Dtype of a row.
        depth: Coding of depth in a video.
        unit: Unit of depth: "mm" or "m".
        is_lossy: Whether values were compressed with loss.
        part: Range `start, stop` of the elements of a vector that the field contains. GR00T
            datasets have names for such parts. None means the whole vector.
    """

    source: str
    name: str
    kind: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    depth: DepthCoding | None = None
    unit: str = ""
    is_lossy: bool = False
    part: tuple[int, int] | None = None

    @property
    def field(self) -> Field:
        """Field of a recording with the values of the feature, unless they are texts."""
        shape = self.shape
        if self.part is not None:
            start, stop = self.part
            shape = (stop - start,)
        return Field(self.name, shape, self.dtype)


def field_name(source: str, names: Mapping[str, Any]) -> str:
    """Return the field name of a feature.

    Args:
        source: Name of the feature, such as "observation.state".
        names: Mapping with the names of all features as keys. If a feature is called "action",
            "action.arm" cannot become "action/arm".
    """
    if source == "next.reward":
        return "reward"
    for group in _VECTOR_GROUPS:
        if source.startswith(f"{group}.") and group not in names:
            return f"{group}/{source[len(group) + 1 :]}"
    return source


def column_feature(
    source: str,
    name: str,
    row: Any,
    description: Mapping[str, Any],
) -> Feature | None:
    """Return the feature of a column of numbers or texts; None for a column of other values.

    Args:
        source: Name of the column.
        name: Name of the field.
        row: Arrow array of the first row.
        description: Description of the feature.
    """
    shape, leaf = first_row(row)
    if not shape and leaf == "text":
        return Feature(source, "action_text" if name == "action" else name, "text")
    if leaf not in DTYPES:
        is_language = source.startswith("language_") or description.get("dtype") == "language"
        is_readable = describe(row.type) is not None or (is_language and fits_json(row.type))
        return Feature(source, name, "language") if is_readable else None

    declared = _shape(description.get("shape"))
    if declared is not None and prod(declared) == prod(shape) and len(shape) < 2:
        # Multidimensional rows may be stored as flat lists; the description states their shape.
        shape = declared
    is_vector = name.partition("/")[0] in _VECTOR_GROUPS
    if shape == (1,) and not is_vector:
        shape = ()
    return Feature(source, name, "number", shape, leaf)


def picture_feature(
    source: str,
    name: str,
    description: Mapping[str, Any],
    pixels: Any,
    data: bytes,
) -> Feature:
    """Return the feature of a column of encoded pictures.

    Args:
        source: Name of the column.
        name: Name of the field.
        description: Description of the feature.
        pixels: The first picture, decoded.
        data: The first picture, encoded.
    """
    if pixels.ndim == 3:
        is_lossy = picture_format(data) == "JPEG"
        return Feature(source, name, "image", pixels.shape, "uint8", is_lossy=is_lossy)
    unit = _unit(_camera_info(description))
    return Feature(source, name, "image", pixels.shape, str(pixels.dtype), unit=unit)


def video_feature(source: str, name: str, description: Mapping[str, Any]) -> Feature | None:
    """Return the feature of a camera; None if the size or the coding of its video is unknown."""
    info = _camera_info(description)
    sizes = [info.get(f"video.{axis}") for axis in ("height", "width", "channels")]
    shape = picture_shape(description) or _shape(sizes)
    if shape is None or max(shape) >= _MAX_VIDEO_SIZE:
        return None
    height, width, num_channels = shape
    feature = Feature(source, name, "video", shape, "uint8", is_lossy=True)
    if not (info.get("is_depth_map") or info.get("video.is_depth_map")):
        return feature if num_channels in _CHANNELS else None

    unit = _unit(info)
    coding = _depth_coding(info, unit or "m")
    if not coding.is_valid():
        return None
    return replace(feature, shape=(height, width), dtype=coding.dtype, depth=coding, unit=unit)


def _depth_coding(info: Mapping[str, Any], unit: str) -> DepthCoding:
    parameters: dict[str, Any] = {}
    for name, key in (("minimum", "depth_min"), ("maximum", "depth_max"), ("shift", "shift")):
        value = info.get(f"video.{key}")
        if is_real(value):
            parameters[name] = value
    use_log = info.get("video.use_log") is not False
    return DepthCoding(**parameters, use_log=use_log, unit=unit)


def _unit(info: Mapping[str, Any]) -> str:
    unit = info.get("depth_unit")
    return str(unit) if unit in ("m", "mm") else ""


def picture_shape(description: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the declared shape `[H, W, C]` of a picture; None if no such shape is declared.

    The names of the axes determine their order. Without names, an axis of size 1, 3 or 4 is the
    channel axis.
    """
    shape = _shape(description.get("shape"))
    names = description.get("names")
    if shape is None or len(shape) != 3:
        return None
    has_channels_first = shape[0] in _CHANNELS and shape[2] not in _CHANNELS
    if isinstance(names, list) and len(names) == 3:
        initials = [str(name).lower()[:1] for name in names]
        if "c" in initials:
            has_channels_first = initials[0] == "c"
    return (*shape[1:], shape[0]) if has_channels_first else shape


def _shape(sizes: Any) -> tuple[int, ...] | None:
    """Return a shape from JSON; None if the value is not a list of positive integers."""
    if not isinstance(sizes, list) or len(sizes) > _MAX_DIMENSIONS:
        return None
    if not all(is_whole(size) and 0 < size < 1 << 31 for size in sizes):
        return None
    return tuple(int(size) for size in sizes)


def _camera_info(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the video metadata of a camera. `info` takes precedence over `video_info`."""
    info: dict[str, Any] = {}
    for name in ("video_info", "info"):
        details = description.get(name)
        if isinstance(details, dict):
            info |= details
    return info
