"""Checks that an existing target was converted from the same recording with the same options.

Each target contains a conversion record (`ConversionNote`): source, options and checksums.
"""

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
from ..sources.recordings.recording import Recording
from ..writing.conversion_record import AFTER_LAST, ConversionNote, SummedEpisode, UnreadableEpisode
from ..writing.json_values import plain

#: Formats whose recordings are single files that do not refer to other files.
_SINGLE_FILES = ("robomimic", "isaaclab", "libero", "d4rl", "mcap", "bfm_zero")
#: Maximum number of characters of a value in an error.
_MAX_SHOWN = 60


def source_state(recording: Recording) -> str:
    """Return a digest of the path, size and modification time of every file of a recording.

    The result is "" if changes cannot be detected. This is the case if the recording is a URL, if
    its file may refer to other files, or if a file is missing.
    """
    root = recording.path
    if isinstance(root, RemotePath):
        return ""
    if root.is_file() and recording.format not in _SINGLE_FILES:
        return ""
    options = {name: repr(value) for name, value in recording.origin.options.items()}
    recording_state = [str(root), recording.format, options]
    digest = hashlib.blake2b(json.dumps(recording_state).encode(), digest_size=16)
    for path in _files_of(root):
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return ""
        file_state: list[Any] = [str(path)]
        if stat.S_ISREG(status.st_mode):
            file_state += [status.st_size, status.st_mtime_ns]
        digest.update(json.dumps(file_state).encode())
    return digest.hexdigest()


def _files_of(root: Path) -> list[str]:
    if not root.is_dir():
        return [str(root)]
    paths = []
    for folder, _, names in os.walk(root, followlinks=True):
        paths += [os.path.join(folder, name) for name in names]
    return sorted(path for path in paths if os.path.exists(path))


def check_same_note(
    there: ConversionNote,
    now: ConversionNote,
    effective: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    path: Path,
) -> None:
    """Compare the conversion record in a target with the record of a new conversion.

    Only descriptions are compared, not rows. The recording may have gained episodes at its end.

    Args:
        there: Conversion record in the target.
        now: Conversion record of a new conversion with the given source and options.
        effective: Function that maps options to the values that a conversion of the recording uses,
            `ForeignWriter.effective`.
        path: Path of the target.

    Raises:
        UsageError: The records differ. The error states the first difference.
    """
    difference = _writer_difference(there, now)
    difference = difference or _option_difference(there.options, now.options, effective)
    difference = difference or _episode_difference(there, now)
    if difference:
        raise other_source(path, difference)


def check_same_rows(
    there: ConversionNote,
    now: ConversionNote,
    recording: Recording,
    path: Path,
    progress: bool = False,
) -> None:
    """Compare the rows of the source with the checksums in the conversion record of a target.

    Rows are not read if no file of the source has changed since the record was written.

    Args:
        there: Conversion record in the target.
        now: Conversion record of a new conversion with the given source and options.
        recording: The source.
        path: Path of the target.
        progress: Show a progress bar.

    Raises:
        UsageError: Rows differ. The error names the first field with different rows.
        DataFileError: An episode of the target cannot be read in the source any more.
    """
    if there.source and there.source == now.source:
        return
    places = {name: place for place, name in enumerate(recording.ids)}
    bar = tqdm(there.rows.items(), "compare", unit=" episodes", disable=not progress)
    for name, noted_sums in bar:
        try:
            sums = SummedEpisode(recording[places[name]]).sums()
        except UnreadableEpisode as error:
            raise error.problem from error
        for field in {**noted_sums, **sums}:
            if noted_sums.get(field) != sums.get(field):
                where = repr(field.removesuffix(AFTER_LAST))
                if field.endswith(AFTER_LAST):
                    where += AFTER_LAST
                raise other_source(path, f"different values of {where} in episode {name!r}")


def other_source(path: Path, difference: str) -> UsageError:
    """Return the error for a target that was converted from another source."""
    return UsageError(
        f"target {str(path)!r} was converted from another source or with other options: "
        f"{difference}. Choose an empty target, or remove the existing files."
    )


def _writer_difference(there: ConversionNote, now: ConversionNote) -> str:
    """Describe a difference in the format or the version of the writer; "" if there is none."""
    if there.format != now.format:
        return f"format {_text(now.format)} instead of {_text(there.format)}"
    if not _are_same(there.version, now.version):
        return f"version {now.version} of the writer instead of {_text(there.version)}"
    return ""


