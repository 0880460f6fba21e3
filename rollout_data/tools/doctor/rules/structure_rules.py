"""Rules STR: gaps and overlaps in trajectories, and wrong counts, fields and splits."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import numpy as np

from storage.core.fields import Schema
from storage.errors import RolloutDataError, UsageError

from ....blocks.block_header import METADATA_NAME, BlockHeader
from ....blocks.folder_metadata import BAD_METADATA, read_document
from ....blocks.write_block import block_name
from ..declared_spaces import boxes
from ..file_facts import most_frequent
from ..findings import Defect, Inapplicable, Settings, checks
from ..scan import Scan

#: Names of end flags. These fields may be missing in an episode whose recording was cut.
_END_FLAGS = {"dones", "terminals", "timeouts"}
_SPLIT = re.compile(r"(?:(.*)[_-])?(train|training|valid|validation|val|test|eval)")
#: Maximum number of trajectory names in a message.
_MAX_LISTED = 9


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_MAX_LISTED])


def _trajectories_in(header: BlockHeader) -> list[str]:
    numbers = np.unique(header.fragments["trajectory"]).tolist()
    return [f"{header.writer}:{number}" for number in numbers]


@checks("STR08")
def counts(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report stored lengths, totals and ranges that disagree with the data."""
    # In other formats than block files, an index that refers to rows outside of the data has wrong
    # counts too.
    if scan.files.folder is None:
        yield from scan.files.defects("outside")
    if scan.failure is not None or scan.problems:
        return
    if scan.recording.format == "trajectory-folders":
        totals = {
            "total_timesteps": int(scan.lengths.sum()),
            "total_trajectories": scan.num_episodes,
        }
        for key, count in totals.items():
            declared = scan.metadata.get(key)
            if isinstance(declared, int) and declared != count:
                yield Defect(message=f"{key} is {declared}, and the data have {count}")


