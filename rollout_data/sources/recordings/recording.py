"""`Recording`: the episodes of one file or folder of any format, or a selection of them.

Data are read lazily. No files are written to the folder of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np

from storage.core.arguments import choice, env_ids, instance, is_real, is_whole
from storage.core.arguments import seed as checked_seed
from storage.core.fields import Schema
from storage.errors import (
    DataFileError,
    OutOfRangeError,
    RolloutDataError,
    UnansweredError,
    UsageError,
    nearest,
)

from ...blocks.block import Block
from ...blocks.trajectory_index import Int64s, name_keys, random_keys, share_of
from ...remote.locations import Origin
from ..episode_info import EpisodeInfo
from ..episode_source import EpisodeSource
from ..episode_table import COLUMNS, as_table, kept_rows
from ..file_scanner import chosen_episodes
from ..live_source import LiveSource
from .episode import Episode
from .field_statistics import FieldStatistics, compute_statistics
from .open_episodes import open_episodes

_NUM_SHOWN = 5
#: Approximate bytes of frames that are read at a time to sum rewards. Small fields are stored in the
#: same rows as the rewards, so they are read, too.
_REWARD_BYTES = 16 << 20
#: Minimum number of steps that are read at a time to sum rewards. The size of a frame alone would give
#: too small reads, since it includes large fields, which are stored elsewhere and are not read.
_NUM_REWARDS = 1 << 12


class Recording(Sequence[Episode]):
    """Episodes in the order of their numbers; created by `rollout_data.open`.

    `recording[i]` returns an episode, also for a negative number; a slice returns a recording.
    Iteration keeps one episode in memory. `RolloutDataset`, `WindowDataset` and `convert` accept a
    recording instead of a path.

    A recording is a snapshot, also for datasets created from it. Edits (`tag`, `drop`, `keep`) and
    new episodes appear after `refresh()`. Reading an episode whose file was deleted, for example by
    `prune`, raises an error with the name of the episode. Other episodes stay readable.
    """

    def __init__(
        self, origin: Origin, source: EpisodeSource, numbers: Int64s | None = None
    ) -> None:
        self._origin = replace(origin, opened=None)
        self._source = source
        if numbers is not None:
            self._numbers = numbers

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the snapshot without data. An unpickled copy reads the files at the same paths."""
        return {"_origin": self._origin, "_source": self._source}

    @property
    def origin(self) -> Origin:
        """Location, selected episodes and snapshot. Datasets created from it need no new scan."""
        return replace(self._origin, opened=self._source)

    @cached_property
    def _numbers(self) -> Int64s:
        if self._origin.ids is None:
            # Count the lengths, since a million episode names take half a second to build.
            return np.arange(len(self._source.column("length")))
        names = self._source.column("id").tolist()
        return np.array(chosen_episodes(names, self._origin.ids, self.path), np.int64)

    @property
    def format(self) -> str:
        """Name of the data format."""
        return self._source.format

    @property
    def path(self) -> Path:
        """Path of the file or folder."""
        return self._origin.path

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of the file or folder; each episode also has its own metadata."""
        return self._source.metadata

    @property
    def problems(self) -> list[RolloutDataError]:
        """Exceptions, not raised, for data that were unreadable, repaired or left out."""
        return self._source.problems

    @property
    def advice(self) -> list[RolloutDataError]:
        """Remarks on suspicious data that are read unchanged, such as copied actions.

        The remarks are exceptions that were not raised.
        """
        return self._source.advice

    @cached_property
    def schema(self) -> Schema:
        """Numeric fields that any episode has.

        The first episode that has a field determines its dtype and shape.
        """
        which, known = self.schemas()
        schemas = [known[place] for place in dict.fromkeys(which.tolist())]
        return Schema(
            {name: item for schema in reversed(schemas) for name, item in schema.items()}.values()
        )

    @property
    def ids(self) -> list[str]:
        """Names of the episodes."""
        names: list[str] = self.column("id").tolist()
        return names

    @cached_property
    def table(self) -> np.ndarray[Any, Any]:
        """One row per episode: id, env, length, return, ends, success, task, time, writer.

        The first access reads the rewards of all episodes. See `as_table`.
        """
        table: np.ndarray[Any, Any] = self.descriptions.copy()
        which, schemas = self.schemas()
        for number, schema in enumerate(schemas):
            places = np.flatnonzero(which == number)
            if "reward" not in schema or not len(places):
                continue
            row_bytes = sum(field.row_bytes for field in schema.values())
            num_steps = max(_NUM_REWARDS, _REWARD_BYTES // row_bytes)
            cuts = np.flatnonzero(np.diff(np.cumsum(table["length"][places]) // num_steps)) + 1
            for part in np.split(places, cuts):
                table["return"][part] = self._returns(part, table["length"][part])
        return table

    def _returns(self, places: Int64s, lengths: Int64s) -> np.ndarray[Any, Any]:
        """Return the sum of rewards of each episode, float64 `[k]`; NaN for unreadable episodes."""
        try:
            rewards = self.read_many(places, ["reward"], places * 0, lengths)["reward"]
        except UnansweredError:
            raise
        except RolloutDataError:  # Reading the episode itself raises this error.
            if len(places) == 1:
                return np.array([np.nan])
            single = [
                self._returns(places[[index]], lengths[[index]]) for index in range(len(places))
            ]
            return np.concatenate(single)
        of_frames = rewards.reshape(len(rewards), -1).sum(axis=1, dtype=np.float64)
        return np.add.reduceat(of_frames, np.cumsum(lengths) - lengths)

    @cached_property
    def descriptions(self) -> np.ndarray[Any, Any]:
        """Table of the episodes like `table`, but without sums of rewards, which need rows."""
        return as_table(self.column)

    def column(self, name: str) -> np.ndarray[Any, Any]:
        """Return one column of `table` without reading rows, so returns are NaN."""
        values: np.ndarray[Any, Any] = self._source.column(choice("name", name, COLUMNS))[
            self._numbers
        ]
        return values

    def schemas(self) -> tuple[Int64s, list[Schema]]:
        """Return the index of each episode's schema, int64 `[num_episodes]`, and all schemas."""
        which, schemas = self._source.schemas()
        return which[self._numbers], schemas

    def read_many(
        self, places: Int64s, names: Sequence[str], starts: Int64s, counts: Int64s
    ) -> dict[str, Any]:
        """Read numeric fields of k episodes at once; all episodes must have the fields.

        Args:
            places: Positions of the episodes in the recording, int64 `[k]`.
            names: Names of the fields.
            starts: First step to read of each episode, int64 `[k]`.
            counts: Number of steps to read of each episode, int64 `[k]`.

        Returns:
            Maps fields to the concatenated steps of all episodes, `[sum(counts), *shape]`. Arrays
            may be read-only.

        Raises:
            DataFileError: The fields cannot be read.
        """
        return self._source.read_many(
            self._numbers[env_ids("places", places, len(self))], names, starts, counts
        )

    def info(self, place: int) -> EpisodeInfo:
        """Return the description of the episode at position `place`, without reading rows."""
        if not is_whole(place) or not -len(self) <= place < len(self):
            error_class = OutOfRangeError if is_whole(place) else UsageError
            raise error_class(f"place must be in {-len(self)}:{len(self)}, got {place!r}.")
        return self._source.episodes[int(self._numbers[place])]

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Episode: ...
    @overload
    def __getitem__(self, index: slice) -> Recording: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._of(index)
        if not is_whole(index) or not -len(self) <= index < len(self):
            error_class = OutOfRangeError if is_whole(index) else UsageError
            raise error_class(
                f"index must be an integer in {-len(self)}:{len(self)} or a slice, got {index!r}. "
                "Use select() for names."
            )
        number = int(self._numbers[index])
        self._source.check_present([number])
        return Episode(self._source, number, self._source.episodes[number])

    def __iter__(self) -> Iterator[Episode]:
        return (self[number] for number in range(len(self)))

    def __repr__(self) -> str:
        names = ", ".join(map(repr, self.ids[:_NUM_SHOWN])) + (
            ", ..." if len(self) > _NUM_SHOWN else ""
        )
        problems = f"; {_counted(len(self.problems), 'problem')}" if self.problems else ""
        episodes = _counted(len(self), "episode")
        return f"<Recording of {episodes} ({names}) in {str(self.path)!r}, {self.format}{problems}>"

    def refresh(self) -> Recording:
        """Scan the files again, update this recording in place and return it.

        A selection keeps those of its episodes that still exist.
        """
        source = open_episodes(replace(self._origin, ids=None))
        for name in ("_numbers", "schema", "table", "descriptions"):
            vars(self).pop(name, None)
        self._source = source
        if self._origin.ids is not None:
            there = {*self._source.column("id").tolist()}
            self._origin = replace(
                self._origin,
                ids=tuple(episode_id for episode_id in self._origin.ids if episode_id in there),
            )
        return self

    def removed(self) -> dict[str, DataFileError]:
        """Map the names of episodes whose files were deleted or replaced meanwhile to errors."""
        errors = self._source.removed(self._numbers.tolist())
        return {error.episode: error for error in errors.values()}

    def damaged(self) -> dict[str, DataFileError]:
        """Check the stored checksums of all rows; map the names of damaged episodes to errors.

        The result is {} for data without stored checksums, and for URLs, whose rows are checked
        when they are read.
        """
        errors = self._source.damaged(self._numbers.tolist())
        names = self._source.column("id")
        return {str(names[number]): error for number, error in errors.items()}

    def check_present(self) -> None:
        """Check that the files of all episodes still exist and were not replaced.

        Raises:
            DataFileError: A file was deleted or replaced; the message names the episode.
        """
        self._source.check_present(self._numbers.tolist())

    @property
    def blocks(self) -> list[Block]:
        """The blocks of the snapshot with edits and their annotations; [] for other formats."""
        return self._source.blocks

    def _of(self, places: Any) -> Recording:
        """Return a recording of the episodes at `places`: positions, a slice or a mask."""
        ids = tuple(self.column("id")[places].tolist())
        return Recording(replace(self._origin, ids=ids), self._source, self._numbers[places])

    def select(self, ids: Iterable[str | int]) -> Recording:
        """Return a recording of the episodes with these names, in the order of the file.

        Raises:
            UsageError: A name does not exist.
        """
        instance("ids", ids, "names of episodes", Iterable)
        wanted = {ids} if isinstance(ids, str) else set(map(str, ids))
        names = self.ids
        for name in wanted - set(names):
            raise UsageError(
                f"{str(self.path)!r} has no episode {name!r} among its {len(names)} episodes, such "
                f"as {nearest(name, names, _NUM_SHOWN)}."
            )
        return self._of(np.array([name in wanted for name in names], bool))

    def filter(self, keeps: Callable[[Episode], Any] | None = None, **columns: Any) -> Recording:
        """Return a recording of the episodes that match all conditions.

        Args:
            keeps: Function that returns whether to keep an `Episode`; None keeps all.
            **columns: For each column of `table`, the accepted value, a list of values, or a
                function that returns whether to keep a value. Examples: `success=True`,
                `ends=["truncated"]`, `length=lambda length: length > 20`.

        Raises:
            UsageError: A column does not exist.
        """
        kept = kept_rows(self.table if "return" in columns else self.descriptions, columns)
        if keeps is not None:
            if not callable(keeps):
                raise UsageError(f"keeps must be a function of an Episode, got {keeps!r}.")
            kept &= np.array(
                [bool(kept[place] and keeps(episode)) for place, episode in enumerate(self)], bool
            )
        return self._of(kept)

    def split(
        self, parts: Mapping[str, float] | None = None, seed: int = 0
    ) -> dict[str, Recording]:
        """Split the episodes into parts, such as training and validation; return them by name.

        Args:
            parts: Maps names of parts to shares of the episodes, which add up to 1. Each episode
                is in one part, which depends on the seed, the names and the number of episodes.
                None returns the parts that the file defines, which may overlap.
            seed: Seed of the split.

        Raises:
            UsageError: The shares do not add up to 1, or the file defines no parts.
        """
        if parts is None:
            return self._defined_parts()
        instance("parts", parts, "a mapping of names to shares", Mapping)
        seed = checked_seed("seed", seed)
        are_numbers = all(map(is_real, parts.values()))
        shares = np.array([*parts.values()] if are_numbers else [], np.float64)
        if not len(shares) or not (shares >= 0).all() or abs(shares.sum() - 1) > 1e-6:
            raise UsageError(f"parts must have shares >= 0 that add up to 1, got {dict(parts)!r}.")
        keys = random_keys(
            name_keys(self.ids, np.arange(len(self)), np.zeros(len(self), np.int64)), seed
        )
        order = np.lexsort((np.array(self.ids), keys)) if len(self) else np.zeros(0, np.int64)
        stops = [share_of(len(self), *shares[:place]) for place in range(1, len(shares))]
        pieces = np.split(order, stops)
        return {name: self._of(np.sort(piece)) for name, piece in zip(parts, pieces, strict=True)}

    def _defined_parts(self) -> dict[str, Recording]:
        """Return the parts that the file defines, reduced to the episodes of this recording."""
        if not self._source.splits:
            raise UsageError(
                f"{str(self.path)!r} defines no parts. Pass shares such as "
                '{"train": 0.9, "val": 0.1}.'
            )
        selected = set(self.ids)
        parts = {}
        for name, ids in self._source.splits.items():
            parts[name] = self.select([episode for episode in map(str, ids) if episode in selected])
        return parts

    def statistics(
        self,
        quantiles: Sequence[float] = (0.01, 0.99),
        *,
        use_cache: bool = True,
        progress: bool = True,
    ) -> dict[str, FieldStatistics]:
        """Compute statistics of each field over all frames; see `WindowDataset.statistics`.

        The result is cached in the user's cache folder (`XDG_CACHE_HOME`), not in the data folder.
        """
        self.check_present()
        live = LiveSource(self.origin)
        live.refresh()
        rows = live.snapshot()
        names = list(rows.numeric_fields)
        parts = [(rows, np.arange(len(rows.index)))]
        return compute_statistics(parts, None, names, quantiles, use_cache, progress)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
