"""Rules STA, FIL, PRV: statistics, files, provenance."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from storage.errors import RolloutDataError

from ....blocks.block_header import METADATA_NAME, damaged_fragments
from ....blocks.folder_metadata import BAD_METADATA, read_document
from ....formats.input_checks import read_object
from ....writing.writer_journal import is_alive
from ..findings import Defect, Inapplicable, Settings, checks
from ..provenance import ORIGINS, secrets_of
from ..scan import Scan
from ..stored_statistics import STATISTICS, Told, of_episodes, of_whole, reward_sums

_CHUNK = re.compile(r"traj_\d+_(\d+)\.(?:pickle|pkl)")
#: Files that belong to a folder of a format, besides those of `_ANYWHERE`; of others this is not known.
_EXPECTED = {
    "rollout-data": r"rollout_.+\.h5|metadata\.json|damaged|trajectory_.*",
    "lerobot": r"norm_stats\.json",
    "trajectory-folders": r"metadata\.json",
    "aloha": r"episode_\d+\.hdf5",
    "motion": r".*\.(npz|json)",
    "minari": r"main_data\.hdf5|(namespace_)?metadata\.json",
    "rlds": r"(dataset_info|features|metadata|dataset_statistics.*)\.json|.*tfrecord.*",
}
_ANYWHERE = r"|repair\.json|rollout_conversion\.jsonl|README.*|LICEN[CS]E.*|report.*\.html"


@checks("STA01")
def sums(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """What is stored of single episodes disagrees with their rows."""
    if scan.failure is None:
        for name, numbers, stored, found, scale in reward_sums(scan):
            with np.errstate(invalid="ignore"):
                wrong = np.flatnonzero(np.abs(stored - found) > settings["share"] * scale)
            if len(wrong):
                message = f"stored sums of {name!r} differ, as {stored[wrong[0]]:.6g} for {found[wrong[0]]:.6g}"
                evidence = {"largest": float(np.abs(stored - found)[wrong].max())}
                yield Defect(name, message, numbers[wrong], evidence=evidence)
        for place, told in of_episodes(scan):
            yield from _compared(scan, told, place, settings["share"])


def _compared(scan: Scan, told: Told, place: int, share: float) -> Iterator[Defect]:
    facts = scan.facts.get(told.field)
    if facts is None or not len(row := np.flatnonzero(facts.numbers == place)) or (facts.low > facts.high)[row].all():
        return  # its rows cannot be read
    for key, table in (("mean", facts.mean), ("min", facts.low), ("max", facts.high)):
        found = table[row[0]].astype(np.float64)
        if (stored := told.values.get(key)) is not None and stored.shape == found.shape:
            allowed = share * np.abs(found) + 10 * share * facts.spread + 1e-6
            if (np.abs(stored - found) > allowed).any():
                dim = int(np.argmax(np.abs(stored - found) - allowed))
                message = (
                    f"the stored {key} of {told.field!r}[{dim}] is {stored[dim]:.6g}, that of the rows {found[dim]:.6g}"
                )
                yield Defect(
                    told.field, message, [place], evidence={key: float(stored[dim]), "rows": float(found[dim])}
                )
                return


@checks("STA02")
def statistics(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """What is stored of the whole disagrees with the rows."""
    for told in of_whole(scan):
        facts = scan.facts.get(told.field)
        if facts is None or any(one.shape != facts.spread.shape for one in told.values.values()):
            continue
        sample = facts.sorted
        count = np.maximum(1, np.isfinite(facts.sorted).sum(1))
        known = np.ma.masked_where(np.isnan(sample), sample)
        nan = np.full(len(sample), np.nan)
        with np.errstate(invalid="ignore", over="ignore"):
            sd = known.std(axis=1, dtype=np.float64).filled(np.nan)
            mean = np.average(facts.mean, axis=0, weights=facts.lengths)
            far = np.abs(told.values.get("mean", nan) - mean) > settings["sd"] * sd + 1e-6 * (1 + np.abs(mean))
            ratio = told.values.get("std", nan) / np.where(sd > 1e-6 * (1 + np.abs(mean)), sd, np.nan)
            edge = 1e-3 * facts.spread + 1e-6
            low, high = (told.values.get(key, nan)[:, None] for key in ("min", "max"))
            crossed = ((sample < low - edge[:, None]) | (sample > high + edge[:, None])).sum(1) / count
        wrong = {
            "mean": far,
            "std": (ratio > settings["ratio"]) | (ratio < 1 / settings["ratio"]),
            "min or max": crossed > settings["share"],
        }
        for key, dims in wrong.items():
            if dims.any():
                listed = np.flatnonzero(dims).tolist()
                message = f"the stored {key} of {told.field!r} is not that of the rows, in dimensions {listed[:9]}"
                yield Defect(told.field, message, evidence={key: listed})


@checks("FIL01")
def checksums(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Rows or notes that their checksums contradict."""
    files = scan.files
    if files.folder is None:
        if scan.failure is not None or scan.recording.format != "rlds":
            raise Inapplicable("only blocks of our own and TFRecord files have checksums that are compared here")
        scan.facts  # noqa: B018 - records are compared when they are read
    for name, header in files.headers.items():
        for _, error in damaged_fragments(header):
            about = files.named([f"{header.writer}:{error.trajectory}"])
            frames = [(place, *error.frames) for place in about["trajectories"]]
            message = f"{name}: {error}"
            for field in error.fields:
                yield Defect(field, message, frames=frames, evidence={"block": name}, **about)
        for kind, table in header.notes.items():
            lost = [key for key, data in table.read(header.read_bytes) if data is None]
            names = [f"{header.writer}:{key}" for key in lost if kind == "episodes"]
            if lost:
                yield Defect(
                    f"notes/{kind}", f"{name}: a note is damaged", evidence={"block": name}, **files.named(names)
                )


