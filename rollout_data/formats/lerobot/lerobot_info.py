"""What `meta/info.json` says of a LeRobot dataset: version, names of files, features.

One rule: names are made of the known numbers and names only, and features become fields by what the data hold.
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

#: As objects they take twenty times as much.
MAX_OBJECT_BYTES = 1 << 24
#: Columns that number the rows; they are checked, and are no fields.
INDEX_COLUMNS = ("episode_index", "frame_index", "index")
#: True in the description of a set while it is written: its data files are the truth.
UNFINISHED = "is_unfinished"
_FIELD = re.compile(r"\{(\w+)(?::((?:0?\d)?d?))?\}", re.ASCII)
_NUMBERS = ("chunk_index", "file_index", "episode_chunk", "episode_index")
_DEFAULT_CHUNKS_SIZE = 1000
#: Version -> the usual names of data files and of video files.
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


@dataclass(frozen=True)
class Info:
    """The checked part of `meta/info.json`.

    Attributes:
        path: The folder.
        content: All of it.
        major: 2 or 3.
        fps: Frames in a second.
        features: Name -> what is said of it.
        data_path, video_path: Templates of the names of files.
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
        """Names of the features in video files."""
        return [name for name, about in self.features.items() if about.get("dtype") == "video"]

    @property
    def chunks_size(self) -> int:
        """Episodes, or files in version 3, in a folder."""
        return int(self.content.get("chunks_size", _DEFAULT_CHUNKS_SIZE))


def read_info(path: Path) -> Info:
    """Read and check the description of a dataset.

    Raises:
        ForeignFileError: It is of another version, or stored with Lance.
        DataFileError: It is damaged.
    """
    file = file_inside(path, LEROBOT_INFO)
    content = read_object(file, MAX_OBJECT_BYTES)
    version = str(content.get("codebase_version"))
    if content.get("storage_format") == "lance":
        advice = "Convert it with lerobot to storage_format 'parquet'; the extra for Lance is not part of this release"
        raise ForeignFileError("open", repr(str(path)), "Parquet files", "storage_format 'lance'", advice)
    if not re.fullmatch(r"v?(2\.[01]|3\.\d+)", version):
        raise ForeignFileError("open", repr(str(path)), "codebase_version v3.0, v2.1 or v2.0", repr(version[:40]))
    is_v3 = version.lstrip("v").startswith("3")
    features: Any = content.get("features")
    fps: Any = content.get("fps")
    usual = zip(("data_path", "video_path"), TEMPLATES["v3.0" if is_v3 else "v2.1"], strict=True)
    paths: dict[str, Any] = {name: content.get(name) or template for name, template in usual}
    checks = {
        "features": (features, isinstance(features, dict) and all(isinstance(one, dict) for one in features.values())),
        "fps": (fps, is_real(fps) and 0 < float(fps) < float("inf")),
        **{name: (value, isinstance(value, str)) for name, value in paths.items()},
        **{
            name: (content[name], is_whole(content[name]) and 0 <= content[name] < 1 << 60)
            for name in ("total_episodes", "total_frames", "chunks_size")
            if content.get(name) is not None
        },
    }
    for name, (value, is_right) in checks.items():
        if not is_right or (name == "chunks_size" and not value):
            raise CorruptFileError("open", repr(str(file)), f"a {name!r} as LeRobot writes it", repr(value)[:80])
    for name, key in (("data_path", {}), ("video_path", {"video_key": ""})):
        file_name(paths[name], {**dict.fromkeys(_NUMBERS, 0), **key}, path)
    return Info(path, content, 3 if is_v3 else 2, float(fps), features, **paths)


def file_name(template: str, values: Mapping[str, int | str], where: Path) -> str:
    """Put numbers and names into a template; its fields are names, never expressions."""
    rest = _FIELD.sub("", template)
    fields = _FIELD.findall(template)
    is_known = all(name in values and not (spec and isinstance(values[name], str)) for name, spec in fields)
    if not is_known or "{" in rest or "}" in rest:
        expected = f"a template of {', '.join(values)}"
        raise CorruptFileError("open", repr(str(where / LEROBOT_INFO)), expected, repr(template[:80]))
    if template.startswith("/") or ".." in template.split("/"):
        raise UnsafeFileError("open", repr(template[:80]), f"files below {str(where)!r}", "names that lead out of it")
    return _FIELD.sub(lambda found: format(values[found[1]], found[2] or ""), template)


