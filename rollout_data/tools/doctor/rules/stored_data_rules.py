"""Rules STA, FIL and PRV: stored statistics, files, and the origin of the data."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from storage.errors import RolloutDataError

from ....blocks.block_header import FORMAT_NAME, METADATA_NAME, BlockHeader, damaged_fragments
from ....blocks.folder_metadata import BAD_METADATA, read_document
from ....formats.input_checks import read_object
from ....writing.writer_journal import is_alive
from ..batched_reading import Array, evenly_spread
from ..field_facts import Facts
from ..findings import Defect, Inapplicable, Settings, checks
from ..provenance import ORIGINS, secrets_of
from ..scan import Scan
from ..stored_statistics import (
    STATISTICS,
    StoredStatistics,
    of_episodes,
    of_whole,
    reward_sums,
)

_CHUNK = re.compile(r"traj_\d+_(\d+)\.(?:pickle|pkl)")
_JOURNAL = re.compile(r"\.rollout_(.+)\.journal")
#: For each format, the pattern of the file names that belong to a folder of this format.
_EXPECTED = {
    FORMAT_NAME: r"rollout_.+\.h5|metadata\.json|damaged|trajectory_.*",
    "lerobot": r"norm_stats\.json",
    "trajectory-folders": r"metadata\.json",
    "aloha": r"episode_\d+\.hdf5",
    "motion": r".*\.(npz|json)",
    "minari": r"main_data\.hdf5|(namespace_)?metadata\.json",
    "rlds": r"(dataset_info|features|metadata|dataset_statistics.*)\.json|.*tfrecord.*",
}
#: Pattern of file names that may be in a folder of any format. It is appended to the pattern of a
#: format, so it begins with "|".
_ANYWHERE = r"|repair\.json|rollout_conversion\.jsonl|README.*|LICEN[CS]E.*|report.*\.html"
#: Maximum number of episodes whose metadata are searched for private data.
_NUM_SEARCHED = 100


@checks("STA01")
def sums(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report episodes whose stored sums or statistics disagree with their rows."""
    if scan.failure is not None:
        return
    rewards = reward_sums(scan)
    if rewards is not None:
        with np.errstate(invalid="ignore"):
            error = np.abs(rewards.stored - rewards.computed)
            wrong = np.flatnonzero(error > settings["share"] * rewards.scale)
        if len(wrong):
            stored = rewards.stored[wrong[0]]
            computed = rewards.computed[wrong[0]]
            message = f"stored sums of {rewards.field!r} differ from the sums of the rows, "
            message += f"such as {stored:.6g} and {computed:.6g}"
            evidence = {"largest": float(error[wrong].max())}
            yield Defect(rewards.field, message, rewards.numbers[wrong], evidence=evidence)
    for place, statistics in of_episodes(scan):
        facts = scan.facts.get(statistics.field)
        if facts is not None:
            yield from _compared(statistics, facts, place, settings["share"])


def _compared(
    statistics: StoredStatistics,
    facts: Facts,
    place: int,
    share: float,
) -> Iterator[Defect]:
    """Yield a defect if a stored statistic of an episode disagrees with the rows of the episode.

    If several statistics disagree, only the first one is reported.

    Args:
        statistics: Stored statistics of a field in the episode.
        facts: Facts about the field, computed from the rows.
        place: Index of the episode.
        share: Accepted difference, as a fraction of the value.
    """
    row = np.flatnonzero(facts.numbers == place)
    if not len(row) or (facts.low > facts.high)[row].all():
        # Nothing to compare, because the rows of the episode were not read.
        return
    tables = {"mean": facts.mean, "min": facts.low, "max": facts.high}
    for key, table in tables.items():
        stored = statistics.values.get(key)
        computed = table[row[0]].astype(np.float64)
        if stored is None or stored.shape != computed.shape:
            continue
        allowed = share * np.abs(computed) + 10 * share * facts.spread + 1e-6
        error = np.abs(stored - computed)
        if (error > allowed).any():
            dim = int(np.argmax(error - allowed))
            message = f"the stored {key} of {statistics.field!r}[{dim}] is {stored[dim]:.6g}, "
            message += f"and the computed one is {computed[dim]:.6g}"
            evidence = {key: float(stored[dim]), "rows": float(computed[dim])}
            yield Defect(statistics.field, message, [place], evidence=evidence)
            return