def _option_difference(
    there: Mapping[str, Any],
    now: Mapping[str, Any],
    effective: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> str:
    """Describe the first option that makes a difference for the recording; "" if none does."""
    name = _first_difference(there, now)
    if name and there.keys() == now.keys():
        try:
            effect_there = effective(there)
            effect_now = effective(now)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            # `effective` fails if an option is invalid. The options are then compared as passed.
            effect_there = there
            effect_now = now
        name = _first_difference(plain(effect_there), plain(effect_now))
    return (
        f"option {name}={_value_text(now, name)} instead of {_value_text(there, name)}"
        if name
        else ""
    )


def _episode_difference(there: ConversionNote, now: ConversionNote) -> str:
    """Describe the first difference in episode descriptions or metadata; "" if there is none."""
    if len(now.episodes) < len(there.episodes):
        return f"{len(now.episodes)} episodes instead of {len(there.episodes)}"

    for place, (old, new) in enumerate(zip(there.episodes, now.episodes, strict=False)):
        if old["id"] != new["id"]:
            return f"episode {new['id']!r} instead of {_text(old['id'])} at position {place}"
        part = _first_difference(old, new)
        if not part:
            continue
        where = f"of episode {old['id']!r}"
        if isinstance(old[part], dict):
            name = _first_difference(old[part], new[part])
            values = f"{_value_text(new[part], name)} instead of {_value_text(old[part], name)}"
            return f"{part} {name!r} {where}: {values}"
        return f"{part} {where}: {_value_text(new, part)} instead of {_value_text(old, part)}"

    name = _first_difference(there.metadata, now.metadata)
    if name:
        values = f"{_value_text(now.metadata, name)} instead of {_value_text(there.metadata, name)}"
        return f"metadata {name!r}: {values}"
    return ""


def _first_difference(left: Mapping[str, Any], right: Mapping[str, Any]) -> str:
    """Return the first key for which two mappings differ; "" if the mappings are equal."""
    for name in {**left, **right}:
        if name not in left or name not in right or not _are_same(left[name], right[name]):
            return name
    return ""


def _are_same(left: Any, right: Any) -> bool:
    """Return whether two values are equal as JSON: True differs from 1, and -0.0 from 0.0."""
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


def _value_text(values: Mapping[str, Any], name: str) -> str:
    return _text(values[name], json.dumps) if name in values else "none"


def _text(value: Any, as_text: Callable[[Any], str] = repr) -> str:
    text = as_text(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def shared_forms(note: ConversionNote) -> dict[str, tuple[set[str], bool]]:
    """Map field names to the dtypes and shapes that occur, and to whether all episodes have them.

    The result changes if a target of the recording would get another layout.

    Returns:
        A dict that maps field names to pairs: a set of texts with dtype and shape, and whether
        every episode has the field. "terminated", "truncated" and "success" count as fields of the
        episodes in which they are known.
    """
    forms: dict[str, set[str]] = {}
    counts: dict[str, int] = {}
    for episode in note.episodes:
        fields = episode["fields"]
        episode_forms = {**fields["numbers"], **dict.fromkeys(fields["texts"], "text")}
        for name in fields["final"]:
            episode_forms[name + AFTER_LAST] = ""
        for name in ("terminated", "truncated", "success"):
            if episode[name] is not None:
                episode_forms[name] = "known"
        for name, form in episode_forms.items():
            forms.setdefault(name, set()).add(form)
            counts[name] = counts.get(name, 0) + 1
    return {name: (forms[name], counts[name] == len(note.episodes)) for name in forms}


def check_nothing_gained(
    there: ConversionNote,
    now: ConversionNote,
    readable: Sequence[str],
    path: Path,
) -> None:
    """Check that a complete target has all readable episodes of its source.

    Args:
        there: Conversion record in the target.
        now: Conversion record of a new conversion with the given source and options.
        readable: Episodes that were unreadable when the target was written, and are readable now.
        path: Path of the target.

    Raises:
        UsageError: The source has readable episodes that are missing from the target.
    """
    gained = [episode["id"] for episode in now.episodes[len(there.episodes) :]]
    gained += readable
    if gained:
        raise other_source(
            path,
            f"the complete target has {len(there.rows)} episodes, but the source has "
            f"{len(gained)} more, such as {gained[0]!r}",
        )


def unreadable_episodes(
    ids: Collection[str], recording: Recording, damaged: Mapping[str, DataFileError]
) -> dict[str, DataFileError]:
    """Map episodes that were unreadable before, and still are, to their errors.

    The episodes are in the order of the source.

    Args:
        ids: Episodes that were unreadable when the target was written.
        recording: The source.
        damaged: Maps the id of each episode with wrong checksums to its error.
    """
    problems: dict[str, DataFileError] = {}
    if not ids:
        return problems
    for place, name in enumerate(recording.ids):
        if name not in ids:
            continue
        if name in damaged:
            problems[name] = damaged[name]
            continue
        try:
            SummedEpisode(recording[place]).check_readable()
        except UnreadableEpisode as error:
            problems[name] = error.problem
    return problems
