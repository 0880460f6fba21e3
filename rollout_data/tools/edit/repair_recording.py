"""Repairing a recording in a new folder, by the findings of `doctor`.

One rule: the source stays byte for byte, and the same source gives the same bytes: no clock and no chance.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from storage.core import arguments
from storage.errors import DataFileError, RolloutDataError, UnansweredError, UsageError, nearest

from ...blocks.block import FIRST_EDIT
from ...blocks.block_folder import BlockFolder
from ...blocks.block_header import METADATA_NAME, read_header
from ...blocks.folder_metadata import RESERVED_KEYS, Metadata, publish_metadata
from ...blocks.trajectory_index import TrajectoryIndex
from ...blocks.write_block import block_name, write_block
from ...formats.block_episode_writer import OwnWriter
from ...formats.episode_writer import EpisodeToWrite
from ...formats.open_recording import check_any_readable, present_part
from ...remote.locations import DataDir, RemotePath
from ...sources.recording import Recording
from ...sources.video_range import VideoRange
from ..doctor.examination import chosen_rules, doctor, opened
from ..doctor.findings import Finding
from ..doctor.provenance import masked
from .copied_blocks import intact_part, write_packed
from .edits import Edits, Key, read_edits, write_part
from .merge_split import finish, is_own, link_or_copy, new_folder, newest_ns
from .repair_actions import MENDS, Case, Draft

#: These change what numbers mean: only if `yes` names them.
ASKS = ("VAL10", "VAL13", "IMG04", "TIM08")
REPORT_NAME = "repair.json"
_MENDED = "mended"
_STAGING = ".mending"
_BLOCK_BYTES = 256 << 20
#: Blocks of a writer, at most, that missing blocks are looked for among.
_MOST_GONE = 10_000
#: Findings about whole blocks of ours: what is intact of them stays, and what lacks a part then is dropped.
_OF_BLOCKS = ("FIL01", "FIL02", "FIL03", "STR01", "STR02", "STR03", "STR05", "STR06")
#: Code -> what is done to the metadata of the whole: context and evidence -> context.
_CONTEXTS: Mapping[str, tuple[str, Callable[[dict[str, Any], Mapping[str, Any]], dict[str, Any]]]] = {
    "STR07": ("described by the data", lambda context, evidence: _without(context, "_space", "spaces")),
    "STR08": ("counted anew", lambda context, evidence: _without(context, "total_", "num_", "size")),
    "STR10": ("the parts left out of the metadata", lambda context, evidence: _without(context, "splits", "mask")),
    "FIL06": ("metadata.json written anew", lambda context, evidence: context),
    "TIM05": ("the rate measured", lambda context, evidence: _with_rate(context, evidence)),
    "PRV02": ("secrets masked", lambda context, evidence: masked(context)),
    "STA02": ("stored statistics left out", lambda context, evidence: _without(context, "stat")),
}


@dataclass(frozen=True)
class Action:
    """What is done about a finding.

    Attributes:
        finding: As `doctor` gives it.
        says: What is done, or why nothing is.
        kind: "K" trajectories are left out, "N" rewritten, "S" computed anew, "-" nothing.
        trajectories: Ids of the trajectories in the source that it is done to.
    """

    finding: Finding
    says: str
    kind: str
    trajectories: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        finding = {name: getattr(self.finding, name) for name in ("code", "field", "severity", "message")}
        return {**finding, "kind": self.kind, "action": self.says, "trajectories": list(self.trajectories)}


@dataclass(frozen=True)
class Repaired:
    """What a repair did, or would do.

    Attributes:
        path: The new folder.
        actions: One for each finding, in the order of `doctor`.
        num_trajectories: What the new folder holds; -1 after a dry run.
        remaining: What `doctor` still finds of what was mended.
        problems: File name -> what `verify` says of the new folder; id of a trajectory that was removed from the source
            since the recording was opened -> its error.
    """

    path: Path
    actions: tuple[Action, ...]
    num_trajectories: int = -1
    remaining: tuple[Finding, ...] = ()
    problems: Mapping[str, RolloutDataError] | None = None


def repair(
    path: DataDir,
    to: str | os.PathLike[str],
    *,
    only: Sequence[str] = (),
    yes: Sequence[str] = (),
    dry_run: bool = False,
    progress: bool = False,
) -> Repaired:
    """Mend what `doctor` finds, in a new folder of block files; the source is not touched.

    Of our own format, sound blocks become hard links, what is left out is dropped as by `drop`, and what is rewritten
    is in blocks of the writer "mended". Recordings of other formats are written anew as block files. `repair.json` in
    the new folder lists findings and actions. Findings of severity "info" are mended only if `only` names them.
    Sources are those of `convert`; one whose index is wrong is read with `on_bad_index="rebuild"`.

    Args:
        path: A path of any format, or a recording; of a selection only its trajectories are in the new folder.
        to: A new or empty folder.
        only: Codes to mend, or beginnings of codes; () is all.
        yes: Codes among `ASKS` that are confirmed: mending them changes what numbers mean.
        dry_run: Write nothing, give the plan.
        progress: Show progress bars.

    Raises:
        UsageError: A code is not known, there is nothing at the path, or `to` is not empty, or lies in it.
        DataFileError: Nothing can be read, or nothing would be left.
    """
    action = "call rollout_data.repair"
    dry_run = arguments.flag(action, "dry_run", dry_run)
    progress = arguments.flag(action, "progress", progress)
    if unknown := [code for code in arguments.names(action, "yes", yes) if code not in ASKS]:
        raise UsageError(action, "", f"yes with codes among {nearest(unknown[0], ASKS)}", repr(unknown[0]))
    chosen_rules(action, only, ())
    target = arguments.path(action, "to", to)
    recording, failure = opened(action, path)
    if recording is None:
        assert failure is not None
        raise failure
    recording, removed = present_part(recording)
    check_any_readable(recording, len(recording), [*recording.problems, *removed])
    problems: dict[str, RolloutDataError] = {error.episode: error for error in removed}
    diagnosis = doctor(recording, only=only, progress=progress)
    plan = _Plan(recording, diagnosis.findings, bool(only), yes)
    if dry_run:
        return Repaired(target, tuple(plan.actions), problems=problems or None)
    if len(plan.dropped) == len(recording):
        got = "findings in all of them" if len(recording) else "none"
        raise DataFileError("repair", repr(str(path)), "a trajectory to keep", got)
    with new_folder(action, "to", target, recording.path) as made:
        _write(plan, made, not only or any(code.startswith(tuple(only)) for code in _OF_BLOCKS), progress)
        actions = [action.as_dict() for action in plan.actions]
        report = {"source": {"format": recording.format, "checksum": checksum_of(recording.path)}, "actions": actions}
        (made / REPORT_NAME).write_text(json.dumps(report, indent=2, default=str), encoding="utf-8")
    folder = BlockFolder.at(target, verify_on_open=True)
    codes = sorted({action.finding.code for action in plan.actions if action.kind != "-"})
    remaining = doctor(target, only=codes).findings if codes else ()
    problems |= folder.problems
    return Repaired(target, tuple(plan.actions), len(folder.index), tuple(remaining), problems)


class _Plan:
    """What is to be done: `dropped` places, `mends` by place, and changes of the metadata."""

    def __init__(self, recording: Recording, findings: Sequence[Finding], is_chosen: bool, yes: Sequence[str]) -> None:
        self.recording = recording
        self.context = dict(recording.metadata)
        self.ids = recording.ids
        self.dropped: set[int] = set()
        #: Place -> (code whose row of `MENDS` is applied, finding).
        self.mends: dict[int, list[tuple[str, Finding]]] = {}
        self._found = {finding.code for finding in findings}
        first = sorted(findings, key=lambda one: (one.code in MENDS) - (one.code in _OF_BLOCKS))  # what is left out
        planned = {id(finding): self._planned(finding, is_chosen, yes) for finding in first}
        self.actions = [planned[id(finding)] for finding in findings]
        #: The drafts of one episode, made again when they are asked for.
        self.drafts = lru_cache(maxsize=1)(self._drafts)

    def _planned(self, finding: Finding, is_chosen: bool, yes: Sequence[str]) -> Action:
        code = finding.code
        places = list(finding.places)
        if finding.severity == "info" and not is_chosen:
            return Action(finding, f"nothing: worth knowing only; --only {code} mends it", "-")
        if code in ASKS and code not in yes:
            return Action(finding, f"nothing: it changes what numbers mean; --yes {code} confirms it", "-")
        if code in _CONTEXTS:
            says, change = _CONTEXTS[code]
            self.context = change(self.context, finding.evidence)
            if code not in MENDS or not places:
                return Action(finding, says, "S")
        if code in _OF_BLOCKS and is_own(self.recording):
            says = "what is intact of the blocks is kept, and trajectories that lack a part are dropped"
            if code == "STR05" or str(finding.field).startswith("notes/"):
                return Action(finding, says, "K")
            if code in ("FIL02", "FIL03"):  # what a damaged header says may name others, which are whole without it
                infos = [(place, self.recording.info(place)) for place in places]
                places = [place for place, info in infos if not (info.terminated or info.truncated)]
            self.dropped |= set(places)  # so that no other finding has damaged rows written anew
            return Action(finding, says, "K", (*self._ids(places), *finding.left_out))
        if code == "END07" and "END09" in self._found:
            code = "END08"  # final observations that come from wrong successors tell nothing of the last row
        if (mend := MENDS.get(code)) is not None:
            named = range(len(self.recording)) if mend.everywhere or not places else places
            if not (places := [place for place in named if place not in self.dropped]):
                return Action(finding, "nothing: left out because of other findings", "-")
            for place in places:
                self.mends.setdefault(place, []).append((code, finding))
            return Action(finding, mend.says, finding.repair, self._ids(places))
        if finding.repair == "-" or not places:
            return Action(finding, f"nothing: {finding.advice}", "-")
        self.dropped |= set(places)
        return Action(finding, "left out", "K", self._ids(places))

    def _ids(self, places: Sequence[int]) -> tuple[str, ...]:
        return tuple(self.ids[place] for place in places)

    def _drafts(self, place: int) -> list[Draft]:
        drafts = [Draft.of(self.recording[place])]
        for code, finding in sorted(self.mends[place], key=lambda one: list(MENDS).index(one[0])):
            case = Case(finding, place, self.recording)
            drafts = [new for draft in drafts for new in MENDS[code].function(draft, case) if new.length]
        return drafts

    def _draft(self, place: int, number: int) -> Draft:
        return self.drafts(place)[number]

    def episodes(self, places: Sequence[int]) -> Iterator[tuple[int, EpisodeToWrite]]:
        """Yield what replaces these episodes: (place, episode); one that needs no mending as it is."""
        for place in places:
            for number in range(len(self.drafts(place))) if place in self.mends else ():
                yield place, _Lazy(partial(self._draft, place, number))
            if place not in self.mends:
                yield place, self.recording[place]


class _Lazy(EpisodeToWrite):
    """A draft of an episode, without its rows until they are asked for."""

    def __init__(self, made: Callable[[], Draft]) -> None:
        self._made = made
        draft = made()
        self.id = draft.id
        self.length = draft.length
        self.schema = draft.schema
        self.texts = draft.texts
        self.terminated = draft.terminated
        self.truncated = draft.truncated
        self.success = draft.success
        self.task = draft.task
        self.metadata = draft.metadata
        self.final = draft.final or ()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Any:
        return self._made().read(name, start, stop)

    def video(self, name: str) -> VideoRange | None:
        return None

    @property
    def final_observation(self) -> Any:
        return self._made().final_observation


def _write(plan: _Plan, made: Path, mends_files: bool, progress: bool) -> None:
    """Fill the new folder."""
    recording = plan.recording
    pieces = list(plan.episodes(sorted(plan.mends)))
    is_same = all(not recording.schema.difference(piece.schema) for _, piece in pieces)
    if not (is_own(recording) and is_same and _beside(plan, pieces, made, mends_files, progress)):
        pieces = list(plan.episodes([place for place in range(len(recording)) if place not in plan.dropped]))
        publish_metadata(made, _write_anew(plan, pieces, made, progress), _MENDED)


def _beside(
    plan: _Plan, pieces: Sequence[tuple[int, EpisodeToWrite]], made: Path, mends_files: bool, progress: bool
) -> bool:
    """Link the blocks of a folder of ours, and write what is rewritten beside them; False where fields do not fit."""
    folder = BlockFolder.at(plan.recording.path, verify_on_open=mends_files or bool(pieces))
    folder.keep_only(plan.recording.blocks)
    assert folder.schema is not None
    metadata = Metadata.of_schema(folder.schema, _context(plan.context))
    damaged = _damaged_in(folder, plan.recording)
    if damaged and pieces and not mends_files:  # what is rewritten would have right checksums
        advice = "Mend FIL and STR, too"
        where = repr(str(folder.data_dir))
        raise DataFileError("repair", where, "intact blocks", repr(damaged[0]), advice) from folder.problems[damaged[0]]
    if pieces:
        told = _write_anew(plan, pieces, made, progress)
        if told.schema.difference(folder.schema):
            for path in made.glob("*.h5"):
                path.unlink()
            return False
        metadata = Metadata.of_schema(folder.schema, {**told.context, **metadata.context})
    for block in folder.blocks.values():
        if not block.is_edit:
            link_or_copy(block.path, made / block.path.name)
    for name in damaged:
        content, _ = intact_part(folder.data_dir / name)
        if content is not None:
            write_block(made, replace(content, created_ns=newest_ns(folder)))
    _fill(folder, made, damaged, mends_files)
    new = BlockFolder.at(made)
    edits = read_edits(folder)
    finish(new, metadata, _kept(new.index, plan, edits), edits.said)
    return True


def _damaged_in(folder: BlockFolder, recording: Recording) -> list[str]:
    """Return the damaged files of a folder that were there when a recording of it was opened."""
    opened = {block.path.name for block in recording.blocks}
    reported = [str(problem) for problem in recording.problems]
    found = [name for name in folder.problems if name in opened or any(name in text for text in reported)]
    return sorted({*found} - {METADATA_NAME})


def _fill(folder: BlockFolder, made: Path, damaged: Sequence[str], mends_gaps: bool) -> None:
    """Put empty blocks in the place of those that could not be read, and of those that are gone between others."""
    assert folder.schema is not None
    gone = {_place_of(folder.data_dir / name) for name in damaged}
    known = dict[str, list[int]]()
    for block in folder.blocks.values() if mends_gaps else ():
        if not block.is_edit:
            known.setdefault(block.writer, []).append(block.sequence)
    for writer, there in known.items():
        gone |= {(writer, one) for one in range(min(there), min(max(there), min(there) + _MOST_GONE))}
    for writer, sequence in sorted(gone):
        if sequence < FIRST_EDIT and not (made / block_name(writer, sequence)).exists():
            write_part(made, folder.schema, writer, sequence, Edits(created_ns=newest_ns(folder)))


def _place_of(path: Path) -> tuple[str, int]:
    """Return writer and sequence of a block, by its name if it is damaged; ("", `FIRST_EDIT`) if it has none."""
    try:
        header = read_header(path)
        return header.writer, header.sequence
    except (RolloutDataError, OSError):
        found = re.fullmatch(r"rollout_([A-Za-z0-9-]{1,100})_(\d{1,18})\.h5", path.name)
        return (found[1], int(found[2])) if found else ("", FIRST_EDIT)


def _kept(index: TrajectoryIndex, plan: _Plan, before: Edits) -> set[Key]:
    """Return the trajectories of a new folder that count: not those that are left out or rewritten, nor lack a part."""
    gone = {plan.ids[place] for place in {*plan.dropped, *plan.mends}}
    empty = {
        one.writer: one.sequence for one in sorted(index.blocks, key=lambda one: one.sequence) if not len(one.fragments)
    }
    last = [index.blocks[number] for number in index.fragment_block[index.first_fragment[1:] - 1].tolist()]
    is_cut = [one.sequence < empty.get(one.writer, -1) for one in last]  # what ended it may have been in there
    whole = {*index.keys(np.flatnonzero(index.is_complete() | ~np.array(is_cut, bool)))} - before.dropped
    if plan.recording.origin.ids is not None:  # of a selection, blocks are linked with what was not chosen
        chosen = set(plan.ids)
        whole = {key for key in whole if f"{key[0]}:{key[1]}" in chosen}
    return {key for key in whole if f"{key[0]}:{key[1]}" not in gone}


def _write_anew(plan: _Plan, pieces: Sequence[tuple[int, EpisodeToWrite]], made: Path, progress: bool) -> Metadata:
    """Write episodes as blocks of the writer "mended"; give the metadata that belong to them."""
    options = {"obs_disassemble_mapping": plan.recording.metadata.get("obs_disassemble_mapping") or {}}
    staging = made / _STAGING
    writer = OwnWriter(
        staging, [piece for _, piece in pieces], _context(plan.context), options if is_own(plan.recording) else {}
    )
    origins = []
    try:
        for place, piece in tqdm(pieces, desc="repair", unit=" episodes", disable=not progress):
            try:
                writer.add(piece)
            except UnansweredError:
                raise
            except DataFileError:  # a foreign episode that cannot be read: `doctor` names it
                continue
            about = plan.recording.info(place).metadata
            origins.append((int(about.get("env", 0)), int(about.get("end_time_ns", place + 1))))
    finally:
        writer.close()
    write_packed(BlockFolder.at(staging), made, _MENDED, _BLOCK_BYTES, origins)
    described = json.loads((staging / METADATA_NAME).read_text(encoding="utf-8"))
    shutil.rmtree(staging)
    return Metadata.from_json(described)


def checksum_of(path: Path) -> str | None:
    """Return BLAKE2b of names and contents of the files of a recording; None of a URL."""
    if isinstance(path, RemotePath):
        return None
    digest = blake2b(digest_size=16)
    listed = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    for one in listed:
        digest.update(str(one.relative_to(path)).encode() + one.stat().st_size.to_bytes(8, "little"))
        with open(one, "rb") as file:
            while data := file.read(1 << 20):
                digest.update(data)
    return digest.hexdigest()


def _context(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {name: told for name, told in metadata.items() if name not in RESERVED_KEYS}


def _without(context: Mapping[str, Any], *beginnings: str) -> dict[str, Any]:
    """Leave out the keys that have one of these parts."""
    return {name: told for name, told in context.items() if not any(part in name for part in beginnings)}


def _with_rate(context: Mapping[str, Any], evidence: Mapping[str, Any]) -> dict[str, Any]:
    rate = float(evidence["rate_hz"])
    return {**context, **{name: rate for name in ("fps", "frame_rate_hz") if name in context}}
