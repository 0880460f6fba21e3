"""metadata.json: the schema of a data folder and facts about the recording, written once.

The first writer of a folder creates the file atomically. The schema of every later writer must
equal the schema in the file. Only `mark_noted_ends` replaces an intact file. Totals are not stored:
`block_folder.py` counts them in the blocks.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from storage.core.durable_files import read_text, replace_file, sync_path
from storage.core.fields import Schema
from storage.errors import RolloutDataError, SchemaError, UsageError

from .block_header import (
    FORMAT_NAME,
    FORMAT_VERSION,
    MAX_METADATA_BYTES,
    METADATA_NAME,
    read_header,
)
from .write_block import TEMPORARY_PREFIX

#: Values of `errno` that `os.link` raises on file systems without hard links.
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)
#: Exceptions that may be raised while reading a damaged metadata.json.
BAD_METADATA = (
    OSError, LookupError, ValueError, TypeError, AttributeError, OverflowError, RecursionError, RolloutDataError,
)  # fmt: skip
#: `"ends": "unknown"` in metadata.json means that the original data do not state how some episodes
#: ended. In the metadata of an episode, it means that the end of this episode is unknown.
ENDS, UNKNOWN = "ends", "unknown"
#: `"ends": "open"` in the metadata of an episode means that the episode has a final observation,
#: but is neither terminated nor truncated. Used only if metadata.json states `"ends": "unknown"`.
OPEN_END = "open"
#: Keys of metadata.json that the library sets. Callers cannot set these keys.
RESERVED_KEYS = (
    "format", "version", "fields", "obs_segments", "obs_disassemble_mapping", "total_timesteps", "total_trajectories",
)  # fmt: skip


@dataclass(frozen=True)
class Metadata:
    """Content of the metadata.json of a data folder.

    Attributes:
        schema: Fields of the blocks; empty for folders with other formats of data.
        obs_segments: Maps components of the observation to shapes, in the order of concatenation.
        obs_disassemble_mapping: Maps encoded components of the observation to codecs.
        context: All other keys with unchanged values: env, policy, config, frame_rate_hz, ...
    """

    schema: Schema
    obs_segments: Mapping[str, tuple[int, ...]]
    obs_disassemble_mapping: Mapping[str, str]
    context: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_schema(cls, schema: Schema, context: Mapping[str, Any] | None = None) -> Metadata:
        """Build the metadata of a folder whose blocks have this schema.

        Fields such as "observation/camera" are the components of the observation.
        """
        below = schema.below("observation")
        components = {
            name.partition("/")[2]: item for name, item in below.items() if name != "observation"
        }
        segments = {name: item.shape for name, item in components.items()}
        codecs = {name: item.codec for name, item in components.items() if item.codec != "raw"}
        return cls(schema, segments, codecs, dict(context or {}))

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "fields": self.schema.to_json(),
            "obs_segments": {name: list(shape) for name, shape in self.obs_segments.items()},
            "obs_disassemble_mapping": dict(self.obs_disassemble_mapping),
            **{key: value for key, value in self.context.items() if key not in RESERVED_KEYS},
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Metadata:
        """Parse the content of a metadata.json.

        The key "fields" is missing in the earlier folder format of this library.
        """
        segments = {
            name: _shape(shape) for name, shape in (document.get("obs_segments") or {}).items()
        }
        codecs = {
            str(name): str(codec)
            for name, codec in (document.get("obs_disassemble_mapping") or {}).items()
        }
        context = {key: value for key, value in document.items() if key not in RESERVED_KEYS}
        return cls(Schema.from_json(document.get("fields") or []), segments, codecs, context)


def load_metadata(data_dir: str | os.PathLike[str]) -> Metadata | None:
    """Read the metadata of a data folder; rebuild missing or damaged metadata from a block.

    Returns:
        The metadata; None if the folder has neither a usable metadata.json nor a readable block.
    """
    metadata = _from_file(Path(data_dir) / METADATA_NAME)
    if metadata is not None and len(metadata.schema):
        return metadata
    for path in sorted(Path(data_dir).glob("rollout_*.h5")):
        try:
            # Blocks do not state whether ends are unknown. "unknown" makes readers look for ends
            # in the metadata of episodes.
            context = {ENDS: UNKNOWN} if metadata is None else metadata.context
            return Metadata.of_schema(read_header(path).schema, context)
        except (RolloutDataError, OSError):
            continue
    return metadata


def publish_metadata(
    folder: Path, metadata: Metadata, writer: str, durable: bool = True
) -> Metadata:
    """Write metadata.json if the folder has none; otherwise check `metadata` against the file.

    Returns:
        The metadata in the file.

    Raises:
        SchemaError: The folder has data of another schema. The message names the difference.
        UsageError: The metadata are too large.
        OSError: The folder cannot be written.
    """
    path = folder / METADATA_NAME
    present = load_metadata(folder)
    if present is not None:
        _check_same(folder, present, metadata)
        if _schema_of(path) is not None:
            return present
    temporary = (
        folder / f"{TEMPORARY_PREFIX}rollout_{writer}_{METADATA_NAME}.{secrets.token_hex(4)}"
    )
    if path.is_symlink() and not path.exists():
        path.unlink(missing_ok=True)  # A dangling link would prevent the new file.
    if path.exists() and _schema_of(path) is None:  # Only a damaged file may be replaced.
        with replace_file(path, temporary=temporary, durable=durable) as new:
            _write(new, metadata, durable=False)
        return metadata
    try:
        _write(temporary, metadata, durable)
        if not _link(temporary, path):
            # Another writer created the file meanwhile, so compare the metadata with that file.
            return publish_metadata(folder, metadata, writer, durable)
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        sync_path(folder)
    return metadata


def mark_noted_ends(folder: Path) -> None:
    """Record in metadata.json that the metadata of episodes state how the episodes ended.

    Call this before publishing the first block with such metadata. Otherwise readers of the new
    block could miss how its episodes ended. The entry is `"ends": "unknown"`.

    Raises:
        OSError: The folder cannot be written.
    """
    present = load_metadata(folder)
    assert present is not None
    temporary = folder / f"{TEMPORARY_PREFIX}{METADATA_NAME}"
    with replace_file(folder / METADATA_NAME, temporary=temporary) as new:
        _write(new, replace(present, context={**present.context, ENDS: UNKNOWN}), durable=False)


def _write(path: Path, metadata: Metadata, durable: bool) -> None:
    num_bytes = 0
    with open(path, "w", encoding="utf-8") as file:
        for part in json.JSONEncoder(indent=2, default=_plain).iterencode(metadata.to_json()):
            num_bytes += file.write(part)  # The JSON text is ASCII, so characters are bytes.
            if num_bytes > MAX_METADATA_BYTES:
                raise UsageError(
                    f"the metadata of {str(path.parent)!r} exceed {MAX_METADATA_BYTES} bytes as "
                    "JSON. Store large values in another file."
                )
        file.flush()
        if durable:
            os.fsync(file.fileno())


def _link(source: Path, target: Path) -> bool:
    """Publish the file `source` as `target` by a hard link; return False if `target` exists.

    On a file system without hard links, `source` is renamed to `target`.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(target):
            return False
        os.rename(source, target)
    return True


