"""Repair the findings of `doctor` in a copy of a recording.

A repair removes, splits and renames episodes, rebuilds indices, and recomputes metadata that are
derived from the data. It changes no measured value and no byte of the source. The same source
always results in the same bytes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from storage.core import arguments
from storage.errors import DataFileError, RolloutDataError, UnansweredError

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
from ...sources.recordings.recording import Recording
from ..doctor.examination import chosen_rules, doctor, opened
from ..doctor.findings import Finding
from ..doctor.provenance import masked
from .copied_blocks import intact_part, write_packed
from .edits import Edits, Key, read_edits, write_part
from .merge_split import finish, is_own, link_or_copy, new_folder, newest_ns
from .repair_actions import EPISODE_REPAIRS, EpisodePart

REPORT_NAME = "repair.json"
#: Writer name of repaired blocks, with a number appended if the source has the same writer name.
_WRITER = "mended"
_STAGING = ".mending"
_BLOCK_BYTES = 256 << 20
#: Maximum number of missing blocks per writer that a repair replaces by empty blocks.
_MAX_MISSING_BLOCKS = 10_000
#: Rules about block files. Their repair keeps intact trajectories and drops damaged ones.
_BLOCK_RULES = ("FIL01", "FIL02", "FIL03", "STR01", "STR02", "STR03", "STR05", "STR06")

Context = dict[str, Any]
#: Repair of the metadata for each rule code: a text for users, and a function that takes the old
#: metadata and the evidence of the finding, and returns the new metadata.
_METADATA_REPAIRS: Mapping[str, tuple[str, Callable[[Context, Mapping[str, Any]], Context]]] = {
    "STR07": (
        "spaces are removed from the metadata",
        lambda context, _: _without_keys(context, "_space", "spaces"),
    ),
    "STR08": (
        "totals are recounted",
        lambda context, _: _without_keys(context, "total_", "num_", "size"),
    ),
    "STR10": (
        "splits are removed from the metadata",
        lambda context, _: _without_keys(context, "splits", "mask"),
    ),
    "FIL06": ("metadata.json is rebuilt", lambda context, _: context),
    "TIM05": (
        "the measured rate replaces the declared one",
        lambda context, evidence: _with_rate(context, evidence),
    ),
    "PRV02": ("secrets are masked", lambda context, _: masked(context)),
    "STA02": ("stored statistics are removed", lambda context, _: _without_keys(context, "stat")),
}


@dataclass(frozen=True)
class Action:
    """Action by which a repair handles one finding.

    Attributes:
        finding: Finding of `doctor`.
        says: Description of the action for users, or the reason why nothing is done.
        kind: "K": trajectories are removed. "N": trajectories are split, or rows or fields are
            removed. "S": metadata or sums are recomputed. "-": nothing is done.
        trajectories: Ids of the affected trajectories in the source.
    """

    finding: Finding
    says: str
    kind: str
    trajectories: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the action as a dict of JSON values, for `repair.json`."""
        return {
            "code": self.finding.code,
            "field": self.finding.field,
            "severity": self.finding.severity,
            "message": self.finding.message,
            "kind": self.kind,
            "action": self.says,
            "trajectories": list(self.trajectories),
        }


