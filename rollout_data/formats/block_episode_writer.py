"""`OwnWriter`: write the episodes of any recording to a folder of block files.

A published block contains complete episodes, or a part of one episode that is larger than a block.
A killed conversion may therefore leave blocks with a part of an episode. A resumed conversion
removes these blocks.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from storage.core.fields import DTYPES, Field, Schema, unflatten
from storage.errors import RolloutDataWarning

from ..blocks.annotation_table import EPISODES, MAX_NOTE_BYTES
from ..blocks.annotations import parsed
from ..blocks.block_folder import BlockFolder, block_entries
from ..blocks.block_header import DATA, METADATA_NAME, layouts_of, read_header
from ..blocks.edit_blocks import named_edit
from ..blocks.folder_metadata import ENDS, OPEN_END, UNKNOWN, load_metadata, mark_noted_ends
from ..blocks.row_layout import RowLayout
from ..blocks.trajectory_index import TrajectoryIndex
from ..sources.common_fields import RESERVED, Fit, common_fields
from ..sources.episode_info import ABSENT
from ..sources.recordings.open_episodes import SOURCE_ID
from ..writing.conversion_record import NOTE_NAME, ConversionNote, note_replaced
from ..writing.json_values import plain
from ..writing.record_inputs import is_taken
from ..writing.rollout_writer import RolloutWriter
from .episode_writer import (
    EpisodeToWrite,
    ForeignWriter,
    can_be_filled,
    earlier_absent,
    occupied,
    parts_of_fields,
)

OWN = "rollout-data"
#: Bytes of rows read at a time.
_PORTION_BYTES = 16 << 20
#: Bytes of added rows after which blocks are published.
_PUBLISHED_BYTES = 64 << 20
#: Codec of observation components whose values are multiples of 1/255.
_COUNTS = "normalized_image"
#: Key of a trajectory: (name of the writer, number of the trajectory).
Key = tuple[str, int]
#: Groups of fields that are stored under their own names. Fields in other groups may be renamed.
_GROUPS = ("observation", "privileged_observation", "action", "reward")


class OwnWriter(ForeignWriter):
    """Writer of a folder of block files, through a `RolloutWriter` with one environment.

    The option `obs_disassemble_mapping` maps observation components to codecs. Components that the
    source stores as `normalized_image` keep this codec by default.
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
                raise occupied(path, f"contains block files but no {NOTE_NAME!r} of a conversion")
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
        schemas = [_renamed(episode.schema) for episode in episodes]
        mapping = {**_kept_codecs(schemas), **(options["obs_disassemble_mapping"] or {})}
        coded = {name: codec for name, codec in mapping.items() if codec != "raw"}
        return {"obs_disassemble_mapping": coded}

    def begin(self) -> set[str]:
        self._writer: RolloutWriter | None = None
        #: Bytes of rows added since blocks were last published.
        self._num_bytes = 0
        #: Whether the trajectory of the last added episode is still open in the `RolloutWriter`.
        self._is_open = False
        #: Ids of the episodes added since blocks were last published.
        self._added: list[str] = []

        schemas = [_renamed(episode.schema) for episode in self.episodes]
        self._fit: Fit = _with_source_dtypes(common_fields(schemas, keeps_episodes=True))
        self._texts = self._shared_texts()
        self._has_noted_ends = any(map(_noted_end, self.episodes))
        self._layout: RowLayout = layouts_of(self._fit.schema)[DATA]
        self._mapping: dict[str, str] = {}
        for name, codec in _kept_codecs(schemas).items():
            if f"observation/{name}" in self._fit.schema:
                self._mapping[name] = codec
        self._mapping |= self.options["obs_disassemble_mapping"] or {}

        self._note_unlisted()
        self._mark_noted_ends()
        return {*self.conversion.published}

    def _shared_texts(self) -> list[str]:
        """Return the names of the text fields that exist in every episode to write."""
        left_out = self._fit.left_out
        written = [episode for episode in self.episodes if _renamed(episode.schema) not in left_out]
        if not written:
            return []
        texts = written[0].texts
        return [name for name in texts if all(name in episode.texts for episode in written)]

    def _mark_noted_ends(self) -> None:
        """Mark the folder if the end of an episode is stated in the episode's metadata.

        The mark is in metadata.json. Readers skip the ends in episode metadata without this mark.
        """
        metadata = load_metadata(self.path) if self.path.is_dir() else None
        if metadata is None or not self._has_noted_ends:
            return
        if metadata.context.get(ENDS) != UNKNOWN:
            note_replaced(self.path, [self.path / METADATA_NAME])
            self.conversion.files_of_all.pop(METADATA_NAME, None)
            mark_noted_ends(self.path)

    def _note_unlisted(self) -> None:
        """Add published episodes to the conversion record if it does not list them."""
        if self.path.is_dir():
            unlisted = self._present_episodes() - self.conversion.published
            if unlisted:
                self._note_blocks(unlisted)

    def _present_episodes(self) -> set[str]:
        """Remove blocks with only a part of an episode, and return the ids of complete episodes.

        Episodes that a user later dropped with edit blocks count as complete.

        Raises:
            UsageError: The folder has trajectories that this conversion did not write.
        """
        folder = BlockFolder.at(self.path)
        if not folder.index.is_complete().all():
            self._remove_parts(folder.index)
            folder = BlockFolder.at(self.path)

        trajectories = set[Key]()
        ids: dict[Key, str] = {}
        for block in folder.blocks.values():
            if block.is_edit:
                continue
            for number in block.fragments["trajectory"].tolist():
                trajectories.add((block.writer, number))
            for number, text in read_header(block.path).read_notes(EPISODES):
                ids[block.writer, number] = str(parsed(block.path, text).get(SOURCE_ID))

        episodes = {*ids.values()}
        if trajectories - ids.keys() or not episodes <= self.conversion.rows.keys():
            raise occupied(self.path, "contains trajectories that are not in the source")
        return episodes

    def _note_blocks(self, episodes: Collection[str]) -> None:
        """Add new blocks and the ids of their episodes to the conversion record."""
        names = {entry.name for entry in block_entries(self.path) if named_edit(entry.name) is None}
        if (self.path / METADATA_NAME).exists():
            names.add(METADATA_NAME)
        new = names - self.conversion.files_of_all.keys()
        self.note_files({name: self.path / name for name in new}, episodes)

    def _remove_parts(self, index: TrajectoryIndex) -> None:
        """Remove blocks of a killed conversion that contain only a part of an episode."""
        is_whole = np.repeat(index.is_complete(), np.diff(index.first_fragment))
        needed = set(index.fragment_block[is_whole].tolist())
        incomplete = set(index.fragment_block[~is_whole].tolist())
        for number in sorted(incomplete - needed, reverse=True):
            index.blocks[number].path.unlink(missing_ok=True)

    def _opened_writer(self) -> RolloutWriter:
        if self._writer is None:
            context = self.fitting_metadata()
            if self._has_noted_ends:
                context[ENDS] = UNKNOWN
            if "fps" in context:
                context.setdefault("frame_rate_hz", context["fps"])
            with warnings.catch_warnings():
                # The warning about data of a killed conversion is ignored, because the unpublished
                # episodes are converted again.
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
        difference = self._fit.left_out.get(schema)
        if difference:
            self.changed(f"the episode is left out: {difference}", episode)
            return
        self._report_changes(episode, schema)

        writer = self._opened_writer()
        num_bytes = episode.length * self._layout.frame_bytes
        if self._num_bytes + num_bytes > _PUBLISHED_BYTES:
            # The blocks so far are published first, so that a large episode gets blocks of its own.
            self._publish(writer)
        try:
            self._add_steps(writer, episode)
        except BaseException:  # Ctrl-C must not publish a part of an episode.
            writer.discard([0])
            raise
        if self._is_open:
            writer.discard([0], leave_open=True)
            self._is_open = False
        self._num_bytes += num_bytes
        if self._num_bytes >= _PUBLISHED_BYTES:
            self._publish(writer)

    def _report_changes(self, episode: EpisodeToWrite, schema: Schema) -> None:
        """Report the omitted, renamed and filled fields of an episode."""
        for name in self._fit.dropped.keys() & schema.keys():
            reason = self._fit.dropped[name]
            self.changed(f"field {name!r} is left out: {reason}", episode)
        for name in episode.schema:
            free = _free_name(name)
            if free != name and free in self._fit.schema:
                self.changed(f"field {name!r} is called {free!r}", episode)
        for name in set(episode.texts) - set(self._texts):
            change = f"field {name!r} is left out: some episodes do not have it"
            self.changed(change, episode)
        for name in self._fit.lacking.get(schema, ()):
            value = "False" if self._fit.schema[name].dtype == "bool" else "NaN"
            self.changed(f"field {name!r} is {value} in episodes without it", episode)

    def _add_steps(self, writer: RolloutWriter, episode: EpisodeToWrite) -> None:
        """Write an episode in portions; record its checksums before the last portion."""
        num_steps = max(1, _PORTION_BYTES // max(1, self._layout.frame_bytes))
        for start in range(0, episode.length, num_steps):
            stop = min(start + num_steps, episode.length)
            steps = self._steps(episode, start, stop)
            if stop == episode.length:
                self.note(episode)
                self._added.append(episode.id)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*as an extra field", RolloutDataWarning)
                writer.add_rollout(**steps)

    def _publish(self, writer: RolloutWriter) -> None:
        writer.flush()
        self._num_bytes = 0
        self._note_published()

    def _note_published(self) -> None:
        if self._added:
            self._note_blocks(self._added)
            self._added = []

    def _steps(self, episode: EpisodeToWrite, start: int, stop: int) -> dict[str, Any]:
        """Read the steps `start:stop` in the form that a `RolloutWriter` records: `[T, 1, ...]`.

        The last step of the episode also has the metadata of the episode.
        """
        num_steps = stop - start
        is_last = stop == episode.length
        fields: dict[str, Any] = {}
        names = {_free_name(name): name for name in episode.schema}
        for name, field in self._fit.schema.items():
            if name in names:
                values = episode.read(names[name], start, stop)
            else:
                values = False if field.dtype == "bool" else np.nan
            rows = np.broadcast_to(np.asarray(values), (num_steps, *field.shape))
            fields[name] = _as_tensor(rows, field)[:, None]

        steps = unflatten(fields)
        for name in self._texts:
            steps[_free_name(name)] = [[text] for text in episode.read(name, start, stop)]
        final = self._final(episode) if is_last else None
        # A block stores a final observation only for a trajectory with an end. An episode without
        # an end is therefore written as truncated, and its metadata state the true end.
        is_truncated = episode.truncated or (final is not None and not episode.terminated)
        for name, is_end in (("terminated", episode.terminated), ("truncated", is_truncated)):
            steps[name] = np.zeros((num_steps, 1), bool)
            steps[name][-1] = bool(is_last and is_end)
        if is_last:
            steps["episode"] = [None] * (num_steps - 1) + [[self._noted_metadata(episode)]]
            if final is not None:
                steps["final_observation"] = final
            self._is_open = not (episode.terminated or is_truncated)
        return steps

    def _final(self, episode: EpisodeToWrite) -> Any:
        """Read the observation after the last step: arrays `[1, ...]`, alone or in nested dicts.

        The result is None if the observation or one of its fields is missing.
        """
        observation = episode.final_observation
        if observation is None:
            return None
        parts = observation if isinstance(observation, dict) else {"": observation}
        fields = {}
        for name, field in self._fit.schema.below("observation").items():
            fields[name.partition("/")[2]] = field
        texts = []
        for name in self._texts:
            group, _, part = name.partition("/")
            if group == "observation":
                texts.append(part)
        if any(name not in parts for name in (*fields, *texts)):
            self.changed(
                "the final observation is left out: some of its fields are missing", episode
            )
            return None

        rows: dict[str, Any] = {}
        for name, field in fields.items():
            rows[name] = torch.tensor(np.asarray(parts[name])).to(field.torch_dtype)[None]
        if "" in rows:
            return rows[""]
        return unflatten({**rows, **{name: [parts[name]] for name in texts}})

    def _noted_metadata(self, episode: EpisodeToWrite) -> dict[str, Any]:
        """Return the metadata to store with an episode. Values that are too large are omitted."""
        attributes: dict[str, Any] = {"task": episode.task or None, "success": episode.success}
        noted: dict[str, Any] = {}
        for name, value in episode.metadata.items():
            # Readers read the task and success from these keys, so another value gets another key.
            is_conflict = name in attributes and not _are_equal(value, attributes[name])
            noted[f"recorded_{name}" if is_conflict else name] = plain(value)
        noted |= {name: value for name, value in attributes.items() if value is not None}
        noted[SOURCE_ID] = episode.id
        end = _noted_end(episode)
        if end:
            noted[ENDS] = end

        noted.pop(ABSENT, None)
        absent = self._absent_fields(episode)
        if absent:
            noted[ABSENT] = absent
        return self.fitting(noted, MAX_NOTE_BYTES, episode)

    def _absent_fields(self, episode: EpisodeToWrite) -> list[str]:
        """Return the stored fields that this or an earlier conversion fills with False or NaN."""
        schema = _renamed(episode.schema)
        earlier = [_free_name(name) for name in earlier_absent(episode)]
        filled = [name for name in self._fit.schema if name not in schema or name in earlier]
        return [*filled, *parts_of_fields(earlier, schema)]

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            # The disk may have been full, so only episodes in published blocks are recorded.
            if self._added:
                self._note_unlisted()


def _as_tensor(rows: np.ndarray[Any, Any], field: Field) -> torch.Tensor:
    """Copy rows to a tensor with the dtype of the field.

    The values of a bfloat16 field are float32 before the conversion, because numpy has no bfloat16.
    """
    dtype = torch.float32 if field.dtype == "bfloat16" else DTYPES[field.dtype][0]
    numpy_dtype = torch.empty(0, dtype=dtype).numpy().dtype
    return torch.from_numpy(rows.astype(numpy_dtype)).to(field.torch_dtype)


def _with_source_dtypes(fit: Fit) -> Fit:
    """Restore the source dtypes of the common fields; drop fields that cannot be filled.

    `common_fields` turns a field that is missing from some episodes into a float field, because a
    playback stream fills it with NaN. A conversion must keep the values of its source: flags stay
    flags and are filled with False, and integers are dropped instead of rounded to floats.
    """
    names = {name for missing in fit.lacking.values() for name in missing}
    own: dict[str, Field] = {}
    for schema in fit.forms:
        own |= {name: field for name, field in schema.items() if name in names}
    unfilled = [name for name, field in own.items() if not can_be_filled(field)]
    fields = [own.get(name, field) for name, field in fit.schema.items() if name not in unfilled]

    kept = Schema(fields)
    lacking = {}
    for schema, missing in fit.lacking.items():
        still_missing = [name for name in missing if name in kept]
        if still_missing:
            lacking[schema] = still_missing
    dropped = {**fit.dropped, **dict.fromkeys(unfilled, "some episodes do not have it")}
    return fit._replace(schema=kept, lacking=lacking, dropped=dropped)


def _kept_codecs(schemas: Iterable[Schema]) -> dict[str, str]:
    """Map the observation components to store with the codec `normalized_image` to this codec.

    These are the components that all source episodes store with this codec. Their values are
    multiples of 1/255, which the codec stores without loss.
    """
    distinct = list(dict.fromkeys(schemas))
    codecs = {}
    for name in distinct[0] if distinct else ():
        group, _, component = name.partition("/")
        if group != "observation" or not component:
            continue
        if all(name in schema and _COUNTS in schema[name].codec for schema in distinct):
            codecs[component] = _COUNTS
    return codecs


def _noted_end(episode: EpisodeToWrite) -> str:
    """Return the end of an episode to store in its metadata: "unknown", "open" or "".

    "" means that the flags `terminated` and `truncated` in the block already state the end.
    """
    if None in (episode.terminated, episode.truncated) and episode.metadata.get(ENDS) != OPEN_END:
        return UNKNOWN
    return OPEN_END if episode.final and not (episode.terminated or episode.truncated) else ""


def _are_equal(value: Any, own: Any) -> bool:
    return type(plain(value)) is type(own) and bool(plain(value) == own)


def _free_name(name: str) -> str:
    """Return the name under which a field is stored.

    A name that `RolloutWriter` reserves gets the prefix "recorded_".
    """
    group, slash, rest = name.partition("/")
    is_used = group not in _GROUPS and (is_taken(group) or group in RESERVED)
    return f"recorded_{group}{slash}{rest}" if is_used else name


@lru_cache(maxsize=64)
def _renamed(schema: Schema) -> Schema:
    return Schema(replace(field, name=_free_name(name)) for name, field in schema.items())
