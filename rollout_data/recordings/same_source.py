"""Whether a recording is the source that a target was converted from: the note of the target decides."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from storage.errors import DataFileError, UsageError

from ..foreign.conversion_note import AFTER_LAST, ConversionNote, SummedEpisode, UnreadableEpisode
from ..remote.access import RemotePath
from .recording import Recording

#: Formats whose recordings of one file read no other file.
_SINGLE_FILES = ("robomimic", "isaaclab", "libero", "d4rl", "mcap", "bfm_zero")
_MAX_SHOWN = 60


def source_state(recording: Recording) -> str:
    """Return a digest of the path, size and time of change of every file of a recording.

    "" if they are not known: at a URL, or for a file that refers to others.
    """
    root = recording.path
    if isinstance(root, RemotePath):
        return ""
    if root.is_file() and recording.format not in _SINGLE_FILES:
        return ""
    options = {name: repr(value) for name, value in recording.origin.options.items()}
    digest = hashlib.blake2b(json.dumps([str(root), recording.format, options]).encode(), digest_size=16)
    for path in _files_of(root):
        found = os.stat(path)
        about = [str(path), found.st_size, found.st_mtime_ns] if stat.S_ISREG(found.st_mode) else [str(path)]
        digest.update(json.dumps(about).encode())
    return digest.hexdigest()


def _files_of(root: Path) -> list[str]:
    if not root.is_dir():
        return [str(root)]
    found = []
    for folder, _, names in os.walk(root, followlinks=True):
        found += [os.path.join(folder, name) for name in names]
    return sorted(path for path in found if os.path.exists(path))


def check_same_source(
    there: ConversionNote, now: ConversionNote, recording: Recording, path: Path, progress: bool = False
) -> None:
    """Compare a recording with the note of a target; read all rows of the episodes that are there.

    Rows are not read if no file of the source has changed since they were noted. The recording may have more episodes
    at its end.

    Args:
        there: Note of the target.
        now: Note of a conversion that would begin now.
        recording: The source.
        path: The target.
        progress: Show a progress bar.

    Raises:
        UsageError: The first difference.
        DataFileError: An episode that was written cannot be read any more.
    """
    difference = _difference(there, now)
    if difference:
        raise other_source(path, difference)
    if there.source and there.source == now.source:
        return
    places = {name: place for place, name in enumerate(recording.ids)}
    for name, noted in tqdm(there.rows.items(), "compare", unit=" episodes", disable=not progress):
        try:
            found = SummedEpisode(recording[places[name]]).sums()
        except UnreadableEpisode as error:
            raise error.problem from error
        for field in {**noted, **found}:
            if noted.get(field) != found.get(field):
                where = f"{field.removesuffix(AFTER_LAST)!r}{AFTER_LAST * field.endswith(AFTER_LAST)}"
                raise other_source(path, f"other values of {where} in episode {name!r}")


def other_source(path: Path, difference: str) -> UsageError:
    """Return the error of a target that was converted from another source."""
    expected = "the source and the options of the conversion that is there"
    return UsageError("convert into", repr(str(path)), expected, difference, "Choose another place, or remove it")


def _difference(there: ConversionNote, now: ConversionNote) -> str:
    """Describe the first difference that is known without reading a row; "" if there is none."""
    if there.format != now.format:
        return f"format {now.format!r} instead of {there.format!r}"
    if there.version != now.version:
        return f"version {now.version} of the writer instead of {there.version}"
    if name := _first_other(there.options, now.options):
        return f"option {name}={_shown(now.options, name)} instead of {_shown(there.options, name)}"
    if len(now.episodes) < len(there.episodes):
        return f"{len(now.episodes)} episodes instead of {len(there.episodes)}"
    for place, (noted, found) in enumerate(zip(there.episodes, now.episodes, strict=False)):
        if noted["id"] != found["id"]:
            return f"episode {found['id']!r} instead of {noted['id']!r} at place {place}"
        if part := _first_other(noted, found):
            where = f"of episode {noted['id']!r}"
            if isinstance(noted[part], dict):
                name = _first_other(noted[part], found[part])
                return f"{part} {name!r} {where}: {_shown(found[part], name)} instead of {_shown(noted[part], name)}"
            return f"{part} {where}: {_shown(found, part)} instead of {_shown(noted, part)}"
    if name := _first_other(there.metadata, now.metadata):
        return f"metadata {name!r}: {_shown(now.metadata, name)} instead of {_shown(there.metadata, name)}"
    return ""


def _first_other(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the first name under which two mappings differ; "" if they are equal."""
    for name in {**one, **other}:
        if name not in one or name not in other or not _are_same(one[name], other[name]):
            return name
    return ""


def _are_same(one: Any, other: Any) -> bool:
    """Compare values as JSON has them: True is not 1, and -0.0 is not 0.0."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _shown(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return "none"
    text = json.dumps(values[name])
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def shared_forms(note: ConversionNote) -> dict[str, tuple[set[str], bool]]:
    """Return what the fields of a target depend on: field -> its forms, and whether every episode has it."""
    forms: dict[str, set[str]] = {}
    counts: dict[str, int] = {}
    for episode in note.episodes:
        fields = episode["fields"]
        found = {**fields["numbers"], **dict.fromkeys(fields["texts"], "text")}
        found |= {name + AFTER_LAST: "" for name in fields["final"]}
        found |= {name: "told" for name in ("terminated", "truncated", "success") if episode[name] is not None}
        for name, form in found.items():
            forms.setdefault(name, set()).add(form)
            counts[name] = counts.get(name, 0) + 1
    return {name: (forms[name], counts[name] == len(note.episodes)) for name in forms}


def check_nothing_gained(there: ConversionNote, now: ConversionNote, readable: Sequence[str], path: Path) -> None:
    """Check that a complete target has all episodes of its source.

    Args:
        there: Note of the target.
        now: Note of a conversion that would begin now.
        readable: Episodes that could not be read then, and can be read now.
        path: The target.

    Raises:
        UsageError: The source has more.
    """
    gained = [one["id"] for one in now.episodes[len(there.episodes) :]] + list(readable)
    if gained:
        got = f"{len(gained)} more than the {len(there.rows)} episodes of a complete target: {gained[0]!r}"
        raise other_source(path, got)


def unreadable_episodes(
    ids: Collection[str], recording: Recording, damaged: Mapping[str, DataFileError]
) -> dict[str, DataFileError]:
    """Return those of some episodes that still cannot be read, with their errors.

    Args:
        ids: Episodes that could not be read.
        recording: The source.
        damaged: Episodes whose checksums are wrong.
    """
    found = {}
    for place, name in enumerate(recording.ids) if ids else ():
        if name in damaged:
            found[name] = damaged[name]
        elif name in ids:
            try:
                SummedEpisode(recording[place]).check_readable()
            except UnreadableEpisode as error:
                found[name] = error.problem
    return {name: found[name] for name in found if name in ids}
