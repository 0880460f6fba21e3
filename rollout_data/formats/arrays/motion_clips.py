"""Reader of motion clips: npz files with joint and body arrays, and JSON files with frames.

A clip is the recorded motion of an articulated body. It has observations, but no actions and no
rewards. The order of bodies and joints is never changed. If the order is known, it is stored in the
metadata.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from storage.core import arguments
from storage.core.durable_files import read_text
from storage.core.fields import Field, Schema, dtype_name
from storage.errors import CorruptFileError, DataFileError, UsageError

from ...sources.episode_info import EpisodeInfo
from ...sources.file_source import FileSource
from ..format_detection import MOTION_TRACKING, clip_files, clip_layout, is_clip
from ..input_checks import KnownFiles, file_inside
from .npz_arrays import Array, NpzArray, is_zip, read_npz

#: Axes of each array of a clip: T frames, J joints, B bodies. A digit is the size of an axis.
_AXES = ("TJ", "TJ", "TB3", "TB4", "TB3", "TB3")
#: Indices of body positions and body rotations in `_AXES` and in a layout (array names in the same
#: order).
_POSITIONS = 2
_ROTATIONS = 3
_BODY_NAMES = "body_names"
_JOINT_NAMES = ("joint_names", "dof_names")
#: Maximum number of bytes of a JSON file. 3 bytes of JSON can need 64 bytes in memory.
_MAX_JSON_BYTES = 16 << 20
#: Maximum number of bytes of an array that becomes metadata.
_MAX_NAMES_BYTES = 1 << 20
_ORDERS = ("breadth", "depth")
_QUATERNIONS = ("wxyz", "xyzw")
#: Names of arrays that state the quaternion order of a clip.
_ORDER_MARKS = ("quaternion_order", "quat_order")
#: Maps each quaternion order to the index of the scalar part.
_SCALAR = {"wxyz": 0, "xyzw": 3}
#: Values of a quaternion with at least this magnitude count as large.
_LARGE = 0.8
#: A quaternion order is likely if its scalar part is large in more than this share of rows.
_SHARE = 0.9
#: Bytes read from the beginning of a pose array for the checks.
_CHECKED_BYTES = 1 << 22
#: Largest deviation of the norm of a unit quaternion from 1.
_TOLERANCE = 1e-2
_Layout = tuple[str, ...]
#: Arrays of a JSON clip by field name, and its metadata.
_Json = tuple[dict[str, Array], dict[str, Any]]


class MotionReader(FileSource):
    """Reader of motion clips: one file, or all files of a folder in the order of their numbers.

    Options:
        body_order: "breadth", "depth", or the names of the bodies, if the files do not state them.
        quaternions: Order of the returned quaternions, "wxyz" or "xyzw". Clips that state another
            order are converted. Clips that state no order are assumed to have this order. None
            keeps the stored order; `metadata["quaternion_order"]` is then "unknown" for clips that
            state no order.
    """

    format = "motion"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"body_order": None, "quaternions": None}

    def scan(self) -> Sequence[EpisodeInfo]:
        self._check_options()
        self._latest: tuple[Path | None, _Json] = (None, ({}, {}))
        self._known = KnownFiles()
        #: Quaternion orders of the clips read so far.
        self._orders = set[str]()
        #: (name of the clip, name of the field) of each quaternion field that `read` converts.
        self._converted = set[tuple[str, str]]()
        #: Advice that was already reported about quaternion orders: (order that the values suggest,
        #: order in which they are read, whether the file states its order).
        self._advised = set[tuple[str, str, bool]]()
        episodes = []
        for path in clip_files(self.path):
            if self.path != path:
                path = file_inside(self.path, path.name)
                if path.suffix != ".npz" and not is_clip(path):
                    continue
            try:
                episodes.append(self._read_npz(path) if is_zip(path) else self._read_json(path))
            except DataFileError as error:
                if path == self.path:
                    raise
                self.problems.append(error.of("", path.stem))
        if len(self._orders) > 1:
            orders = ", ".join(sorted(self._orders))
            self.advise(
                f"The clips of {str(self.path)!r} have quaternions in different orders: {orders}. "
                'Pass quaternions="wxyz" or "xyzw" to convert all clips to one order.'
            )
        if not episodes:
            message = f"{str(self.path)!r} has no readable motion clips."
            if self.problems:
                message += f" {self.problems[0]}"
            raise CorruptFileError(message)
        return episodes

    def _check_options(self) -> None:
        order = self.options["body_order"]
        is_choice = order is None or (isinstance(order, str) and order in _ORDERS)
        is_list = isinstance(order, (list, tuple))
        is_names = is_list and all(isinstance(name, str) for name in order)
        if not is_choice and not is_names:
            raise UsageError(
                f"body_order must be 'breadth', 'depth' or the names of the bodies, got {order!r}."
            )
        quaternions = self.options["quaternions"]
        if quaternions is not None:
            arguments.choice("quaternions", quaternions, _QUATERNIONS)

    def _read_npz(self, path: Path) -> EpisodeInfo:
        arrays = read_npz(path)
        layout = clip_layout(arrays)
        if layout is None:
            needed = ", ".join(MOTION_TRACKING)
            raise CorruptFileError(
                f"{str(path)!r} is not a motion clip. A clip has the arrays {needed}."
            )
        sizes = _sizes(layout, arrays)
        stated_order = self._stated_order(arrays)
        fields: dict[str, NpzArray] = {}
        for name in layout:
            if name in arrays:
                fields[f"observation/{name}"] = arrays.pop(name)
        self._check_poses(path, layout, fields, sizes)

        metadata: dict[str, Any] = {"fps": _fps(arrays.pop("fps"))} if "fps" in arrays else {}
        rotations = f"observation/{layout[_ROTATIONS]}"
        stored_order = stated_order or self.options["quaternions"] or "unknown"
        order = self.options["quaternions"] or stored_order
        if stated_order not in (None, order):
            self._converted.add((path.stem, rotations))
        self._check_order(path, fields.get(rotations), stored_order, stated_order is not None)
        self._orders.add(order)
        metadata["quaternion_order"] = order
        self.metadata["quaternion_order"] = order if len(self._orders) == 1 else "mixed"

        for name, array in arrays.items():
            num_bytes = prod(array.shape) * array.dtype.itemsize
            if name == _BODY_NAMES:
                metadata[name] = _names(array, sizes.get("B"))
            elif name in _JOINT_NAMES:
                metadata[name] = _names(array, sizes.get("J"))
            elif array.dtype.kind in "biuf" and array.shape[:1] == (sizes["T"],):
                fields[name] = array
            elif array.dtype.kind in "biufU" and num_bytes <= _MAX_NAMES_BYTES:
                metadata[name] = array.read().tolist()
            else:
                self.problem(
                    f"{array.where} is {array.dtype}{list(array.shape)}, which is neither "
                    f"{sizes['T']} rows of numbers nor small metadata. The array is left out."
                )
        metadata["body_order"] = self._body_order(path, metadata, sizes.get("B", 0))

        schema_fields = []
        for name, array in fields.items():
            schema_fields.append(
                Field(name, array.shape[1:], dtype_name(array.dtype, f"field {name!r}"))
            )
        schema = Schema(schema_fields)
        return EpisodeInfo(path.stem, sizes["T"], schema, metadata=metadata, source=fields)

    def _body_order(self, path: Path, metadata: dict[str, Any], num_bodies: int) -> str:
        """Return the order of the bodies: "breadth" or "depth" first, by "names", or "unknown".

        If the option `body_order` is a list of body names, the names are added to `metadata`.
        """
        order = self.options["body_order"]
        if order is None or order in _ORDERS:
            return order or ("names" if _BODY_NAMES in metadata else "unknown")
        if len(order) != num_bodies:
            raise UsageError(
                f"body_order has {len(order)} names, but {str(path)!r} has {num_bodies} bodies."
            )
        metadata[_BODY_NAMES] = list(order)
        return "names"

    def _stated_order(self, arrays: dict[str, NpzArray]) -> str | None:
        """Return the quaternion order that a clip states; None if the clip states no order.

        The array with the order is removed from `arrays`, because it is not a field.

        Raises:
            CorruptFileError: The array does not contain a known order.
        """
        name = next((name for name in _ORDER_MARKS if name in arrays), None)
        if name is None:
            return None
        array = arrays.pop(name)
        order = str(array.dtype)
        num_bytes = prod(array.shape) * array.dtype.itemsize
        if array.dtype.kind == "U" and prod(array.shape) == 1 and num_bytes <= _MAX_NAMES_BYTES:
            order = str(array.read().reshape(-1)[0])
        if order not in _QUATERNIONS:
            raise CorruptFileError(
                f"{array.where} is {order[:40]!r}, expected {' or '.join(_QUATERNIONS)}."
            )
        return order

    def _check_order(
        self,
        path: Path,
        rotations: NpzArray | None,
        stored: str,
        is_stated: bool,
    ) -> None:
        """Report advice if the quaternions seem to have an order other than `stored`.

        The rotation of a standing or walking body has a large scalar part, and small x and y parts.
        The scalar part is therefore the first or the last number, whichever is large in nearly all
        rows. Each kind of advice is reported once per folder.
        """
        if rotations is None or not rotations.shape[0]:
            return
        values = _first_rows(rotations)
        rows = abs(np.asarray(values, np.float64).reshape(-1, 4))
        likely = None
        for order, position in _SCALAR.items():
            if likely is None and (rows[:, position] > _LARGE).mean() > _SHARE:
                likely = order
        if likely is None or likely == stored or (likely, stored, is_stated) in self._advised:
            return
        self._advised.add((likely, stored, is_stated))

        message = f"The quaternions of {str(path)!r} look like {likely}"
        if stored == "unknown":
            message += ", but the file does not state their order."
        else:
            message += f", but they are read as {stored}."
        if is_stated:
            message += f" The file states {stored}, which may be wrong."
        else:
            message += f' Pass quaternions="{likely}" if the file was written in that order.'
            message += " Isaac Lab 3 writes xyzw, and earlier versions write wxyz."
        self.advise(message)

    def _check_poses(
        self,
        path: Path,
        layout: _Layout,
        fields: Mapping[str, NpzArray],
        sizes: dict[str, int],
    ) -> None:
        """Report advice if the first frames suggest a wrong order of bodies or quaternions."""
        where = repr(str(path))
        checks: tuple[tuple[int, str, Callable[[Array], Array]], ...] = (
            (_POSITIONS, "has body 0 below the ground", _are_above_ground),
            (_ROTATIONS, "has quaternions that are not unit quaternions", _are_unit_quaternions),
        )
        for number, problem, is_right in checks:
            array = fields.get(f"observation/{layout[number]}")
            if array and sizes["B"]:
                wrong = np.flatnonzero(~is_right(_first_rows(array)))
                if len(wrong):
                    self.advise(
                        f"Frame {wrong[0]} of {where} {problem}. The rows are read as stored."
                    )
        if sizes.get("B", sizes["J"] + 1) != sizes["J"] + 1:
            self.advise(
                f"{where} has {sizes['B']} bodies and {sizes['J']} joints, expected one body more "
                "than joints. Check the bodies for 'world' or merged links."
            )

    def _read_json(self, path: Path) -> EpisodeInfo:
        fields, metadata = self._json(path)
        schema = Schema(Field(name, array.shape[1:], "float64") for name, array in fields.items())
        return EpisodeInfo(
            path.name, len(fields["observation"]), schema, metadata=metadata, source=path
        )

    def _json(self, path: Path) -> _Json:
        self._known.check(path)
        if self._latest[0] != path:
            self._latest = (path, _json_clip(path))
        return self._latest[1]

    def read(self, number: int, name: str, start: int, stop: int) -> Array:
        source = self.episodes[number].source
        if isinstance(source, dict):
            rows: Array = source[name].read(start, stop)
            if (self.episodes[number].name, name) in self._converted:
                is_scalar_last = self.options["quaternions"] == "xyzw"
                return np.roll(rows, -1 if is_scalar_last else 1, axis=-1)
            return rows
        copied: Array = self._json(source)[0][name][start:stop].copy()
        return copied


def _first_rows(array: NpzArray) -> Array:
    """Read the first rows of an array, up to `_CHECKED_BYTES` bytes but at least one row."""
    row_bytes = prod(array.shape[1:]) * array.dtype.itemsize
    return array.read(0, max(1, _CHECKED_BYTES // row_bytes))


def _are_above_ground(positions: Array) -> Array:
    """Return whether body 0 is above the ground in each frame: bool `[T]`."""
    above: Array = positions[:, 0, 2] > 0
    return above


def _are_unit_quaternions(rotations: Array) -> Array:
    """Return whether all quaternions of each frame have norm 1: bool `[T]`."""
    deviations = abs(np.linalg.norm(rotations, axis=-1) - 1)
    are_units: Array = deviations.max(-1) < _TOLERANCE
    return are_units


def _sizes(layout: _Layout, arrays: Mapping[str, NpzArray]) -> dict[str, int]:
    """Check the shapes of all arrays of a clip, and map each axis of `_AXES` to its size.

    Raises:
        CorruptFileError: An array has a wrong shape, or does not contain floating-point numbers.
    """
    sizes = {"3": 3, "4": 4}
    for name, axes in zip(layout, _AXES, strict=True):
        if name not in arrays:
            continue
        array = arrays[name]
        shape = array.shape
        is_right = array.dtype.kind == "f" and len(shape) == len(axes) and shape[0] > 0
        if is_right:
            is_right = all(sizes.get(axis, n) == n for axis, n in zip(axes, shape, strict=True))
        if not is_right:
            wanted = ", ".join(str(sizes.get(axis, axis)) for axis in axes)
            raise CorruptFileError(
                f"{array.where} is {array.dtype}{list(shape)}, expected floating-point numbers "
                f"[{wanted}]."
            )
        sizes.update(zip(axes, shape, strict=True))
    return sizes


def _fps(stored: NpzArray) -> int | float:
    """Read the frame rate in Hz, as an int if the rate is an integer."""
    is_number = prod(stored.shape) == 1 and stored.dtype.kind in "iuf"
    rate = float(stored.read().reshape(-1)[0]) if is_number else 0.0
    if not 0 < rate < float("inf"):
        raise CorruptFileError(
            f"{stored.where} is {stored.dtype}{list(stored.shape)}, expected one frame rate > 0."
        )
    return int(rate) if rate.is_integer() else rate


def _names(stored: NpzArray, num_names: int | None) -> list[str]:
    """Read an array of `num_names` names; None accepts any number of names."""
    is_list = stored.dtype.kind in "US" and not stored.shape[1:]
    is_long = prod(stored.shape) * stored.dtype.itemsize > _MAX_NAMES_BYTES
    is_complete = not num_names or num_names == len(stored)
    if not is_list or is_long or not is_complete:
        expected = f"{num_names} names" if num_names else "names"
        raise CorruptFileError(
            f"{stored.where} is {stored.dtype}{list(stored.shape)}, expected {expected}."
        )
    names = []
    for name in stored.read().tolist():
        names.append(name.decode(errors="replace") if isinstance(name, bytes) else str(name))
    return names


def _json_clip(path: Path) -> _Json:
    """Read a motion clip from a JSON file.

    Returns:
        The fields (poses `[T, D]` and frame durations in seconds `[T]`), and the other keys of the
        file as metadata.
    """
    try:
        clip = json.loads(read_text(path, max_bytes=_MAX_JSON_BYTES))
        rows = np.array(clip.pop("Frames"), np.float64)
        duration = clip.get("FrameDuration")
        if rows.ndim != 2 or not rows.shape[0] or rows.shape[1] < 2:
            raise ValueError(f"'Frames' has shape {list(rows.shape)}, expected [T, D] with D > 1")
        if duration is None:
            # Without a common duration, the first number of each row is its duration.
            durations_s = rows[:, 0]
            observation = rows[:, 1:]
        else:
            durations_s = np.full(len(rows), float(duration))
            observation = rows
        if not np.isfinite(durations_s).all() or not durations_s[0] > 0:
            raise ValueError(
                f"the first frame lasts {durations_s[0]} s, expected finite durations and a first "
                "duration > 0"
            )
    except (
        ValueError,
        TypeError,
        OverflowError,
        AttributeError,
        LookupError,
        RecursionError,
    ) as cause:
        reason = str(cause)[:200].rstrip(".")
        raise CorruptFileError(
            f"{str(path)!r} is not a JSON clip, an object with a table of numbers as 'Frames': "
            f"{reason}."
        ) from cause
    fields = {"observation": observation, "duration_s": durations_s}
    return fields, {"fps": 1 / float(durations_s[0]), **clip}