@checks("STA02")
def statistics(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report stored statistics of the whole recording that disagree with its rows."""
    for stored in of_whole(scan):
        facts = scan.facts.get(stored.field)
        if facts is None:
            continue
        if any(values.shape != facts.spread.shape for values in stored.values.values()):
            continue
        for key, is_wrong in _wrong_dims(stored, facts, settings).items():
            if is_wrong.any():
                dims = np.flatnonzero(is_wrong).tolist()
                message = f"the stored {key} of {stored.field!r} differs from the rows"
                message += f" in dimensions {dims[:9]}"
                yield Defect(stored.field, message, evidence={key: dims})


def _wrong_dims(
    statistics: StoredStatistics,
    facts: Facts,
    settings: Settings,
) -> dict[str, Array]:
    """Map each statistic to `[D]` bool: whether it disagrees with the rows in each dimension."""
    sample = facts.sorted
    finite = np.ma.masked_where(np.isnan(sample), sample)
    num_finite = np.maximum(1, np.isfinite(sample).sum(1))
    unknown = np.full(len(sample), np.nan)
    stored_mean = statistics.values.get("mean", unknown)
    stored_sd = statistics.values.get("std", unknown)
    stored_min = statistics.values.get("min", unknown)
    stored_max = statistics.values.get("max", unknown)
    with np.errstate(invalid="ignore", over="ignore"):
        mean = np.average(facts.mean, axis=0, weights=facts.lengths)
        sd = finite.std(axis=1, dtype=np.float64).filled(np.nan)
        rounding = 1e-6 * (1 + np.abs(mean))
        is_off_mean = np.abs(stored_mean - mean) > settings["sd"] * sd + rounding
        ratio = stored_sd / np.where(sd > rounding, sd, np.nan)
        is_off_sd = (ratio > settings["ratio"]) | (ratio < 1 / settings["ratio"])
        margin = 1e-3 * facts.spread + 1e-6
        is_outside = sample < (stored_min - margin)[:, None]
        is_outside |= sample > (stored_max + margin)[:, None]
    return {
        "mean": is_off_mean,
        "std": is_off_sd,
        "min or max": is_outside.sum(1) / num_finite > settings["share"],
    }


@checks("FIL01")
def checksums(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report rows and annotations that do not match their checksums."""
    if scan.files.folder is None:
        if scan.failure is not None or scan.recording.format != "rlds":
            raise Inapplicable("only block files and TFRecord files have checksums to compare")
        scan.facts  # noqa: B018 - reading compares the checksums of records
    for name, header in scan.files.headers.items():
        yield from _damaged_rows(scan, name, header)
        yield from _damaged_notes(scan, name, header)


def _damaged_rows(scan: Scan, name: str, header: BlockHeader) -> Iterator[Defect]:
    for _, error in damaged_fragments(header):
        trajectories = scan.files.located([f"{header.writer}:{error.trajectory}"])
        frames = [(place, *error.frames) for place in trajectories["trajectories"]]
        for field in error.fields:
            yield Defect(
                field,
                f"{name}: {error}",
                frames=frames,
                evidence={"block": name},
                **trajectories,
            )


def _damaged_notes(scan: Scan, name: str, header: BlockHeader) -> Iterator[Defect]:
    for kind, table in header.notes.items():
        damaged = [key for key, data in table.read(header.read_bytes) if data is None]
        if damaged:
            names = [f"{header.writer}:{key}" for key in damaged] if kind == "episodes" else []
            yield Defect(
                f"notes/{kind}",
                f"{name}: a note is damaged",
                evidence={"block": name},
                **scan.files.located(names),
            )


@checks("FIL03")
def truncated_chunks(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report truncated chunk files of trajectory folders.

    The name of a chunk has its stop frame. A chunk is truncated if fewer frames were read. Opening
    a recording does not report a recent truncated chunk, because its writer may still be running.
    """
    if scan.failure is not None or scan.recording.format != "trajectory-folders":
        return
    num_read: dict[str, int] = {}
    for name, length in zip(scan.recording.ids, scan.lengths.tolist(), strict=True):
        folder_name = name.rpartition(":")[0]
        num_read[folder_name] = num_read.get(folder_name, 0) + length
    reported = {problem.episode for problem in scan.problems}
    for folder in sorted(scan.files.path.rglob("trajectory_*")):
        name = str(folder.relative_to(scan.files.path))
        stop = _last_chunk_stop(folder)
        if stop > num_read.get(name, 0) and reported.isdisjoint({name, folder.name}):
            message = f"the chunk of {name!r} that ends at {stop} is truncated"
            yield Defect(message=message, **scan.files.located([name]))


def _last_chunk_stop(folder: Path) -> int:
    """Return the stop frame in the name of the last chunk in a folder; -1 without chunks."""
    if not folder.is_dir():
        return -1
    matches = [_CHUNK.fullmatch(name) for name in os.listdir(folder)]
    return max((int(match[1]) for match in matches if match), default=-1)


@checks("FIL04")
def leftovers(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report temporary files of writers that have died, and recordings marked as unfinished."""
    folder = scan.files.path
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    prefixes_in_use: list[str] = []
    for name in names:
        match = _JOURNAL.fullmatch(name)
        if match and is_alive(folder / name):
            writer = match[1]
            prefixes_in_use += [f".tmp_rollout_{writer}_", f".rollout_{writer}.j"]
    for name in names:
        is_temporary = name.startswith((".tmp_", ".rollout_", ".packing"))
        if is_temporary and not name.startswith(tuple(prefixes_in_use)):
            yield Defect(message=f"{name!r} belongs to a writer that has ended")
    if scan.metadata.get("is_unfinished") is True:
        yield Defect(message="the metadata mark the recording as unfinished")


@checks("FIL05")
def strangers(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report files that do not belong to the recording, and links to files outside the folder."""
    folder = scan.files.path
    if not folder.is_dir():
        return
    root = os.path.realpath(folder)
    # A snapshot in the cache of the Hugging Face hub consists of links to another folder of it.
    is_hub_snapshot = os.path.basename(os.path.dirname(root)) == "snapshots"
    is_ours = scan.files.folder is not None
    expected = _expected_names(scan)
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        leads_out = not os.path.realpath(entry.path).startswith(root + os.sep)
        if entry.is_symlink() and leads_out:
            if not is_hub_snapshot:
                message = f"{entry.name!r} leads out of the folder"
                yield Defect(message=message, severity="warning")
            continue
        is_hidden = entry.name.startswith(".")
        if not expected or is_hidden or (entry.is_dir() and not is_ours):
            continue
        if not re.fullmatch(expected + _ANYWHERE, entry.name):
            yield Defect(message=f"{entry.name!r} does not belong to the recording")


def _expected_names(scan: Scan) -> str | None:
    """Return the pattern of file names that belong to the recording; None if it is unknown."""
    if scan.files.folder is not None:
        return _EXPECTED[FORMAT_NAME]
    return None if scan.failure is not None else _EXPECTED.get(scan.recording.format)


@checks("FIL06")
def metadata_file(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report metadata files that are missing or unreadable."""
    path = scan.files.path
    format_name = None if scan.failure is not None else scan.recording.format
    if format_name == "lerobot" and (path / STATISTICS).exists():
        try:
            read_object(path / STATISTICS)
        except (RolloutDataError, OSError) as problem:
            yield Defect(message=str(problem))
    has_blocks = bool(scan.files.headers or scan.files.bad)
    if has_blocks or format_name == "trajectory-folders":
        try:
            read_document(path / METADATA_NAME)
        except FileNotFoundError:
            yield Defect(message=f"{METADATA_NAME} is missing")
        except BAD_METADATA as problem:
            yield Defect(message=f"{METADATA_NAME} cannot be read: {problem}")


@checks("FIL07")
def lossy(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report lossy codecs whose error is large relative to the standard deviation of the field."""
    errors: dict[str, float] = {}
    for header in scan.files.headers.values():
        for name, coding in header.codings.items():
            errors[name] = max(errors.get(name, 0.0), coding.max_error)
    for name, error in errors.items():
        if not error or name not in scan.schema or name not in scan.facts:
            continue
        deviations = np.nanstd(scan.facts[name].sorted, axis=1, dtype=np.float64)
        sd = float(np.nanmedian(deviations))
        if error > settings["share"] * sd:
            message = f"the codec of {name!r} has errors up to {error:.3g}, and the standard "
            message += f"deviation of the values is {sd:.3g}"
            yield Defect(name, message, evidence={"error": error, "sd": sd})


@checks("PRV01")
def unknown_origin(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report metadata that do not name the environment from which the data come.

    A folder of block files may state that it has no environment, by a key with the value null.
    """
    if scan.failure is not None:
        raise Inapplicable("the recording cannot be opened")
    known = set(scan.metadata)
    if scan.files.folder is None:
        known = {key for key, value in scan.metadata.items() if value not in (None, "", {})}
    missing = [fact for fact, keys in ORIGINS.items() if known.isdisjoint(keys)]
    if "env" in missing:
        message = f"the metadata name no {', '.join(missing)}"
        yield Defect(message=message, evidence={"missing": missing})


@checks("PRV02")
def secrets(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report tokens, mail addresses and home directories in metadata, masked in the message."""
    yield from _secrets_in(scan.metadata, [])
    places = np.arange(scan.num_episodes)
    for place in evenly_spread(places, min(_NUM_SEARCHED, scan.num_episodes)).tolist():
        yield from _secrets_in(scan.recording.info(place).metadata, [place])


def _secrets_in(metadata: Mapping[str, Any], places: list[int]) -> Iterator[Defect]:
    for key, kind, masked in secrets_of(metadata):
        yield Defect(message=f"{key}: {kind} {masked}", trajectories=places)
