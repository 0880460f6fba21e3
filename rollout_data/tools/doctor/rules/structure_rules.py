"""Rules STR: gaps, overlaps, fields and counts that disagree."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import numpy as np

from storage.core.fields import Schema
from storage.errors import RolloutDataError, UsageError

from ....blocks.folder_metadata import BAD_METADATA, read_document
from ....blocks.write_block import block_name
from ..declared_spaces import boxes
from ..file_facts import usual
from ..findings import Defect, Inapplicable, Settings, checks
from ..scan import Scan

#: Of ends, which an episode that was cut off may lack.
_FLAGS = {"dones", "terminals", "timeouts"}
_SPLIT = re.compile(r"(?:(.*)[_-])?(train|training|valid|validation|val|test|eval)")


@checks("STR08")
def counts(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Lengths, totals, indices or rows of columns disagree."""
    if scan.files.folder is None:  # the ranges of an index are counts, too
        yield from scan.files.told("outside")
    if scan.failure is None and scan.recording.format == "trajectory-folders" and not scan.problems:
        for key, count in (("total_timesteps", int(scan.lengths.sum())), ("total_trajectories", scan.num_episodes)):
            if isinstance(said := scan.metadata.get(key), int) and said != count:
                yield Defect(message=f"{key} is {said}, and {count} are there")


