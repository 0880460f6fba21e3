"""Whether a recording is the source that a target was converted from: the note of the target decides."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from storage.errors import DataFileError, UsageError

from ..remote.locations import RemotePath
from ..sources.recording import Recording
from ..writing.conversion_record import AFTER_LAST, ConversionNote, SummedEpisode, UnreadableEpisode
from ..writing.json_values import plain

#: Formats whose recordings of one file read no other file.
_SINGLE_FILES = ("robomimic", "isaaclab", "libero", "d4rl", "mcap", "bfm_zero")
_MAX_SHOWN = 60


def source_state(recording: Recording) -> str:
    """Return a digest of the path, size and time of change of every file of a recording.

    "" if they are not known: at a URL, for a file that refers to others, or if one was removed meanwhile.
    """
    root = recording.path
    if isinstance(root, RemotePath):
        return ""
    if root.is_file() and recording.format not in _SINGLE_FILES:
        return ""
    options = {name: repr(value) for name, value in recording.origin.options.items()}
    digest = hashlib.blake2b(json.dumps([str(root), recording.format, options]).encode(), digest_size=16)
    for path in _files_of(root):
        try:
            found = os.stat(path)
        except FileNotFoundError:
            return ""
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


def check_same_note(
    there: ConversionNote,
    now: ConversionNote,
    effective: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    path: Path,
) -> None:
    """Compare a recording and options with the note of a target, without reading a row.

    The recording may have more episodes at its end.

    Args:
        there: Note of the target.
        now: Note of a conversion that would begin now.
        effective: Function that returns what options amount to for the recording.
        path: The target.

    Raises:
        UsageError: The first difference.
    """
    difference = _difference(there, now) or _other_option(there.options, now.options, effective)
    difference = difference or _other_episode(there, now)
    if difference:
        raise other_source(path, difference)


def check_same_rows(
    there: ConversionNote, now: ConversionNote, recording: Recording, path: Path, progress: bool = False
) -> None:
    """Compare all rows of the episodes that are in a target with the checksums in its note.

    Rows are not read if no file of the source has changed since they were noted.

    Args:
        there: Note of the target.
        now: Note of a conversion that would begin now.
        recording: The source, which `check_same_note` has compared.
        path: The target.
        progress: Show a progress bar.

    Raises:
        UsageError: The first difference.
        DataFileError: An episode that was written cannot be read any more.
    """
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
    """Describe another format or version of the writer; "" if both are the same."""
    if there.format != now.format:
        return f"format {_text(now.format)} instead of {_text(there.format)}"
    if not _are_same(there.version, now.version):
        return f"version {now.version} of the writer instead of {_text(there.version)}"
    return ""


def _other_option(
    there: Mapping[str, Any], now: Mapping[str, Any], effective: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> str:
    """Describe the first option of another effect; "" if there is none."""
    name = _first_other(there, now)
    if name and there.keys() == now.keys():
        try:
            one, other = effective(there), effective(now)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # options are compared unchecked
            one = there
            other = now
        name = _first_other(plain(one), plain(other))
    return f"option {name}={_shown(now, name)} instead of {_shown(there, name)}" if name else ""


def _other_episode(there: ConversionNote, now: ConversionNote) -> str:
    """Describe the first difference of episodes or metadata that is known without a row; "" if there is none."""
    if len(now.episodes) < len(there.episodes):
        return f"{len(now.episodes)} episodes instead of {len(there.episodes)}"
    for place, (noted, found) in enumerate(zip(there.episodes, now.episodes, strict=False)):
        if noted["id"] != found["id"]:
            return f"episode {found['id']!r} instead of {_text(noted['id'])} at place {place}"
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
    return _text(values[name], json.dumps) if name in values else "none"


def _text(value: Any, as_text: Callable[[Any], str] = repr) -> str:
    text = as_text(value)
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