@checks("FIL03")
def cut_chunks(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report chunks behind the frames that were read; opening takes one that was just written for unfinished."""
    if scan.failure is not None or scan.recording.format != "trajectory-folders":
        return
    there: dict[str, int] = {}
    for name, length in zip(scan.recording.ids, scan.lengths.tolist(), strict=True):
        folder = name.rpartition(":")[0]
        there[folder] = there.get(folder, 0) + length
    told = {problem.episode for problem in scan.problems}
    for folder in sorted(scan.files.path.rglob("trajectory_*")):
        stops = (
            [int(match[1]) for one in os.listdir(folder) if (match := _CHUNK.fullmatch(one))] if folder.is_dir() else []
        )
        name = str(folder.relative_to(scan.files.path))
        if stops and max(stops) > there.get(name, 0) and not {name, folder.name} & told:
            yield Defect(
                message=f"the chunk of {name!r} that ends at {max(stops)} breaks off", **scan.files.named([name])
            )


@checks("FIL04")
def leftovers(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """What writers that died have left."""
    folder = scan.files.path
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    alive = [name[9:-8] for name in names if re.fullmatch(r"\.rollout_.+\.journal", name) and is_alive(folder / name)]
    used = tuple(f".tmp_rollout_{writer}_" for writer in alive) + tuple(f".rollout_{writer}.j" for writer in alive)
    for name in names:
        if name.startswith((".tmp_", ".rollout_", ".packing")) and not (used and name.startswith(used)):
            yield Defect(message=f"{name!r} is left of a writer that has ended")
    if scan.metadata.get("is_unfinished") is True:
        yield Defect(message="the writer of this set has not finished it")


@checks("FIL05")
def strangers(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Files that are no part of the recording; links that lead out of the folder."""
    folder = scan.files.path
    root = os.path.realpath(folder)
    is_ours = scan.files.folder is not None
    expected = _EXPECTED.get("rollout-data" if is_ours else scan.recording.format if scan.failure is None else "")
    for entry in sorted(os.scandir(folder), key=lambda one: one.name) if folder.is_dir() else ():
        if entry.is_symlink() and not os.path.realpath(entry.path).startswith(root + os.sep):
            if os.path.basename(os.path.dirname(root)) != "snapshots":  # of the cache of the Hugging Face hub
                yield Defect(message=f"{entry.name!r} leads out of the folder", severity="warning")
        elif expected and entry.name[0] != "." and (is_ours or not entry.is_dir()):
            if re.fullmatch(expected + _ANYWHERE, entry.name):
                continue
            yield Defect(message=f"{entry.name!r} is no part of the recording")


@checks("FIL06")
def metadata_file(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """The description of the whole is missing or cannot be read."""
    if scan.failure is None and scan.recording.format == "lerobot" and (scan.files.path / STATISTICS).exists():
        try:
            read_object(scan.files.path / STATISTICS)
        except (RolloutDataError, OSError) as problem:
            yield Defect(message=str(problem))
    is_old = scan.failure is None and scan.recording.format == "trajectory-folders"
    if (scan.files.folder is not None and (scan.files.headers or scan.files.bad)) or is_old:
        try:
            read_document(scan.files.path / METADATA_NAME)
        except FileNotFoundError:
            yield Defect(message=f"there is no {METADATA_NAME}")
        except BAD_METADATA as problem:
            yield Defect(message=f"{METADATA_NAME} cannot be read: {problem}")


@checks("FIL07")
def lossy(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """A codec loses more than a small part of what varies."""
    errors: dict[str, float] = {}
    for header in scan.files.headers.values():
        for name, coding in header.codings.items():
            errors[name] = max(errors.get(name, 0.0), coding.max_error)
    for name, error in errors.items():
        if error and name in scan.schema and name in scan.facts:
            sd = float(np.nanmedian(np.nanstd(scan.facts[name].sorted, axis=1, dtype=np.float64)))
            if error > settings["share"] * sd:
                message = f"{name!r} was coded with errors up to {error:.3g}, and varies by {sd:.3g}"
                yield Defect(name, message, evidence={"error": error, "sd": sd})


@checks("PRV01")
def unknown_origin(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Nothing says where the data came from. A rate of null is an answer."""
    if scan.failure is not None:
        raise Inapplicable("the recording cannot be opened")
    is_ours = scan.files.folder is not None  # elsewhere null says nothing
    known = {key for key, value in scan.metadata.items() if is_ours or value not in (None, "", {})}
    lacking = [what for what, keys in ORIGINS.items() if known.isdisjoint(keys)]
    if "env" in lacking or len(lacking) == len(ORIGINS):
        yield Defect(message=f"the metadata name no {', '.join(lacking)}", evidence={"missing": lacking})


@checks("PRV02")
def secrets(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Tokens, mail addresses or home directories in metadata; what is shown is masked."""
    told: list[tuple[int | None, Mapping[str, Any]]] = [(None, scan.metadata)]
    for place in np.unique(np.linspace(0, scan.num_episodes - 1, min(100, scan.num_episodes)).astype(int)).tolist():
        told.append((place, scan.recording.info(place).metadata))
    for place, about in told:
        for key, kind, masked in secrets_of(about):
            yield Defect(message=f"{key}: {kind} {masked}", trajectories=[] if place is None else [place])