@checks("STR01")
def gap(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report missing blocks, and missing frames between the fragments of a trajectory.

    Missing frames before a writer's first block are not reported, because retention removes the
    oldest blocks.
    """
    files = scan.files
    for writer, first, stop in files.holes():
        names = files.trajectories_in(writer, first, stop)
        blocks = f"{first}" if stop == first + 1 else f"{first} to {stop - 1}"
        message = f"block {blocks} of writer {writer!r} is missing"
        message += f", with frames of trajectories {', '.join(names)}"
        yield Defect(message=message, **files.located(names))

    oldest: dict[int, int] = {}
    for header in files.headers.values():
        writer_number = files.writers.index(header.writer)
        oldest[writer_number] = min(header.sequence, oldest.get(writer_number, header.sequence))
    parts = files.parts
    oldest_of_writer = np.array(
        [oldest.get(writer, 0) for writer in parts["writer"].tolist()],
        np.int64,
    )
    is_first, missing = files.steps
    # If a writer's oldest block is not block 0, retention has removed the blocks before it. Then a
    # trajectory in the oldest block may have lost its first frames, which is no defect.
    is_pruned = is_first & (oldest_of_writer > 0) & (parts["sequence"] == oldest_of_writer)
    # Other rules report the trajectories that have lost frames in an unreadable block.
    explained: set[str] = set()
    for name in files.bad:
        explained.update(files.trajectories_of_bad_block(name))
    names = [name for name in files.names((missing > 0) & ~is_pruned) if name not in explained]
    if names:
        message = f"frames are missing between parts of {_listed(names)}"
        yield Defect(message=message, **files.located(names))


@checks("STR02")
def overlap(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report fragments that start before the end of the previous fragment of their trajectory."""
    _, missing = scan.files.steps
    names = scan.files.names((missing < 0) & (scan.files.parts["start"] > 0))
    if names:
        yield Defect(message=f"parts of {_listed(names)} overlap", **scan.files.located(names))


@checks("STR04")
def shared(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report fragments or episodes that refer to the same rows."""
    for defect in scan.files.defects("shared"):
        episodes_before = [number - 1 for number in defect.trajectories if number]
        yield Defect(
            message=defect.message,
            trajectories=[*episodes_before, *defect.trajectories],
            left_out=defect.left_out,
        )
    parts = scan.files.parts
    order = np.lexsort((parts["row"], parts["block"]))
    order = order[parts["length"][order] > 0]
    block = parts["block"][order]
    start = parts["row"][order]
    stop = start + parts["length"][order]
    shares = (block[1:] == block[:-1]) & (start[1:] < stop[:-1])
    block_names = list(scan.files.headers)
    for number in np.unique(block[1:][shares]).tolist():
        later = np.flatnonzero(shares & (block[1:] == number))
        names = scan.files.names(order[np.union1d(later, later + 1)])
        message = f"{_listed(names)} share rows of {block_names[number]!r}"
        yield Defect(message=message, **scan.files.located(names))


@checks("STR05")
def twice(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report blocks and trajectories that exist twice, and names that contradict their content."""
    yield from _blocks_with_wrong_names(scan)
    files = scan.files
    is_first, missing = files.steps
    names = files.names(~is_first & (files.parts["start"] == 0) & (missing < 0))
    if names:
        yield Defect(message=f"trajectories {_listed(names)} begin twice", **files.located(names))
    if scan.failure is None and files.folder is None:
        yield from _equal_names(scan)
        if scan.recording.format == "minari":
            yield from _wrong_numbers(scan)


def _blocks_with_wrong_names(scan: Scan) -> Iterator[Defect]:
    """Report blocks whose file name contradicts the writer and sequence number in their header."""
    name_of: dict[tuple[str, int], str] = {}
    for name, header in sorted(scan.files.headers.items()):
        first_name = name_of.setdefault((header.writer, header.sequence), name)
        right_name = block_name(header.writer, header.sequence)
        if name == right_name or not name.startswith("rollout_"):
            continue
        message = f"{name!r} has the content of {right_name!r}"
        if first_name != name:
            message += f", as {first_name!r} has"
        yield Defect(message=message, **scan.files.located(_trajectories_in(header)))


def _equal_names(scan: Scan) -> Iterator[Defect]:
    """Report episodes whose names differ only in leading zeros, such as "demo_1" and "demo_01"."""
    places_of: dict[str, list[int]] = {}
    for place, name in enumerate(scan.recording.ids):
        plain_name = re.sub(r"(?<!\d)0+(?=\d)", "", name)
        places_of.setdefault(plain_name, []).append(place)
    for name, places in places_of.items():
        if len(places) > 1:
            yield Defect(message=f"{name!r} exists {len(places)} times", trajectories=places)


def _wrong_numbers(scan: Scan) -> Iterator[Defect]:
    """Report Minari episodes whose id differs from the number at the end of their name."""
    for place, name in enumerate(scan.recording.ids):
        number = scan.recording.info(place).metadata.get("id")
        if isinstance(number, (int, np.integer)) and not name.endswith(str(number)):
            yield Defect(message=f"{name!r} has the id {number}", trajectories=[place])


@checks("STR06")
def fields_differ(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report blocks or episodes whose fields, dtypes or shapes differ from most others."""
    files = scan.files
    if files.folder is None and scan.failure is None and scan.num_episodes:
        yield from _episodes_with_other_fields(scan)
    if files.headers:
        usual = most_frequent(header.schema for header in files.headers.values())
        for name, header in files.headers.items():
            difference = usual.difference(header.schema)
            if difference:
                message = f"{name!r} has other fields: {difference}"
                yield Defect(message=message, **files.located(_trajectories_in(header)))


def _episodes_with_other_fields(scan: Scan) -> Iterator[Defect]:
    """Report episodes whose fields differ from those of most other episodes.

    The severity is lower if fields are only missing, because that may be intended.
    """
    scan.facts  # noqa: B018 - some readers know the fields of an episode after it is read
    schemas = [scan.recording.info(place).schema for place in range(scan.num_episodes)]
    usual = most_frequent(schemas)
    for schema in dict.fromkeys(schemas):
        if schema == usual:
            continue
        places = [place for place, other in enumerate(schemas) if other == schema]
        severity = ""
        if all(schema[name] == usual[name] for name in schema if name in usual):
            missing = {*usual} - {*schema}
            severity = "info" if missing <= _END_FLAGS else "warning"
        message = f"fields differ from other episodes: {usual.difference(schema)}"
        yield Defect(None, message, places, severity=severity)


@checks("STR07")
def description(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report fields or spaces in the metadata that disagree with the data."""
    if scan.files.folder is not None and scan.files.headers:
        yield from _wrong_metadata_fields(scan)
    elif scan.failure is None:
        yield from _wrong_spaces(scan)


def _wrong_metadata_fields(scan: Scan) -> Iterator[Defect]:
    """Report fields in the metadata.json of a block folder that differ from those of the blocks."""
    folder = scan.files.folder
    assert folder is not None
    usual = most_frequent(header.schema for header in scan.files.headers.values())
    try:
        declared = Schema.from_json(read_document(folder / METADATA_NAME)["fields"])
    except BAD_METADATA as problem:
        # Rule FIL06 reports a missing or unreadable file, so report only wrong contents.
        is_unreadable = isinstance(problem, (OSError, ValueError))
        is_unreadable &= not isinstance(problem, RolloutDataError)
        has_no_fields = isinstance(problem, (KeyError, TypeError))
        if not is_unreadable and not has_no_fields:
            yield Defect(message=f"{METADATA_NAME} describes no fields: {problem}")
        return
    difference = usual.difference(declared)
    if len(declared) and difference:
        message = f"{METADATA_NAME} has other fields than the blocks: {difference}"
        yield Defect(message=message)


def _wrong_spaces(scan: Scan) -> Iterator[Defect]:
    """Report declared spaces whose number of elements differs from the field."""
    for group in ("observation", "action"):
        for name, box in boxes(scan.metadata, group):
            shape: Any = box.get("shape")
            if name not in scan.schema or not isinstance(shape, list):
                continue
            has_sizes = all(isinstance(size, int) for size in shape)
            if has_sizes and math.prod(shape) != scan.schema[name].num_elements:
                actual = list(scan.schema[name].shape)
                yield Defect(name, f"{name!r} is declared as {shape}, but has the shape {actual}")


@checks("STR10")
def splits(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report episodes in both train and test splits, and splits that name missing episodes."""
    try:
        ids_of = {name: set(split.ids) for name, split in scan.recording.split().items()}
    except UsageError as error:
        raise Inapplicable("the recording defines no splits") from error
    for name, other in combinations(ids_of, 2):
        both = ids_of[name] & ids_of[other]
        if both and _exclude_each_other(name, other):
            message = f"{len(both)} episodes are in {name!r} and in {other!r}"
            yield Defect(message=message, **scan.files.located(both))
    yield from _splits_after_the_end(scan)


def _exclude_each_other(name: str, other: str) -> bool:
    """Return whether two splits must be disjoint, such as "fast_train" and "fast_test"."""
    match = _SPLIT.fullmatch(name.lower())
    other_match = _SPLIT.fullmatch(other.lower())
    if match is None or other_match is None:
        return False
    # Five letters are compared, so that "train" and "training" count as the same split.
    return match[1] == other_match[1] and match[2][:5] != other_match[2][:5]


def _splits_after_the_end(scan: Scan) -> Iterator[Defect]:
    """Report splits in the metadata whose range of episodes ends after the last episode."""
    ranges = scan.metadata.get("splits")
    if not isinstance(ranges, Mapping):
        return
    num_episodes = scan.num_episodes
    declared = scan.metadata.get("total_episodes")
    if scan.problems and isinstance(declared, int):
        # The ranges count unreadable episodes too, which `scan.num_episodes` does not.
        num_episodes = max(num_episodes, declared)
    for name, text in ranges.items():
        stop = str(text).partition(":")[2]
        if stop.isdecimal() and int(stop) > num_episodes:
            yield Defect(message=f"{name!r} is {text}, of {num_episodes} episodes")
