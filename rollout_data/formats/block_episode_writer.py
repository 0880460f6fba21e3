"""Episodes of any recording as a folder of block files.

One rule: a published block holds whole episodes, or a part of a single one that is larger than a block. So a killed
conversion leaves whole episodes, and blocks that are removed when it is resumed.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import numpy as np
import torch

from storage.core.fields import DTYPES, Schema, unflatten
from storage.errors import RolloutDataWarning

from ..blocks.annotation_table import EPISODES, MAX_NOTE_BYTES
from ..blocks.annotations import parsed
from ..blocks.block_folder import BlockFolder, block_entries
from ..blocks.block_header import DATA, METADATA_NAME, layouts_of, read_header
from ..blocks.edit_blocks import named_edit
from ..blocks.folder_metadata import ENDS, OPEN_END, UNKNOWN, load_metadata, mark_noted_ends
from ..blocks.row_layout import RowLayout
from ..blocks.trajectory_index import TrajectoryIndex
from ..sources.episode_reader import ABSENT
from ..sources.episode_source import RESERVED, Fit, common_fields
from ..sources.folder_reader import SOURCE_ID
from ..writing.conversion_record import NOTE_NAME, ConversionNote, note_replaced
from ..writing.json_values import plain
from ..writing.record_inputs import is_taken
from ..writing.rollout_writer import RolloutWriter
from .episode_writer import EpisodeToWrite, ForeignWriter, can_be_filled, occupied

OWN = "rollout-data"
#: Rows that are read at once; blocks are published when this much was added.
_PORTION_BYTES, _PUBLISHED_BYTES = 16 << 20, 64 << 20
_COUNTS = "normalized_image"
#: (writer, number) of a trajectory.
Key = tuple[str, int]
_GROUPS = ("observation", "privileged_observation", "action", "reward")


class OwnWriter(ForeignWriter):
    """Write episodes through a `RolloutWriter` of one env.

    Options: `obs_disassemble_mapping`, component -> codec; by default `normalized_image` of what is stored so already.
    """

    format = OWN
    HOLDS = None
    can_grow = True
    MADE = ("metadata.json", "rollout_*.h5", ".rollout_*")
    OPTIONS: ClassVar[Mapping[str, Any]] = {"obs_disassemble_mapping": {}}

    @classmethod
    def noted(cls, path: Path) -> ConversionNote | None:
        if path.is_dir() and not (path / NOTE_NAME).exists():
            if block_entries(path):
                raise occupied(path, f"a folder of block files without {NOTE_NAME!r}")
            return None
        return super().noted(path)

    @classmethod
    def effective(
        cls,
        options: Mapping[str, Any],
        path: Path,
        episodes: Sequence[EpisodeToWrite],
        metadata: Mapping[str, Any],
    ) -> dict[str, Any]:
        mapping = {**_kept_codecs(map(_renamed_of, episodes)), **(options["obs_disassemble_mapping"] or {})}
        return {"obs_disassemble_mapping": {name: codec for name, codec in mapping.items() if codec != "raw"}}

    def begin(self) -> set[str]:
        self._writer: RolloutWriter | None = None
        self._num_bytes = 0
        self._is_open = False
        about = [(_renamed(episode.schema), _noted_end(episode)) for episode in self.episodes]
        fit = common_fields([schema for schema, _ in about], keeps_episodes=True)
        self._fit: Fit = _without_inventions(fit)
        spoken = [one.texts for one in self.episodes if _renamed(one.schema) not in self._fit.left_out]
        self._texts = [name for name in (spoken[0] if spoken else ()) if all(name in texts for texts in spoken)]
        self._has_noted_ends = any(end for _, end in about)
        self._layout: RowLayout = layouts_of(self._fit.schema)[DATA]
        kept = _kept_codecs([schema for schema, _ in about])
        kept = {name: codec for name, codec in kept.items() if f"observation/{name}" in self._fit.schema}
        self._mapping = {**kept, **(self.options["obs_disassemble_mapping"] or {})}
        self._added: list[str] = []
        if self.path.is_dir() and (found := self._there() - self.conversion.published):
            self._note_blocks(found)
        self._mark_noted_ends()
        return {*self.conversion.published}

    def _mark_noted_ends(self) -> None:
        """Note in metadata.json of a folder without noted ends that there are some: readers look for them only then."""
        there = load_metadata(self.path) if self.path.is_dir() else None
        if there is not None and self._has_noted_ends and there.context.get(ENDS) != UNKNOWN:
            note_replaced(self.path, [self.path / METADATA_NAME])
            self.conversion.files_of_all.pop(METADATA_NAME, None)
            mark_noted_ends(self.path)

    def _there(self) -> set[str]:
        """Return the ids of the episodes in the folder, dropped ones too; remove the blocks of one that is not whole.

        Raises:
            UsageError: Other trajectories are there.
        """
        folder = BlockFolder.at(self.path)
        if not folder.index.is_complete().all():
            self._remove_parts(folder.index)
            folder = BlockFolder.at(self.path)
        ids: dict[Key, str] = {}
        others = set[Key]()
        for block in folder.blocks.values():
            if not block.is_edit:
                header = read_header(block.path)
                others.update((block.writer, number) for number in block.fragments["trajectory"].tolist())
                for number, text in header.read_notes(EPISODES):
                    ids[block.writer, number] = str(parsed(block.path, text).get(SOURCE_ID))
        if others - ids.keys() or not {*ids.values()} <= self.conversion.rows.keys():
            raise occupied(self.path, "other trajectories")
        return {*ids.values()}

    def _note_blocks(self, episodes: Collection[str]) -> None:
        """Note the blocks that are not noted yet, with the episodes in them."""
        names = [one.name for one in block_entries(self.path) if named_edit(one.name) is None]
        if (self.path / METADATA_NAME).exists():
            names.append(METADATA_NAME)
        files = {name: self.path / name for name in names}
        self.note_files({name: files[name] for name in files.keys() - self.conversion.files_of_all}, episodes)

    def _remove_parts(self, index: TrajectoryIndex) -> None:
        """Remove the blocks in which a killed conversion left a part of an episode, and nothing else."""
        is_whole = np.repeat(index.is_complete(), np.diff(index.first_fragment))
        needed = set(index.fragment_block[is_whole].tolist())
        for number in sorted(set(index.fragment_block[~is_whole].tolist()) - needed, reverse=True):
            index.blocks[number].path.unlink(missing_ok=True)

    def _opened(self) -> RolloutWriter:
        if self._writer is None:
            context = self.fitting_metadata()
            if self._has_noted_ends:
                context[ENDS] = UNKNOWN
            if "fps" in context:
                context.setdefault("frame_rate_hz", context["fps"])
            with warnings.catch_warnings():
                # The episodes that a killed conversion had not published are converted again.
                warnings.filterwarnings("ignore", ".*ended without close", RolloutDataWarning)
                self._writer = RolloutWriter(
                    self.path,
                    1,
                    metadata=context,
                    obs_disassemble_mapping=self._mapping or None,
                    block_age_s=1e9,
                    without_action=not self._fit.schema.below("action"),
                    without_observation=not self._fit.schema.below("observation"),
                )
        return self._writer

    def add(self, episode: EpisodeToWrite) -> None:
        schema = _renamed(episode.schema)
        if difference := self._fit.left_out.get(schema):
            self.changed(f"the episode is left out: {difference}", episode)
            return
        for name in self._fit.dropped.keys() & schema.keys():
            self.changed(f"field {name!r} is left out: expected {self._fit.dropped[name]}", episode)
        for name in episode.schema:
            free = _free_name(name)
            self.changed(f"field {name!r} is called {free!r}", episode, free != name and free in self._fit.schema)
        for name in set(episode.texts) - set(self._texts):
            self.changed(f"field {name!r} is left out: expected a field of all episodes", episode)
        for name in self._fit.lacking.get(schema, ()):
            value = "False" if self._fit.schema[name].dtype == "bool" else "NaN"
            self.changed(f"field {name!r} is {value} in episodes that lack it", episode)
        writer = self._opened()
        size = max(1, _PORTION_BYTES // max(1, self._layout.frame_bytes))
        num_bytes = episode.length * self._layout.frame_bytes
        if self._num_bytes + num_bytes > _PUBLISHED_BYTES:
            self._publish(writer)  # if it fills a block, no other episode is in that block
        try:
            for start in range(0, episode.length, size):
                stop = min(start + size, episode.length)
                steps = self._steps(episode, start, stop)
                if stop == episode.length:
                    self.note(episode)
                    self._added.append(episode.id)
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", ".*as an extra field", RolloutDataWarning)
                    writer.add_rollout(**steps)
        except BaseException:  # Ctrl-C too: no part of an episode is published
            writer.discard([0])
            raise
        if self._is_open:
            writer.discard([0], leave_open=True)
            self._is_open = False
        self._num_bytes += num_bytes
        if self._num_bytes >= _PUBLISHED_BYTES:
            self._publish(writer)

    def _publish(self, writer: RolloutWriter) -> None:
        writer.flush()
        self._num_bytes = 0
        self._note_published()

    def _note_published(self) -> None:
        if self._added:
            self._note_blocks(self._added)
            self._added = []

    def _steps(self, episode: EpisodeToWrite, start: int, stop: int) -> dict[str, Any]:
        """Read steps as `add_rollout` takes them, `[T, 1, ...]`; with the last one, what is said of the episode."""
        count = stop - start
        is_last = stop == episode.length
        flat: dict[str, Any] = {}
        names = {_free_name(name): name for name in episode.schema}
        for name, field in self._fit.schema.items():
            missing = False if field.dtype == "bool" else np.nan
            values = episode.read(names[name], start, stop) if name in names else missing
            whole = np.broadcast_to(np.asarray(values), (count, *field.shape))
            kind = torch.float32 if field.dtype == "bfloat16" else DTYPES[field.dtype][0]
            rows = torch.from_numpy(whole.astype(torch.empty(0, dtype=kind).numpy().dtype))
            flat[name] = rows.to(field.torch_dtype)[:, None]
        given = unflatten(flat)
        for name in self._texts:
            given[_free_name(name)] = [[text] for text in episode.read(name, start, stop)]
        final = self._final(episode) if is_last else None
        # A block has final observations of ends only; the note tells that this one is none.
        ends = {"terminated": episode.terminated, "truncated": episode.truncated or _needs_end(episode, final)}
        for name, is_so in ends.items():
            given[name] = np.zeros((count, 1), bool)
            given[name][-1] = bool(is_last and is_so)
        if is_last:
            given["episode"] = [None] * (count - 1) + [[self._said(episode)]]
            given |= {} if final is None else {"final_observation": final}
            if not (ends["terminated"] or ends["truncated"]):
                self._is_open = True
        return given

    def _final(self, episode: EpisodeToWrite) -> Any:
        """Return the observation after the last step as `[1, ...]`; None if a part of it is missing."""
        found = episode.final_observation
        if found is None:
            return None
        found = found if isinstance(found, dict) else {"": found}
        fields = {name.partition("/")[2]: field for name, field in self._fit.schema.below("observation").items()}
        texts = [name.partition("/")[2] for name in self._texts if name.partition("/")[0] == "observation"]
        if any(name not in found for name in (*fields, *texts)):
            self.changed("the final observation is left out: it lacks a part", episode)
            return None
        rows = {name: torch.tensor(np.asarray(found[name])).to(one.torch_dtype)[None] for name, one in fields.items()}
        return rows[""] if "" in rows else unflatten({**rows, **{name: [found[name]] for name in texts}})

    def _said(self, episode: EpisodeToWrite) -> dict[str, Any]:
        """Return what is noted of an episode; what is too large is left out."""
        known: dict[str, Any] = {"task": episode.task or None, "success": episode.success}
        said = {
            f"recorded_{name}" if name in known and not _are_equal(value, known[name]) else name: plain(value)
            for name, value in episode.metadata.items()
        }
        said |= {name: value for name, value in known.items() if value is not None}
        end = _noted_end(episode)
        said |= {SOURCE_ID: episode.id, **({ENDS: end} if end else {})}
        schema = _renamed(episode.schema)
        noted = said.pop(ABSENT, None)
        # By the conversion that wrote the source.
        earlier = [_free_name(name) for name in noted if isinstance(name, str)] if isinstance(noted, list) else []
        filled = [name for name in self._fit.schema if name not in schema or name in earlier]
        joined = [name for name in earlier if any(str(one) in schema for one in PurePosixPath(name).parents)]
        if filled or joined:
            said[ABSENT] = [*filled, *joined]
        return self.fitting(said, MAX_NOTE_BYTES, episode)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            # After a full disk a writer closes without the episodes that it could not publish.
            if self._added and (found := self._there() - self.conversion.published):
                self._note_blocks(found)


def _without_inventions(fit: Fit) -> Fit:
    """Return a fit in which only flags and floats are filled that some episodes lack: flags stay flags.

    A stream gives flags and integers as floats; a copy would keep other numbers than its source, as floats round large
    integers.
    """
    lacking = {name for names in fit.lacking.values() for name in names}
    own = {name: field for schema in fit.forms for name, field in schema.items() if name in lacking}
    unfilled = [name for name, field in own.items() if not can_be_filled(field)]
    kept = Schema(own.get(name, field) for name, field in fit.schema.items() if name not in unfilled)
    still = {schema: [name for name in names if name in kept] for schema, names in fit.lacking.items()}
    return fit._replace(
        schema=kept,
        lacking={schema: names for schema, names in still.items() if names},
        dropped={**fit.dropped, **dict.fromkeys(unfilled, "a field of all episodes")},
    )


def _renamed_of(episode: EpisodeToWrite) -> Schema:
    return _renamed(episode.schema)


def _kept_codecs(schemas: Iterable[Schema]) -> dict[str, str]:
    """Return the codecs of components that are counts of 1/255 in all episodes already, and stay so without loss."""
    forms = list(dict.fromkeys(schemas))
    names = [name for name in (forms[0] if forms else ()) if name.startswith("observation/")]
    coded = [name for name in names if all(name in one and _COUNTS in one[name].codec for one in forms)]
    return {name.partition("/")[2]: _COUNTS for name in coded}


def _noted_end(episode: EpisodeToWrite) -> str:
    """Return what the note of an episode says of its end; "" if the flags of its block say it."""
    if None in (episode.terminated, episode.truncated) and episode.metadata.get(ENDS) != OPEN_END:
        return UNKNOWN
    return OPEN_END if episode.final and not (episode.terminated or episode.truncated) else ""


def _are_equal(value: Any, own: Any) -> bool:
    return type(plain(value)) is type(own) and bool(plain(value) == own)


def _needs_end(episode: EpisodeToWrite, final: Any) -> bool:
    return final is not None and not episode.terminated


def _free_name(name: str) -> str:
    """Return the name that a field has in a record, where others than its own mean something else."""
    group, slash, rest = name.partition("/")
    is_used = group not in _GROUPS and (is_taken(group) or group in RESERVED)
    return f"recorded_{group}{slash}{rest}" if is_used else name


@lru_cache(maxsize=64)
def _renamed(schema: Schema) -> Schema:
    return Schema(replace(field, name=_free_name(name)) for name, field in schema.items())