@dataclass(frozen=True)
class Repaired:
    """Result of a repair, or of a dry run.

    Attributes:
        path: The new folder.
        actions: One action for each finding of `doctor`, in the same order.
        num_trajectories: Number of trajectories in the new folder; -1 after a dry run.
        remaining: Findings of the repaired rules that `doctor` still reports in the new folder.
        problems: Errors of damaged files in the new folder, by file name. Also the errors of
            trajectories that were deleted from the source after it was opened, by trajectory name.
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
    dry_run: bool = False,
    progress: bool = False,
) -> Repaired:
    """Write a repaired copy of a recording to a new folder, guided by the findings of `doctor`.

    A repair removes trajectories, rows, fields or final observations, splits episodes, and
    recomputes metadata and sums. It changes no measured value; `Finding.script` has code for that.

    Intact block files become hard links, and trajectories are removed as by `drop`. Episodes that
    are split or lose rows are written to new blocks of the writer "mended". Recordings of other
    formats are written as block files. `repair.json` in the new folder lists findings and actions.
    Findings of severity "info" are repaired only if `only` contains their code. A source with a
    damaged index is read with `on_bad_index="rebuild"`.

    Args:
        path: A path of any format, or a recording. If the recording is a selection, the new folder
            has only the selected trajectories.
        to: A new or empty folder.
        only: Codes of rules, or beginnings of codes; () means all rules.
        dry_run: Return the plan and write nothing.
        progress: Show progress bars.

    Raises:
        UsageError: A code is unknown, the path does not exist, or `to` is not empty or is in the
            source.
        DataFileError: No trajectory is readable, or the repair would remove every trajectory.
    """
    dry_run = arguments.flag("dry_run", dry_run)
    progress = arguments.flag("progress", progress)
    chosen_rules(only, ())
    target = arguments.path("to", to)
    recording, failure = opened(path)
    if recording is None:
        assert failure is not None
        raise failure
    recording, removed = present_part(recording)
    check_any_readable(recording, len(recording), [*recording.problems, *removed])
    problems: dict[str, RolloutDataError] = {error.episode: error for error in removed}
    diagnosis = doctor(recording, only=only, progress=progress)
    plan = _Plan(recording, diagnosis.findings, includes_infos=bool(only))
    if dry_run:
        return Repaired(target, tuple(plan.actions), problems=problems or None)
    if len(plan.dropped) == len(recording):
        problem = "keeps no trajectory after the repair" if len(recording) else "has no trajectory"
        raise DataFileError(f"{str(path)!r} {problem}. No folder was written.")
    repairs_blocks = not only or any(code.startswith(tuple(only)) for code in _BLOCK_RULES)
    with new_folder("to", target, recording.path) as made:
        _write(plan, made, repairs_blocks, progress)
        _write_report(plan, made)
    folder = BlockFolder.at(target, verify_on_open=True)
    codes = sorted({action.finding.code for action in plan.actions if action.kind != "-"})
    return Repaired(
        path=target,
        actions=tuple(plan.actions),
        num_trajectories=len(folder.index),
        remaining=doctor(target, only=codes).findings if codes else (),
        problems={**problems, **folder.problems},
    )


def _write_report(plan: _Plan, made: Path) -> None:
    source = {"format": plan.recording.format, "checksum": _folder_checksum(plan.recording.path)}
    report = {"source": source, "actions": [action.as_dict() for action in plan.actions]}
    text = json.dumps(report, indent=2, default=str)
    (made / REPORT_NAME).write_text(text, encoding="utf-8")


class _Plan:
    """Plan of a repair: for each finding the action, and for each episode the repairs.

    Args:
        recording: The source to repair.
        findings: Findings of `doctor`.
        includes_infos: Whether findings of severity "info" are repaired.

    Attributes:
        actions: One action for each finding.
        context: Entries of the new metadata.json, except the description of the fields.
        ids: Names of the trajectories of the source.
        dropped: Indices of the trajectories that are removed.
        repairs: Map from the index of an episode to its repairs, each as (rule code, finding).
        writer: Name of the writer of new blocks.
    """

    def __init__(
        self,
        recording: Recording,
        findings: Sequence[Finding],
        includes_infos: bool,
    ) -> None:
        self.recording = recording
        self.context = dict(recording.metadata)
        self.ids = recording.ids
        self.dropped: set[int] = set()
        self.repairs: dict[int, list[tuple[str, Finding]]] = {}
        self.writer = _free_writer({block.writer for block in recording.blocks})
        self._includes_infos = includes_infos
        self._codes = {finding.code for finding in findings}
        # Plan the rules about blocks first. They drop trajectories with damaged rows. Otherwise a
        # repair of such a trajectory would write its damaged rows with new, valid checksums.
        ranks = [_planning_rank(finding.code) for finding in findings]
        actions: dict[int, Action] = {}
        for number in np.argsort(ranks, kind="stable").tolist():
            actions[number] = self._action(findings[number])
        self.actions = [actions[number] for number in range(len(findings))]

    def _action(self, finding: Finding) -> Action:
        code = finding.code
        if finding.severity == "info" and not self._includes_infos:
            return Action(finding, f"nothing: severity info; --only {code} repairs it", "-")
        if code in _METADATA_REPAIRS:
            says, change = _METADATA_REPAIRS[code]
            self.context = change(self.context, finding.evidence)
            if code not in EPISODE_REPAIRS or not finding.places:
                return Action(finding, says, "S")
        if code in _BLOCK_RULES and is_own(self.recording):
            return self._action_for_blocks(finding)
        if code in EPISODE_REPAIRS:
            return self._action_for_episodes(finding)
        if finding.repair == "-" or not finding.places:
            return Action(finding, f"nothing: {finding.advice}", "-")
        self.dropped.update(finding.places)
        return Action(finding, "dropped", "K", self._ids_at(finding.places))

    def _action_for_blocks(self, finding: Finding) -> Action:
        says = "damaged trajectories of the blocks are dropped, intact trajectories are kept"
        if finding.code == "STR05" or str(finding.field).startswith("notes/"):
            return Action(finding, says, "K")
        places = list(finding.places)
        if finding.code in ("FIL02", "FIL03"):
            # The finding names all trajectories that may have rows in the damaged block. Those with
            # an end in intact blocks are complete, so keep them.
            places = [place for place in places if not self._has_ended(place)]
        self.dropped.update(places)
        return Action(finding, says, "K", (*self._ids_at(places), *finding.left_out))

    def _action_for_episodes(self, finding: Finding) -> Action:
        code = finding.code
        if code == "END07" and "END09" in self._codes:
            # Rule END09 found that the stored next observations are wrong. The reader has derived
            # the final observations from them. The repair of END08 removes final observations.
            code = "END08"
        rule = EPISODE_REPAIRS[code]
        named: Sequence[int] = finding.places
        if rule.is_of_all or not named:
            named = range(len(self.recording))
        places = [place for place in named if place not in self.dropped]
        if not places:
            return Action(finding, "nothing: the trajectories are dropped for other findings", "-")
        for place in places:
            self.repairs.setdefault(place, []).append((code, finding))
        return Action(finding, rule.description, finding.repair, self._ids_at(places))

    def _has_ended(self, place: int) -> bool:
        info = self.recording.info(place)
        return bool(info.terminated or info.truncated)

    def _ids_at(self, places: Sequence[int]) -> tuple[str, ...]:
        return tuple(self.ids[place] for place in places)

    def parts(self, place: int) -> list[EpisodePart]:
        """Apply all repairs of the episode with the index `place`. Returns its new parts."""
        episode = self.recording[place]
        parts = [EpisodePart.whole(episode)]
        order = list(EPISODE_REPAIRS)
        for code, finding in sorted(self.repairs[place], key=lambda pair: order.index(pair[0])):
            repaired = []
            for part in parts:
                repaired += EPISODE_REPAIRS[code].parts(part, finding, place)
            parts = [part for part in repaired if part.length]
        return parts

    def repaired_episodes(self) -> list[tuple[int, EpisodeToWrite]]:
        """Return pairs (index of the episode, part) for the parts of all repaired episodes."""
        places = sorted(self.repairs.keys() - self.dropped)
        return [(place, part) for place in places for part in self.parts(place)]

    def all_episodes(self) -> list[tuple[int, EpisodeToWrite]]:
        """Return pairs (index of the episode, episode or part) for all episodes of the new folder.

        Dropped episodes are left out. A repaired episode is replaced by its parts.
        """
        episodes: list[tuple[int, EpisodeToWrite]] = []
        for place in range(len(self.recording)):
            if place in self.dropped:
                continue
            if place in self.repairs:
                episodes += [(place, part) for part in self.parts(place)]
            else:
                episodes.append((place, self.recording[place]))
        return episodes


def _free_writer(writers: Collection[str]) -> str:
    """Return a writer name that is not in `writers`: "mended", "mended-2" and so on."""
    name = _WRITER
    number = 1
    while name in writers:
        number += 1
        name = f"{_WRITER}-{number}"
    return name


def _planning_rank(code: str) -> int:
    """Return the position of a rule in the order of planning. Rules with a low rank come first.

    Episode repairs come last, because trajectories that other rules drop need no repair.
    """
    if code in _BLOCK_RULES:
        return 0
    return 2 if code in EPISODE_REPAIRS else 1


def _write(plan: _Plan, made: Path, repairs_blocks: bool, progress: bool) -> None:
    """Write the repaired recording to the empty folder `made`.

    Blocks are linked if that is possible. Otherwise all episodes are written to new blocks.
    """
    recording = plan.recording
    if is_own(recording):
        repaired = plan.repaired_episodes()
        has_same_fields = all(not recording.schema.difference(part.schema) for _, part in repaired)
        if has_same_fields and _link_and_write(plan, repaired, made, repairs_blocks, progress):
            return
    publish_metadata(made, _write_episodes(plan, plan.all_episodes(), made, progress), plan.writer)


def _link_and_write(
    plan: _Plan,
    repaired: Sequence[tuple[int, EpisodeToWrite]],
    made: Path,
    repairs_blocks: bool,
    progress: bool,
) -> bool:
    """Link the intact blocks of a folder, and write the repaired episodes to new blocks.

    Returns:
        Whether the folder was written. It stays empty if the repaired episodes have other fields
        than the blocks, because all blocks of a folder must have the same fields.

    Raises:
        DataFileError: A block is damaged, and `repairs_blocks` is False.
    """
    folder = BlockFolder.at(plan.recording.path, verify_on_open=repairs_blocks or bool(repaired))
    folder.keep_only(plan.recording.blocks)
    assert folder.schema is not None
    metadata = Metadata.of_schema(folder.schema, _own_context(plan.context))
    damaged = _damaged_files(folder, plan.recording)
    if damaged and repaired and not repairs_blocks:
        # Damaged rows of a repaired episode would be written with new, valid checksums.
        name = damaged[0]
        error = DataFileError(
            f"{name!r} in {str(folder.data_dir)!r} is damaged. Repair the rules FIL and STR too."
        )
        raise error from folder.problems[name]
    if repaired:
        written = _write_episodes(plan, repaired, made, progress)
        if written.schema.difference(folder.schema):
            for path in made.glob("*.h5"):
                path.unlink()
            return False
        metadata = Metadata.of_schema(folder.schema, {**written.context, **metadata.context})
    for block in folder.blocks.values():
        if not block.is_edit:
            link_or_copy(block.path, made / block.path.name)
    for name in damaged:
        content, _ = intact_part(folder.data_dir / name)
        if content is not None:
            write_block(made, replace(content, created_ns=newest_ns(folder)))
    _write_empty_blocks(folder, made, damaged, repairs_blocks)
    edits = read_edits(folder)
    new = BlockFolder.at(made)
    finish(new, metadata, _kept_trajectories(new.index, plan, edits), edits.notes)
    return True


def _damaged_files(folder: BlockFolder, recording: Recording) -> list[str]:
    """Return the names of the damaged files of a folder, except metadata.json.

    Files that were created after the recording was opened are ignored.
    """
    opened_names = {block.path.name for block in recording.blocks}
    reported = [str(problem) for problem in recording.problems]
    damaged = set()
    for name in folder.problems:
        is_reported = any(name in text for text in reported)
        if name in opened_names or is_reported:
            damaged.add(name)
    return sorted(damaged - {METADATA_NAME})


def _write_empty_blocks(
    folder: BlockFolder,
    made: Path,
    damaged: Sequence[str],
    fills_gaps: bool,
) -> None:
    """Write an empty block for each unreadable block and, with `fills_gaps`, each missing block.

    Without them, readers would report the sequence numbers of these blocks as missing.

    Args:
        folder: The source.
        made: The new folder.
        damaged: Names of the damaged files of the source.
        fills_gaps: Whether blocks are also written for gaps in the sequence numbers of a writer.
    """
    assert folder.schema is not None
    missing = {_writer_and_sequence(folder.data_dir / name) for name in damaged}
    sequences: dict[str, list[int]] = {}
    if fills_gaps:
        for block in folder.blocks.values():
            if not block.is_edit:
                sequences.setdefault(block.writer, []).append(block.sequence)
    for writer, known in sequences.items():
        first = min(known)
        stop = min(max(known), first + _MAX_MISSING_BLOCKS)
        missing.update((writer, sequence) for sequence in range(first, stop))
    for writer, sequence in sorted(missing):
        if sequence < FIRST_EDIT and not (made / block_name(writer, sequence)).exists():
            write_part(made, folder.schema, writer, sequence, Edits(created_ns=newest_ns(folder)))


def _writer_and_sequence(path: Path) -> tuple[str, int]:
    """Return the writer and the sequence number of a block from its header or file name.

    If both are unreadable, returns "" and `FIRST_EDIT`. No data block has this sequence number.
    """
    try:
        header = read_header(path)
        return header.writer, header.sequence
    except (RolloutDataError, OSError):
        match = re.fullmatch(r"rollout_([A-Za-z0-9-]{1,100})_(\d{1,18})\.h5", path.name)
        return (match[1], int(match[2])) if match else ("", FIRST_EDIT)


def _kept_trajectories(index: TrajectoryIndex, plan: _Plan, before: Edits) -> set[Key]:
    """Return the keys of the trajectories in the new folder that readers do not skip.

    Readers skip the trajectories of linked blocks that the plan drops or writes to new blocks. They
    also skip those that were dropped in the source, have a missing part, or are not selected.

    Args:
        index: Index of the new folder.
        plan: Plan of the repair.
        before: Edits of the source.
    """
    empty_blocks: dict[str, int] = {}
    for block in sorted(index.blocks, key=lambda block: block.sequence):
        if not len(block.fragments):
            empty_blocks[block.writer] = block.sequence
    last_blocks = index.fragment_block[index.first_fragment[1:] - 1].tolist()
    # An open trajectory may be incomplete if an empty block follows its last block. The empty block
    # replaces a damaged or missing block, which may have had the end.
    may_be_cut = []
    for number in last_blocks:
        block = index.blocks[number]
        may_be_cut.append(block.sequence < empty_blocks.get(block.writer, -1))
    is_whole = index.is_complete() | ~np.array(may_be_cut, bool)
    whole = {*index.keys(np.flatnonzero(is_whole))} - before.dropped
    left_out = {plan.ids[place] for place in {*plan.dropped, *plan.repairs}}
    kept = {key for key in whole if f"{key[0]}:{key[1]}" not in left_out}
    if plan.recording.origin.ids is None:
        return kept
    # The recording is a selection. The linked blocks also have trajectories that are not selected.
    chosen = set(plan.ids)
    return {key for key in kept if key[0] == plan.writer or f"{key[0]}:{key[1]}" in chosen}


def _write_episodes(
    plan: _Plan, episodes: Sequence[tuple[int, EpisodeToWrite]], made: Path, progress: bool
) -> Metadata:
    """Write episodes as blocks of the writer `plan.writer`. Returns the metadata for them.

    Episodes that cannot be read are left out, because `doctor` has reported them.
    """
    options: dict[str, Any] = {}
    if is_own(plan.recording):
        codecs = plan.recording.metadata.get("obs_disassemble_mapping")
        options["obs_disassemble_mapping"] = codecs or {}
    staging = made / _STAGING
    listed = [episode for _, episode in episodes]
    writer = OwnWriter(staging, listed, _own_context(plan.context), options)
    origins = []
    try:
        for place, episode in tqdm(episodes, desc="repair", unit=" episodes", disable=not progress):
            try:
                writer.add(episode)
            except UnansweredError:
                raise
            except DataFileError:
                continue
            metadata = plan.recording.info(place).metadata
            env = int(metadata.get("env", 0))
            end_time_ns = int(metadata.get("end_time_ns", place + 1))
            origins.append((env, end_time_ns))
    finally:
        writer.close()
    write_packed(BlockFolder.at(staging), made, plan.writer, _BLOCK_BYTES, origins)
    document = json.loads((staging / METADATA_NAME).read_text(encoding="utf-8"))
    shutil.rmtree(staging)
    return Metadata.from_json(document)


def _folder_checksum(path: Path) -> str | None:
    """Return a BLAKE2b checksum over the file names and contents of a recording; None for a URL."""
    if isinstance(path, RemotePath):
        return None
    digest = blake2b(digest_size=16)
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    for name in files:
        digest.update(str(name.relative_to(path)).encode())
        digest.update(name.stat().st_size.to_bytes(8, "little"))
        with open(name, "rb") as file:
            while data := file.read(1 << 20):
                digest.update(data)
    return digest.hexdigest()


def _own_context(metadata: Mapping[str, Any]) -> Context:
    return {name: value for name, value in metadata.items() if name not in RESERVED_KEYS}


def _without_keys(context: Mapping[str, Any], *texts: str) -> Context:
    """Return a copy of the metadata without the entries whose key contains one of `texts`."""
    left_out = {name for name in context for text in texts if text in name}
    return {name: value for name, value in context.items() if name not in left_out}


def _with_rate(context: Mapping[str, Any], evidence: Mapping[str, Any]) -> Context:
    rate = float(evidence["rate_hz"])
    return {**context, **{name: rate for name in ("fps", "frame_rate_hz") if name in context}}