@checks("STR01")
def gap(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Parts of a trajectory leave frames out. What retention removed lies before a writer's first block."""
    files = scan.files
    is_first, off = files.steps
    for writer, first, stop in files.holes():
        names = files.lost(writer, first, stop)
        blocks = f"{first}" if stop == first + 1 else f"{first} to {stop - 1}"
        message = f"block {blocks} of writer {writer!r} is gone, with frames of trajectories {', '.join(names)}"
        yield Defect(message=message, **files.named(names))
    oldest = {files.writers.index(one.writer): one.sequence for one in reversed(_by_sequence(scan))}
    begins = np.array([oldest.get(writer, 0) for writer in files.parts["writer"].tolist()], np.int64)
    explained = {name for bad in files.bad for name in files.named_by(bad)}
    is_pruned = is_first & (begins > 0) & (files.parts["sequence"] == begins)
    names = [name for name in files.names((off > 0) & ~is_pruned) if name not in explained]
    if names:
        yield Defect(message=f"frames are missing between parts of {', '.join(names[:9])}", **files.named(names))


def _by_sequence(scan: Scan) -> list[Any]:
    return sorted(scan.files.headers.values(), key=lambda one: one.sequence)


@checks("STR02")
def overlap(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """A part starts before the one before it ends."""
    _, off = scan.files.steps
    if names := scan.files.names((off < 0) & (scan.files.parts["start"] > 0)):
        yield Defect(message=f"parts of {', '.join(names[:9])} overlap", **scan.files.named(names))


@checks("STR04")
def shared(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Two parts or ranges name the same row."""
    for found in scan.files.told("shared"):
        before = [number - 1 for number in found.trajectories if number]
        yield Defect(message=found.message, trajectories=[*before, *found.trajectories], left_out=found.left_out)
    parts = scan.files.parts
    blocks = list(scan.files.headers)
    order = np.lexsort((parts["row"], parts["block"]))
    order = order[parts["length"][order] > 0]
    block = parts["block"][order]
    stop = (parts["row"] + parts["length"])[order]
    shares = (block[1:] == block[:-1]) & (parts["row"][order][1:] < stop[:-1])
    for number in np.unique(block[1:][shares]).tolist():
        both = np.flatnonzero(shares & (block[1:] == number))
        names = scan.files.names(order[np.union1d(both, both + 1)])
        yield Defect(message=f"{', '.join(names[:9])} share rows of {blocks[number]!r}", **scan.files.named(names))


@checks("STR05")
def twice(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """A block, trajectory or number is there twice, or a name says something else than the content."""
    files = scan.files
    seen: dict[tuple[str, int], str] = {}
    for name, header in sorted(files.headers.items()):
        other = seen.setdefault((header.writer, header.sequence), name)
        if name != (right := block_name(header.writer, header.sequence)) and name.startswith("rollout_"):
            names = [f"{header.writer}:{number}" for number in np.unique(header.fragments["trajectory"]).tolist()]
            message = f"{name!r} holds what {right!r} should" + (f", as {other!r} does" if other != name else "")
            yield Defect(message=message, **files.named(names))
    is_first, off = files.steps
    if names := files.names(~is_first & (files.parts["start"] == 0) & (off < 0)):
        yield Defect(message=f"trajectories {', '.join(names[:9])} begin twice", **files.named(names))
    if scan.failure is None and files.folder is None:
        same: dict[str, list[int]] = {}
        for place, name in enumerate(scan.recording.ids):
            same.setdefault(re.sub(r"(?<!\d)0+(?=\d)", "", name), []).append(place)
        for name, places in same.items():
            if len(places) > 1:
                yield Defect(message=f"{name!r} is there {len(places)} times", trajectories=places)
        for place, name in enumerate(scan.recording.ids) if scan.recording.format == "minari" else ():
            said = scan.recording.info(place).metadata.get("id")
            if isinstance(said, (int, np.integer)) and not name.endswith(str(said)):
                yield Defect(message=f"{name!r} says that it is number {said}", trajectories=[place])


@checks("STR06")
def fields_differ(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Blocks or episodes differ in fields, dtypes or shapes; where a field is only missing, it may be meant."""
    files = scan.files
    if files.folder is None and scan.failure is None and scan.num_episodes:
        scan.facts  # noqa: B018 - some readers look at the fields of an episode when it is read
        infos = [scan.recording.info(place) for place in range(scan.num_episodes)]
        common = usual(info.schema for info in infos)
        for schema in dict.fromkeys(info.schema for info in infos if info.schema != common):
            places = [place for place, info in enumerate(infos) if info.schema == schema]
            same = all(schema[name] == common[name] for name in schema if name in common)
            lacks = {*common} - {*schema}
            severity = "info" if same and lacks <= _FLAGS else "warning" if same else ""
            yield Defect(None, f"fields of others: {common.difference(schema)}", places, severity=severity)
    if files.headers:
        common = usual(header.schema for header in files.headers.values())
        for name, header in files.headers.items():
            if difference := common.difference(header.schema):
                names = [f"{header.writer}:{number}" for number in np.unique(header.fragments["trajectory"]).tolist()]
                yield Defect(message=f"{name!r} has other fields: {difference}", **files.named(names))


@checks("STR07")
def description(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """What is said of fields disagrees with the data."""
    if scan.files.folder is not None and scan.files.headers:
        there = usual(header.schema for header in scan.files.headers.values())
        try:
            said = Schema.from_json(read_document(scan.files.folder / "metadata.json")["fields"])
        except BAD_METADATA as problem:
            is_missing = isinstance(problem, (OSError, ValueError)) and not isinstance(problem, RolloutDataError)
            if not is_missing and not isinstance(problem, (KeyError, TypeError)):
                yield Defect(message=f"metadata.json describes no fields: {problem}")
        else:
            if len(said) and (difference := there.difference(said)):
                yield Defect(message=f"metadata.json has other fields than the blocks: {difference}")
        return
    for group in ("observation", "action") if scan.failure is None else ():
        for name, box in boxes(scan.metadata, group):
            shape: Any = box.get("shape")
            is_told = name in scan.schema and isinstance(shape, list) and all(isinstance(one, int) for one in shape)
            if is_told and math.prod(shape) != scan.schema[name].num_elements:
                yield Defect(name, f"{name!r} is said to be {shape}, and is {list(scan.schema[name].shape)}")


@checks("STR10")
def splits(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """An episode is in two parts that exclude each other, or a part names none."""
    try:
        parts = {name: set(part.ids) for name, part in scan.recording.split().items()}
    except UsageError as nothing:
        raise Inapplicable("the files name no parts") from nothing
    for one, other in combinations(parts, 2):
        mine = _SPLIT.fullmatch(one.lower())
        theirs = _SPLIT.fullmatch(other.lower())
        both = parts[one] & parts[other]
        if mine and theirs and mine[1] == theirs[1] and mine[2][:5] != theirs[2][:5] and both:
            message = f"{len(both)} episodes are in {one!r} and in {other!r}"
            yield Defect(message=message, **scan.files.named(both))
    said = scan.metadata.get("splits")
    total = scan.num_episodes
    if scan.problems and isinstance(told := scan.metadata.get("total_episodes"), int):
        total = max(total, told)  # some are left out
    for name, text in said.items() if isinstance(said, Mapping) else ():
        stop = str(text).partition(":")[2]
        if stop.isdecimal() and int(stop) > total:
            yield Defect(message=f"{name!r} is {text}, of {total} episodes")
