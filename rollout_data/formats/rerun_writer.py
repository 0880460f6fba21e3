"""Writing a recording of Rerun, an `.rrd` file, through its SDK (extra `rerun`): to be looked at, not read back.

One rule: each episode is an entity, `/<id>/<field>`, on its own timeline `frame`, and `time` where it has a field of
that kind. An episode is a part in a hidden folder beside the target until all are there; then the parts become one.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from storage.core.durable_files import sync_path
from storage.core.fields import Field

from ..writing.conversion_record import ConversionNote, files_line
from ..writing.json_values import plain
from .encoded_images import axes_of
from .episode_writer import EpisodeToWrite, ForeignWriter, note_in_folder, occupied, remove
from .input_checks import damage_named, optional

_NOTE_ENTITY = "/rollout_conversion"
#: Rows that are read at once.
_PORTION_BYTES = 16 << 20
#: Last part of the name of a field -> its values are seconds.
_TIMES = ("timestamp", "timestamps", "time")
_COLOURS = {1: "L", 3: "RGB", 4: "RGBA"}
_PIXELS = {"uint8": "U8", "uint16": "U16", "float16": "F16"}
Array = np.ndarray[Any, Any]


class Writer(ForeignWriter):
    """A file; numbers become float64 scalars, pictures images, grey ones of other dtypes than uint8 depth images."""

    format = "rerun"
    HOLDS = None

    MADE = ("*.rrd", "*.tmp")

    @classmethod
    def noted(cls, path: Path) -> ConversionNote | None:
        if not path.exists():
            return note_in_folder(_parts_of(path), _parts_of(path))
        text = _note_in(path) if path.is_file() else None
        note = None if text is None else ConversionNote.parse(text)
        if note is None:
            raise occupied(path, f"something without the entity {_NOTE_ENTITY!r} of a conversion")
        if _parts_of(path).exists():
            remove(_parts_of(path))  # a conversion was killed after the file was complete
        return note

    @classmethod
    def is_finished(cls, path: Path) -> bool:
        return path.exists()

    @classmethod
    def note_folder_of(cls, path: Path) -> Path:
        return _parts_of(path)

    @classmethod
    def check_files(cls, path: Path, note: ConversionNote, is_finished: bool) -> None:
        if not is_finished:  # the note is the last part of a complete file, so that a cut file has none
            super().check_files(path, note, is_finished)

    def begin(self) -> set[str]:
        self._rr = optional("rerun", "rerun-sdk", "rerun", "or write recordings of Rerun")
        self._folder = self.note_folder
        return {episode.id for episode in self.episodes if self._part(episode).exists()}

    def _part(self, episode: EpisodeToWrite) -> Path:
        return self._folder / f"{zlib.crc32(repr((episode.id, episode.length)).encode()):08x}.rrd"

    def add(self, episode: EpisodeToWrite) -> None:
        part = self._part(episode)
        stream = self._stream(part.with_suffix(".tmp"))
        try:
            self._log(stream, episode)
        finally:
            stream.disconnect()
        self.note(episode, {part.name: part.with_suffix(".tmp")})
        os.replace(part.with_suffix(".tmp"), part)
        self.written.add(episode.id)

    def _stream(self, path: Path) -> Any:
        stream = self._rr.RecordingStream(self.path.stem, send_properties=False)
        stream.save(path)
        return stream

    def _log(self, stream: Any, episode: EpisodeToWrite) -> None:
        rr = self._rr
        root = self._rr.new_entity_path([episode.id])
        last = episode.length - 1
        known = {name: getattr(episode, name) for name in ("terminated", "truncated", "success", "length")}
        about = {name: value for name, value in known.items() if value is not None}
        metadata = json.dumps(plain(episode.metadata))
        stream.log(root, rr.AnyValues(**about, task=episode.task, metadata=metadata), static=True)
        end = "terminated" if episode.terminated else "truncated" if episode.truncated else "end"
        stream.send_columns(f"{root}/end", self._at([last]), rr.TextLog.columns(text=[end]))
        for name, field in episode.schema.items():
            for what in _changes(field):
                self.changed(f"field {name!r} {what}", episode)
        row_bytes = sum(8 * field.num_elements for field in episode.schema.values())
        size = max(1, _PORTION_BYTES // max(1, row_bytes))
        floats = (
            name for name, one in episode.schema.items() if one.dtype.startswith("float") and one.num_elements == 1
        )
        clock = next((name for name in floats if name.rpartition("/")[2] in _TIMES), None)
        for start in range(0, episode.length, size):
            stop = min(start + size, episode.length)
            times = None if clock is None else np.asarray(episode.read(clock, start, stop), np.float64).reshape(-1)
            for name in (*episode.schema, *episode.texts):
                rows = episode.read(name, start, stop)
                self._send(stream, episode, name, rows, self._at(range(start, stop), times))
            stream.flush()  # otherwise all that was read waits in memory
        final = episode.final_observation
        parts = final if isinstance(final, dict) else {} if final is None else {"": final}
        for rest, values in parts.items():
            name = f"observation/{rest}" if rest else "observation"
            rows = [values] if isinstance(values, str) else np.asarray(values)[None]
            self._send(stream, episode, name, rows, self._at([episode.length]))
        stream.flush()

    def _at(self, frames: Any, times: Array | None = None) -> list[Any]:
        lines = [self._rr.TimeColumn("frame", sequence=frames)]
        is_known = times is not None and bool(np.isfinite(times).all())
        return [*lines, self._rr.TimeColumn("time", duration=times)] if is_known else lines

    def _send(self, stream: Any, episode: EpisodeToWrite, name: str, rows: Any, timelines: list[Any]) -> None:
        rr = self._rr
        path = self._rr.new_entity_path([episode.id, *filter(None, name.split("/"))])
        if name in episode.texts:
            stream.send_columns(path, timelines, rr.TextLog.columns(text=rows))
            return
        axes = axes_of(rows.shape[1:])
        if not axes:
            scalars = self.cast(rows, np.dtype(np.float64), name, episode)
            columns = rr.Scalars.columns(scalars=scalars.reshape(len(rows), -1))
        else:
            rows = np.moveaxis(rows, 1, -1) if axes == "CHW" else rows[..., None] if axes == "HW" else rows
            rows = rows if rows.dtype.name in _PIXELS else self.cast(rows, np.dtype(np.float32), name, episode)
            kind = rr.Image if rows.dtype == np.uint8 or rows.shape[-1] > 1 else rr.DepthImage
            height, width, channels = rows.shape[1:]
            pixels = {"width": width, "height": height, "channel_datatype": _PIXELS.get(rows.dtype.name, "F32")}
            about = rr.components.ImageFormat(**pixels, color_model=_COLOURS[channels] if kind is rr.Image else None)
            stream.log(path, kind.from_fields(format=about), static=True)
            columns = kind.columns(buffer=np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1))
        stream.send_columns(path, timelines, columns)

    def close(self) -> None:
        if not self.is_complete or not self._folder.exists():
            return
        temporary = self._folder / "whole.tmp"
        stream = self._stream(temporary)
        about = self._rr.AnyValues(metadata=json.dumps(plain(self.metadata)))
        stream.log("/recording", about, static=True)
        chunks = optional("rerun.chunk", "rerun-sdk", "rerun", "or write recordings of Rerun")
        for episode in self.episodes:
            if episode.id in self.written:
                stream.send_chunks(chunks.RrdReader(self._part(episode)).stream())
                stream.flush()
        note = self.conversion.text() + files_line({}, finish={})
        stream.log(_NOTE_ENTITY, self._rr.AnyValues(note=note), static=True)
        stream.disconnect()
        sync_path(temporary)
        os.replace(temporary, self.path)
        shutil.rmtree(self._folder)


def _parts_of(path: Path) -> Path:
    """Return the folder of the episodes until they become one file."""
    return path.with_name(f".{path.name}.parts")


def _note_in(path: Path) -> str | None:
    """Return the text of the note in a recording; None if it has none."""
    chunks = optional("rerun.chunk", "rerun-sdk", "rerun", "or write recordings of Rerun")
    with damage_named("read", repr(str(path)), "a recording of Rerun", OSError, RuntimeError, ValueError):
        for chunk in chunks.RrdReader(path).stream():
            if chunk.entity_path == _NOTE_ENTITY:
                for name, values in chunk.to_record_batch().to_pydict().items():
                    if name.endswith("note"):
                        return str(values[0][0])
    return None


def _changes(field: Field) -> Iterator[str]:
    """Yield what a recording of Rerun does not hold of a field."""
    is_picture = bool(axes_of(field.shape))
    if not is_picture and len(field.shape) > 1:
        yield "is flattened: scalars of a step are a list"