@dataclass(frozen=True)
class Feature:
    """A field, and where its values are.

    Attributes:
        source: Name of the column or camera.
        name: Of the field.
        kind: "number", "text", "language", "image", "video" or "annotation" (the number of a task or subtask).
        shape, dtype: Of a row.
        depth: How a video of depth is coded.
        unit: Of depth: "mm" or "m".
        is_lossy: Stored with loss.
        part: `start, stop` of the numbers of a vector that it is, of a GR00T dataset; None for all.
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
        """As delivered, if it is not of texts."""
        return Field(self.name, self.shape if self.part is None else (self.part[1] - self.part[0],), self.dtype)


def field_name(source: str, names: Mapping[str, Any]) -> str:
    """Name the field of a feature."""
    if source == "next.reward":
        return "reward"
    for group in (_OBSERVATION, "action"):
        if source.startswith(f"{group}.") and group not in names:
            return f"{group}/{source[len(group) + 1 :]}"
    return source


def column_feature(source: str, name: str, row: Any, about: Mapping[str, Any]) -> Feature | None:
    """Describe the field of a column of numbers or texts; None if it holds something else.

    Args:
        source: The column.
        name: The field.
        row: An arrow array of its first row.
        about: What the description says of it.
    """
    shape, leaf = first_row(row)
    declared = _shape(about)
    if not shape and leaf == "text":
        return Feature(source, "action_text" if name == "action" else name, "text")
    if leaf not in DTYPES:
        is_language = source.startswith("language_") or about.get("dtype") == "language"
        is_read = describe(row.type) is not None or (is_language and fits_json(row.type))
        return Feature(source, name, "language") if is_read else None
    is_vector = name.partition("/")[0] in (_OBSERVATION, "action")
    if declared is not None and prod(declared) == prod(shape) and len(shape) < 2:
        shape = declared  # in one level, as a scalar for (1,)
    return Feature(source, name, "number", () if shape == (1,) and not is_vector else shape, leaf)


def picture_feature(source: str, name: str, about: Mapping[str, Any], pixels: Any, data: bytes) -> Feature:
    """Describe a column of encoded pictures by its first one."""
    if pixels.ndim == 3:
        is_lossy = picture_format(data) == "JPEG"
        return Feature(source, name, "image", pixels.shape, "uint8", is_lossy=is_lossy)
    return Feature(source, name, "image", pixels.shape, str(pixels.dtype), unit=_unit(_camera_info(about)))


def video_feature(source: str, name: str, about: Mapping[str, Any]) -> Feature | None:
    """Describe a camera in video files; None if its size or its coding cannot be told."""
    info = _camera_info(about)
    sizes = [info.get(f"video.{size}") for size in ("height", "width", "channels")]
    shape = picture_shape(about) or _shape({"shape": sizes})
    if shape is None or max(shape) >= 1 << 16:
        return None
    height, width, channels = shape
    feature = Feature(source, name, "video", (height, width, channels), "uint8", is_lossy=True)
    if not (info.get("is_depth_map") or info.get("video.is_depth_map")):
        return feature if channels in (1, 3, 4) else None
    keys = {"minimum": "depth_min", "maximum": "depth_max", "shift": "shift"}
    told = {ours: info[f"video.{key}"] for ours, key in keys.items() if is_real(info.get(f"video.{key}"))}
    unit = _unit(info)
    coding = DepthCoding(**told, use_log=info.get("video.use_log") is not False, unit=unit or "m")
    if not coding.is_valid():
        return None
    return replace(feature, shape=(height, width), dtype=coding.dtype, depth=coding, unit=unit)


def _unit(info: Mapping[str, Any]) -> str:
    return str(info["depth_unit"]) if info.get("depth_unit") in ("m", "mm") else ""


def picture_shape(about: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return `[H, W, C]` of a feature: by the names of its axes, without names by the axis of 1, 3 or 4."""
    shape = _shape(about)
    names = about.get("names")
    if shape is None or len(shape) != 3:
        return None
    firsts = [str(name).lower()[:1] for name in names] if isinstance(names, list) and len(names) == 3 else []
    is_chw = shape[0] in (1, 3, 4) and shape[2] not in (1, 3, 4)
    if "c" in firsts:
        is_chw = firsts[0] == "c"
    return (*shape[1:], shape[0]) if is_chw else shape


def _shape(about: Mapping[str, Any]) -> tuple[int, ...] | None:
    shape: Any = about.get("shape")
    is_shape = isinstance(shape, list) and len(shape) <= 8 and all(is_whole(n) and 0 < n < 1 << 31 for n in shape)
    return tuple(int(size) for size in shape) if is_shape else None


def _camera_info(about: Mapping[str, Any]) -> Mapping[str, Any]:
    found = [about.get(name) for name in ("video_info", "info")]
    return {key: value for one in found if isinstance(one, dict) for key, value in one.items()}
