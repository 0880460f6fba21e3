"""Motion clips: npz files of joints and bodies, in two sets of names, and JSON texts of frames.

One rule: a clip has observations only. The order of bodies and joints is recorded as far as it is known, and nothing
is ever permuted.
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

from ...sources.episode_reader import EpisodeInfo, ForeignReader
from ..format_detection import MOTION_TRACKING, clip_files, clip_layout, is_clip
from ..input_checks import KnownFiles, file_inside
from .npz_arrays import Array, NpzArray, is_zip, read_npz

#: Axes of the arrays of a layout: frames T, joints J, bodies B; the others are sizes.
_AXES = ("TJ", "TJ", "TB3", "TB4", "TB3", "TB3")
_POSITIONS = 2
_ROTATIONS = 3
_BODY_NAMES = "body_names"
_JOINT_NAMES = ("joint_names", "dof_names")
#: Texts of 3 bytes make lists of 64 in memory.
_MAX_JSON_BYTES, _MAX_NAMES_BYTES = 16 << 20, 1 << 20
_ORDERS = ("breadth", "depth")
_QUATERNIONS = ("wxyz", "xyzw")
#: Arrays of one text that mark the order of quaternions in a clip.
_ORDER_MARKS = ("quaternion_order", "quat_order")
#: Order -> the place of the scalar part; from which size on it is large, and in which share of the rows.
_SCALAR = {"wxyz": 0, "xyzw": 3}
_LARGE = 0.8
_SHARE = 0.9
#: Bytes of an array of poses that are compared to tell whether they are right, and how closely.
_CHECKED_BYTES, _TOLERANCE = 1 << 22, 1e-2
_Layout = tuple[str, ...]
#: Fields and metadata of a clip of frames.
_Json = tuple[dict[str, Array], dict[str, Any]]


class Reader(ForeignReader):
    """Reads one clip, or a folder of them in the order of the numbers in their names.

    Options:
        body_order: "breadth", "depth", or the names of the bodies, where the files do not tell.
        quaternions: "wxyz" or "xyzw": the order in which quaternions are given. A clip with a mark of its own is
            turned to it; of a clip without one it says how they are stored, and nothing is turned. None keeps what is
            stored, and `metadata["quaternion_order"]` is "unknown" without a mark.
    """

    format = "motion"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"body_order": None, "quaternions": None}

    def scan(self) -> Sequence[EpisodeInfo]:
        order = self.options["body_order"]
        is_names = isinstance(order, (list, tuple)) and all(isinstance(name, str) for name in order)
        if order is not None and not is_names and not (isinstance(order, str) and order in _ORDERS):
            expected = "body_order='breadth', 'depth' or the names of the bodies"
            raise UsageError("open", repr(str(self.path)), expected, repr(order))
        wanted = self.options["quaternions"]
        if wanted is not None:
            arguments.choice("open", "quaternions", wanted, _QUATERNIONS)
        self._latest: tuple[Path | None, _Json] = (None, ({}, {}))
        self._known = KnownFiles()
        #: Orders of quaternions of the clips, and (clip, field) of those that are turned when they are read.
        self._orders = set[str]()
        self._turned = set[tuple[str, str]]()
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
            advice = 'Open it with quaternions="wxyz" or "xyzw", which turns the clips that are marked otherwise'
            got = ", ".join(sorted(self._orders))
            self.advise("mix the quaternions", f"of {str(self.path)!r}", "one order in all clips", got, advice)
        if not episodes:
            raise CorruptFileError("open", repr(str(self.path)), "clips of motion", str(self.problems or "none"))
        return episodes

    def _read_npz(self, path: Path) -> EpisodeInfo:
        arrays = read_npz(path)
        layout = clip_layout(arrays)
        if layout is None:
            raise CorruptFileError("read", repr(str(path)), f"arrays {', '.join(MOTION_TRACKING)}", "others")
        sizes = _sizes(layout, arrays)
        marked = self._marked_order(path, arrays)
        fields = {f"observation/{name}": arrays.pop(name) for name in layout if name in arrays}
        self._check_poses(path, layout, fields, sizes)
        metadata: dict[str, Any] = {"fps": _fps(arrays.pop("fps"))} if "fps" in arrays else {}
        stored = marked or self.options["quaternions"] or "unknown"
        metadata["quaternion_order"] = self.options["quaternions"] or stored
        if marked not in (None, metadata["quaternion_order"]):
            self._turned.add((path.stem, f"observation/{layout[_ROTATIONS]}"))
        self._check_order(path, fields.get(f"observation/{layout[_ROTATIONS]}"), stored, marked is not None)
        self._orders.add(metadata["quaternion_order"])
        self.metadata["quaternion_order"] = self._orders.copy().pop() if len(self._orders) == 1 else "mixed"
        for name, one in arrays.items():
            if name == _BODY_NAMES or name in _JOINT_NAMES:
                metadata[name] = _names(one, sizes.get("B" if name == _BODY_NAMES else "J"))
            elif one.dtype.kind in "biuf" and one.shape[:1] == (sizes["T"],):
                fields[name] = one
            elif one.dtype.kind in "biufU" and prod(one.shape) * one.dtype.itemsize <= _MAX_NAMES_BYTES:
                metadata[name] = one.read().tolist()
            else:
                expected = f"{sizes['T']} rows of numbers, or few values"
                got = f"{one.dtype}{list(one.shape)}"
                self.problem("read the array", one.where, expected, got, "It is left out")
        metadata["body_order"] = self._body_order(path, metadata, sizes.get("B", 0))
        schema = Schema(Field(name, one.shape[1:], dtype_name(one.dtype, name)) for name, one in fields.items())
        return EpisodeInfo(path.stem, sizes["T"], schema, metadata=metadata, source=fields)

    def _body_order(self, path: Path, metadata: dict[str, Any], num_bodies: int) -> str:
        order = self.options["body_order"]
        if order is None or order in _ORDERS:
            return order or ("names" if _BODY_NAMES in metadata else "unknown")
        if len(order) != num_bodies:
            raise UsageError("open", repr(str(path)), f"{num_bodies} names as body_order", str(len(order)))
        metadata[_BODY_NAMES] = list(order)
        return "names"

    def _marked_order(self, path: Path, arrays: dict[str, NpzArray]) -> str | None:
        """Take the mark of the order of quaternions from the arrays of a clip; None if it has none.

        Raises:
            CorruptFileError: It names another order.
        """
        name = next((name for name in _ORDER_MARKS if name in arrays), None)
        if name is None:
            return None
        one = arrays.pop(name)
        is_short = one.dtype.kind == "U" and prod(one.shape) * one.dtype.itemsize <= _MAX_NAMES_BYTES
        mark = str(one.read().reshape(-1)[0]) if is_short and prod(one.shape) == 1 else str(one.dtype)
        if mark not in _QUATERNIONS:
            raise CorruptFileError("read", one.where, f"{' or '.join(_QUATERNIONS)}", repr(mark[:40]))
        return mark

    def _check_order(self, path: Path, rotations: NpzArray | None, stored: str, is_marked: bool) -> None:
        """Advise where the numbers speak for another order than the one that is stored, or that nobody names.

        A body that stands or walks turns about the vertical axis by little: the scalar part is large, x and y are
        small. So the scalar is first or last, whichever is larger in nearly all rows.
        """
        if rotations is None or not rotations.shape[0]:
            return
        num_rows = max(1, _CHECKED_BYTES // (prod(rotations.shape[1:]) * rotations.dtype.itemsize))
        rows = abs(np.asarray(rotations.read(0, num_rows), np.float64).reshape(-1, 4))
        seen = next((name for name, place in _SCALAR.items() if (rows[:, place] > _LARGE).mean() > _SHARE), None)
        if seen is None or seen == stored or (seen, stored, is_marked) in self._advised:
            return
        self._advised.add((seen, stored, is_marked))  # once for all clips of a folder
        where = repr(str(path))
        share = f"scalar parts near 1 where {seen} has them"
        advice = (
            f'Open it with quaternions="{seen}" if the file was written so; Isaac Lab 3 writes xyzw, earlier ones wxyz'
        )
        if is_marked:
            advice = "The mark in the file is believed; it may be wrong"
        expected = "a mark of the order of quaternions" if stored == "unknown" else f"quaternions as {stored}"
        self.advise("understand", where, expected, f"none, and {share}" if stored == "unknown" else share, advice)

    def _check_poses(self, path: Path, layout: _Layout, fields: Mapping[str, NpzArray], sizes: dict[str, int]) -> None:
        """Report what hints at another order of bodies or numbers; of a long clip looks at the first frames."""
        where = repr(str(path))
        advice = "The rows are given as they are stored"
        checks: tuple[tuple[str, str, Callable[[Array], Array]], ...] = (
            (layout[_POSITIONS], "body 0 above the ground", lambda rows: rows[:, 0, 2] > 0),
            (
                layout[_ROTATIONS],
                "unit quaternions",
                lambda rows: abs(np.linalg.norm(rows, axis=-1) - 1).max(-1) < _TOLERANCE,
            ),
        )
        for name, expected, is_right in checks:
            one = fields.get(f"observation/{name}")
            if one and sizes["B"]:
                num_rows = _CHECKED_BYTES // (prod(one.shape[1:]) * one.dtype.itemsize)
                wrong = np.flatnonzero(~is_right(one.read(0, max(1, num_rows))))
                if len(wrong):
                    self.advise("understand", f"frame {wrong[0]} of {where}", expected, "others", advice)
        if sizes.get("B", sizes["J"] + 1) != sizes["J"] + 1:
            got = f"{sizes['B']} for {sizes['J']} joints"
            advice = "Look for 'world' or merged links"
            self.advise("understand", where, "a body for each joint and the root", got, advice)

    def _read_json(self, path: Path) -> EpisodeInfo:
        fields, metadata = self._json(path)
        schema = Schema(Field(name, one.shape[1:], "float64") for name, one in fields.items())
        return EpisodeInfo(path.name, len(fields["observation"]), schema, metadata=metadata, source=path)

    def _json(self, path: Path) -> _Json:
        self._known.check(path)
        if self._latest[0] != path:
            self._latest = path, _json_clip(path)
        return self._latest[1]

    def read(self, number: int, name: str, start: int, stop: int) -> Array:
        source = self.episodes[number].source
        if isinstance(source, dict):
            found: Array = source[name].read(start, stop)
            if (self.episodes[number].name, name) in self._turned:
                is_last_scalar = self.options["quaternions"] == "xyzw"
                return np.roll(found, -1 if is_last_scalar else 1, axis=-1)
            return found
        copied: Array = self._json(source)[0][name][start:stop].copy()
        return copied


def _sizes(layout: _Layout, arrays: Mapping[str, NpzArray]) -> dict[str, int]:
    """Compare the shapes of all arrays; give the number of frames T, joints J and bodies B."""
    sizes = {"3": 3, "4": 4}
    for name, axes in zip(layout, _AXES, strict=True):
        if name not in arrays:
            continue
        one = arrays[name]
        expected = tuple(sizes.get(axis, size) for axis, size in zip(axes, one.shape, strict=False))
        if one.dtype.kind != "f" or len(one.shape) != len(axes) or one.shape != expected or not one.shape[0]:
            wanted = f"floating numbers [{', '.join(str(sizes.get(axis, axis)) for axis in axes)}]"
            raise CorruptFileError("read", one.where, wanted, f"{one.dtype}{list(one.shape)}")
        sizes.update(zip(axes, one.shape, strict=True))
    return sizes


def _fps(stored: NpzArray) -> int | float:
    is_number = prod(stored.shape) == 1 and stored.dtype.kind in "iuf"
    rate = float(stored.read().reshape(-1)[0]) if is_number else 0.0
    if not 0 < rate < float("inf"):
        raise CorruptFileError("read", stored.where, "one number of frames per second", f"{list(stored.shape)}")
    return int(rate) if rate.is_integer() else rate


def _names(stored: NpzArray, num_names: int | None) -> list[str]:
    is_long = prod(stored.shape) * stored.dtype.itemsize > _MAX_NAMES_BYTES
    if stored.dtype.kind not in "US" or stored.shape[1:] or (num_names or len(stored)) != len(stored) or is_long:
        expected = f"{num_names} names" if num_names else "names"
        raise CorruptFileError("read", stored.where, expected, f"{stored.dtype}{list(stored.shape)}")
    return [name.decode(errors="replace") if isinstance(name, bytes) else str(name) for name in stored.read().tolist()]


def _json_clip(path: Path) -> _Json:
    """Read a clip of frames: poses `[T, D]` and how long each lasts, s; and what else the file says."""
    expected = "a JSON object with 'Frames', rows of equally many numbers"
    try:
        clip = json.loads(read_text(path, max_bytes=_MAX_JSON_BYTES))
        rows, duration = np.array(clip.pop("Frames"), np.float64), clip.get("FrameDuration")
        if rows.ndim != 2 or not rows.shape[0] or rows.shape[1] < 2:
            raise ValueError(f"{list(rows.shape)}")
        each = rows[:, 0] if duration is None else np.full(len(rows), float(duration))
        if not np.isfinite(each).all() or not each[0] > 0:
            raise ValueError(f"a frame of {each[0]} s")
    except (ValueError, TypeError, OverflowError, AttributeError, LookupError, RecursionError) as cause:
        raise CorruptFileError("read", repr(str(path)), expected, str(cause)[:200]) from cause
    observation = rows[:, 1:] if duration is None else rows
    return {"observation": observation, "duration_s": each}, {"fps": 1 / float(each[0]), **clip}