def _check_same(folder: Path, present: Metadata, mine: Metadata) -> None:
    advice = "Record into another folder."
    if not len(present.schema):
        raise SchemaError(f"{str(folder / METADATA_NAME)!r} belongs to another format. {advice}")
    if difference := present.schema.difference(mine.schema):
        raise SchemaError(
            f"the fields differ from the fields in {str(folder)!r}: {difference}. {advice}"
        )
    for name in ("obs_segments", "obs_disassemble_mapping"):
        stored = getattr(present, name)
        new = getattr(mine, name)
        if list(stored.items()) != list(new.items()):
            raise SchemaError(
                f"{name} differs from {str(folder)!r}: expected {dict(stored)}, got {dict(new)}. "
                f"{advice}"
            )


def read_document(path: Path) -> dict[str, Any]:
    """Read a metadata.json as a dict without checking its keys.

    Raises:
        FileNotFoundError: The file does not exist.
        One of `BAD_METADATA`: The file is no JSON object, or too large.
    """
    document = json.loads(read_text(path, max_bytes=MAX_METADATA_BYTES))
    if not isinstance(document, dict):
        raise ValueError("no JSON object")
    return document


def _from_file(path: Path) -> Metadata | None:
    try:
        return Metadata.from_json(read_document(path))
    except BAD_METADATA:
        return None


def _schema_of(path: Path) -> Schema | None:
    metadata = _from_file(path)
    return metadata.schema if metadata is not None and len(metadata.schema) else None


def _shape(shape: Any) -> tuple[int, ...]:
    return (int(shape),) if isinstance(shape, int) else tuple(int(size) for size in shape)


def _plain(value: Any) -> Any:
    """Convert a numpy scalar or array to a Python number or list; convert other objects to str."""
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else str(value)
