"""Writer of `.rrd` files for the Rerun viewer, with the Rerun SDK (extra `rerun`).

A field is the entity `/<id>/<field>` on the timeline `frame`, and on `time` if the episode has
recorded times. Each episode is first written to a file in a hidden folder next to the target. At
the end, all episode files are merged into one file.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from storage.core.durable_files import replace_file
from storage.core.fields import Field

from ..writing.conversion_record import ConversionNote, files_line
from ..writing.json_values import plain
from .encoded_images import axes_of
from .episode_writer import EpisodeToWrite, ForeignWriter, note_in_folder, occupied, remove
from .input_checks import damage_named, optional

_NOTE_ENTITY = "/rollout_conversion"
#: Bytes of rows read at a time.
_PORTION_BYTES = 16 << 20
#: Fields with such a name, or with such a last part of the name, contain times in seconds.
_TIMES = ("timestamp", "timestamps", "time")
_COLOURS = {1: "L", 3: "RGB", 4: "RGBA"}
_PIXELS = {"uint8": "U8", "uint16": "U16", "float16": "F16"}
Array = np.ndarray[Any, Any]


class RerunWriter(ForeignWriter):
    """Writer of one `.rrd` file.

    Numbers become float64 scalars, and pictures become images. A grey picture becomes a depth image
    unless its dtype is uint8.
    """

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
            raise occupied(path, f"contains no entity {_NOTE_ENTITY!r} of a conversion")
        if _parts_of(path).exists():
            remove(_parts_of(path))  # Left by a killed conversion.
        return note

    @classmethod
    def is_finished(cls, path: Path) -> bool:
        return path.exists()

    @classmethod
    def note_folder_of(cls, path: Path) -> Path:
        return _parts_of(path)

    @classmethod
    def check_files(cls, path: Path, note: ConversionNote, is_finished: bool) -> None:
        # A finished file needs no check: its record is its last part, so it is not truncated.
        if not is_finished:
            super().check_files(path, note, is_finished)

    def begin(self) -> set[str]:
        self._rr = optional("rerun", "rerun-sdk", "rerun", "recordings of Rerun")
        self._folder = self.note_folder
        return {episode.id for episode in self.episodes if self._part(episode).exists()}

    def _part(self, episode: EpisodeToWrite) -> Path:
        return self._folder / f"{zlib.crc32(repr((episode.id, episode.length)).encode()):08x}.rrd"

    def add(self, episode: EpisodeToWrite) -> None:
        part = self._part(episode)
        with replace_file(part, temporary=part.with_suffix(".tmp"), durable=False) as new:
            stream = self._stream(new)
            try:
                self._log(stream, episode)
            finally:
                stream.disconnect()
            self.note(episode, {part.name: new})
        self.written.add(episode.id)

    def _stream(self, path: Path) -> Any:
        stream = self._rr.RecordingStream(self.path.stem, send_properties=False)
        stream.save(path)
        return stream

    def _log(self, stream: Any, episode: EpisodeToWrite) -> None:
        """Write an episode to a Rerun stream in portions."""
        self._log_metadata(stream, episode)
        for name, field in episode.schema.items():
            for change in _changes(field):
                self.changed(f"field {name!r} {change}", episode)

        row_bytes = sum(8 * field.num_elements for field in episode.schema.values())
        num_steps = max(1, _PORTION_BYTES // max(1, row_bytes))
        clock = _time_field(episode)
        for start in range(0, episode.length, num_steps):
            stop = min(start + num_steps, episode.length)
            times = None
            if clock is not None:
                times = np.asarray(episode.read(clock, start, stop), np.float64).reshape(-1)
            for name in (*episode.schema, *episode.texts):
                rows = episode.read(name, start, stop)
                self._send(stream, episode, name, rows, self._timelines(range(start, stop), times))
            stream.flush()  # Unflushed rows stay in memory.

        final = episode.final_observation
        if final is None:
            return
        for part, values in (final if isinstance(final, dict) else {"": final}).items():
            name = f"observation/{part}" if part else "observation"
            rows = [values] if isinstance(values, str) else np.asarray(values)[None]
            self._send(stream, episode, name, rows, self._timelines([episode.length]))
        stream.flush()

    def _log_metadata(self, stream: Any, episode: EpisodeToWrite) -> None:
        """Write the metadata and the end of an episode."""
        rr = self._rr
        root = rr.new_entity_path([episode.id])
        values = {}
        for name in ("terminated", "truncated", "success", "length"):
            value = getattr(episode, name)
            if value is not None:
                values[name] = value
        metadata = json.dumps(plain(episode.metadata))
        stream.log(root, rr.AnyValues(**values, task=episode.task, metadata=metadata), static=True)

        end = "end"
        if episode.terminated:
            end = "terminated"
        elif episode.truncated:
            end = "truncated"
        timelines = self._timelines([episode.length - 1])
        stream.send_columns(f"{root}/end", timelines, rr.TextLog.columns(text=[end]))

    def _timelines(self, frames: Any, times: Array | None = None) -> list[Any]:
        """Return the columns `frame` and, if all times are finite, `time`."""
        columns = [self._rr.TimeColumn("frame", sequence=frames)]
        if times is not None and np.isfinite(times).all():
            columns.append(self._rr.TimeColumn("time", duration=times))
        return columns

    def _send(
        self,
        stream: Any,
        episode: EpisodeToWrite,
        name: str,
        rows: Any,
        timelines: list[Any],
    ) -> None:
        """Write rows of a field to a stream as texts, scalars or images."""
        rr = self._rr
        path = rr.new_entity_path([episode.id, *filter(None, name.split("/"))])
        if name in episode.texts:
            stream.send_columns(path, timelines, rr.TextLog.columns(text=rows))
            return
        axes = axes_of(rows.shape[1:])
        if not axes:
            scalars = self.cast(rows, np.dtype(np.float64), name, episode)
            columns = rr.Scalars.columns(scalars=scalars.reshape(len(rows), -1))
            stream.send_columns(path, timelines, columns)
            return

        if axes == "CHW":
            rows = np.moveaxis(rows, 1, -1)
        elif axes == "HW":
            rows = rows[..., None]
        if rows.dtype.name not in _PIXELS:
            rows = self.cast(rows, np.dtype(np.float32), name, episode)
        height, width, channels = rows.shape[1:]
        is_colour = rows.dtype == np.uint8 or channels > 1
        archetype = rr.Image if is_colour else rr.DepthImage
        image_format = rr.components.ImageFormat(
            width=width,
            height=height,
            channel_datatype=_PIXELS.get(rows.dtype.name, "F32"),
            color_model=_COLOURS[channels] if is_colour else None,
        )
        stream.log(path, archetype.from_fields(format=image_format), static=True)
        buffer = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)
        stream.send_columns(path, timelines, archetype.columns(buffer=buffer))

    def close(self) -> None:
        if not self.is_complete or not self._folder.exists():
            return
        with replace_file(self.path, temporary=self._folder / "whole.tmp") as new:
            stream = self._stream(new)
            self._log_parts(stream)
            stream.disconnect()
        shutil.rmtree(self._folder)

    def _log_parts(self, stream: Any) -> None:
        """Merge the files of the complete episodes into a stream; append the conversion record."""
        metadata = json.dumps(plain(self.metadata))
        stream.log("/recording", self._rr.AnyValues(metadata=metadata), static=True)
        chunks = optional("rerun.chunk", "rerun-sdk", "rerun", "recordings of Rerun")
        for episode in self.episodes:
            if episode.id in self.written:
                stream.send_chunks(chunks.RrdReader(self._part(episode)).stream())
                stream.flush()
        note = self.conversion.text() + files_line({}, finish={})
        stream.log(_NOTE_ENTITY, self._rr.AnyValues(note=note), static=True)


def _parts_of(path: Path) -> Path:
    """Return the hidden folder for the files of single episodes."""
    return path.with_name(f".{path.name}.parts")


def _time_field(episode: EpisodeToWrite) -> str | None:
    """Return the name of the first field with recorded times; None if there is none."""
    for name, field in episode.schema.items():
        is_number = field.dtype.startswith("float") and field.num_elements == 1
        if is_number and name.rpartition("/")[2] in _TIMES:
            return name
    return None


def _note_in(path: Path) -> str | None:
    """Return the text of the conversion record in an `.rrd` file; None if there is no record."""
    chunks = optional("rerun.chunk", "rerun-sdk", "rerun", "recordings of Rerun")
    with damage_named(repr(str(path)), OSError, RuntimeError, ValueError):
        for chunk in chunks.RrdReader(path).stream():
            if chunk.entity_path == _NOTE_ENTITY:
                for name, values in chunk.to_record_batch().to_pydict().items():
                    if name.endswith("note"):
                        return str(values[0][0])
    return None


def _changes(field: Field) -> Iterator[str]:
    """Yield a description of each property of a field that changes in a Rerun recording."""
    if len(field.shape) > 1 and not axes_of(field.shape):
        yield "is flattened: scalars of a step are a list"
