"""The scan of a recording: everything that rules can read.

Tables are read at once. Data are read in one pass when a rule first needs them. Rules read only
through the scan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from storage.core.fields import Schema
from storage.errors import RolloutDataError

from ...sources.recordings.recording import Recording
from .batched_reading import Array, Reading, evenly_spread
from .batched_reading import Collector as Collector
from .field_facts import Facts, Sample, runs_of
from .field_roles import roles_of
from .file_facts import Files
from .findings import MAX_FRAMES, Inapplicable

#: Elements of a row. Larger fields are pictures, which only rules of images read.
MAX_ELEMENTS = 4096
#: Minimum number of episodes for comparisons between episodes.
_MIN_EPISODES = 8
_MIN_FRAMES = 100


class Columns(dict[str, Array]):
    """Columns of `Recording.table`, each built at its first use. The column of returns is NaN."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __missing__(self, name: str) -> Array:
        self[name] = self._recording.column(name)
        return self[name]


CollectorType = TypeVar("CollectorType", bound=Collector)
Computed = TypeVar("Computed")


class Scan:
    """One examination of a recording.

    Attributes:
        failure: Error of opening the recording, or None.
        path: Path as the caller passed it.
        examined: int64, places of the episodes whose data are read: all, or an even sample.
        unreadable: (episode, error) of episodes that could not be read.
        with_pictures: Whether fields of pictures are read too.
    """

    def __init__(
        self,
        path: Any,
        recording: Recording | None,
        failure: RolloutDataError | None = None,
        sample: int | None = None,
        collectors: Sequence[type[Collector]] = (),
        with_pictures: bool = False,
        progress: bool = False,
    ) -> None:
        self.path = path
        self._recording = recording
        self.failure = failure
        self._progress = progress
        self.with_pictures = with_pictures
        self._collector_types = tuple(dict.fromkeys(collectors))
        self.unreadable: list[tuple[int, Exception]] = []
        self._computed: dict[type[Any], Any] = {}
        count = self.num_episodes if sample is None else min(sample, self.num_episodes)
        self.examined = evenly_spread(np.arange(self.num_episodes), count)

    @property
    def recording(self) -> Recording:
        """The opened recording.

        Raises:
            Inapplicable: The recording cannot be opened.
        """
        if self._recording is None:
            raise Inapplicable("the recording cannot be opened")
        return self._recording

    @cached_property
    def files(self) -> Files:
        """Facts of the files, without their rows."""
        return Files(self)

    @cached_property
    def columns(self) -> Columns:
        """Columns of the table of episodes by name."""
        return Columns(self.recording)

    @cached_property
    def lengths(self) -> Array:
        """Frames of each episode: int64 `[E]`."""
        return self.recording.column("length")

    @cached_property
    def schema(self) -> Schema:
        """All numeric fields, each with the dtype and shape of the first episode that has it."""
        return self.recording.schema

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Metadata of the whole recording; {} if it cannot be opened."""
        return {} if self._recording is None else self._recording.metadata

    @property
    def problems(self) -> Sequence[RolloutDataError]:
        """Data that opening did not read, repaired or left out."""
        return () if self._recording is None else self._recording.problems

    @property
    def advice(self) -> Sequence[RolloutDataError]:
        """Remarks from opening about unusual data that are read unchanged."""
        return () if self._recording is None else self._recording.advice

    @cached_property
    def num_episodes(self) -> int:
        """Number of episodes; 0 if the recording cannot be opened."""
        return 0 if self._recording is None else len(self._recording)

    @property
    def is_small(self) -> bool:
        """Whether there are too few episodes or frames for comparisons between episodes."""
        return self.num_episodes < _MIN_EPISODES or int(self.lengths.sum()) < _MIN_FRAMES

    @cached_property
    def roles(self) -> dict[str, list[str]]:
        """Role -> fields. See `roles_of`."""
        return roles_of(self.metadata, self.schema)

    def role(self, name: str) -> list[str]:
        """Return the fields of a role.

        Raises:
            Inapplicable: No field has the role.
        """
        if not self.roles.get(name):
            raise Inapplicable(f"no field has the role {name!r}")
        return self.roles[name]

    @cached_property
    def pictures(self) -> list[str]:
        """Fields that are pictures: uint8 of three axes, or more than `MAX_ELEMENTS` elements."""
        return [
            field.name
            for field in self.schema.values()
            if _is_uint8_picture(field) or field.num_elements > MAX_ELEMENTS
        ]

    @cached_property
    def numeric(self) -> list[str]:
        """All fields with elements that are not pictures."""
        names = [name for name in self.schema if name not in self.pictures]
        return [name for name in names if self.schema[name].num_elements]

    def group(self, name: str) -> list[str]:
        """Return the numeric fields of a group: the field `name`, and fields below "name/"."""
        return [field for field in self.schema.below(name) if field in self.numeric]

    @cached_property
    def sample(self) -> Sample:
        """Batches of numeric fields, spread over the episodes; all of a small recording."""
        return Sample(self._reading(self.numeric), self.examined)

    @cached_property
    def facts(self) -> dict[str, Facts]:
        """Facts of each numeric field, after the pass over the data."""
        self._pass  # noqa: B018
        return self.sample_facts

    @cached_property
    def sample_facts(self) -> dict[str, Facts]:
        """Facts of each numeric field before the pass over the data, for collectors.

        They are the same objects as in `facts`. Only facts of the sample are known.
        """
        reading = self._reading(self.numeric)
        return {name: Facts(reading, name, self.examined, self.sample) for name in self.numeric}

    def computed(self, cls: type[Computed]) -> Computed:
        """Return `cls(scan)`, computed once for all rules that use it.

        Raises:
            Inapplicable: The constructor raised it.
        """
        if cls not in self._computed:
            try:
                self._computed[cls] = cls(self)  # type: ignore[call-arg]
            except Inapplicable as reason:
                self._computed[cls] = reason
        result = self._computed[cls]
        if isinstance(result, Inapplicable):
            raise result
        assert isinstance(result, cls)
        return result

    def collected(self, cls: type[CollectorType]) -> CollectorType:
        """Return a collector after the pass over the data."""
        self._pass  # noqa: B018
        collector = self._collectors[cls]
        assert isinstance(collector, cls)
        return collector

    @cached_property
    def _pass(self) -> None:
        """Read the data once, for all facts and collectors."""
        if not len(self.examined):
            raise Inapplicable("there are no episodes")
        names = [*self.numeric, *(self.pictures if self.with_pictures else ())]
        self._collectors: dict[type[Collector], Collector] = {}
        for cls in self._collector_types:
            self._collectors[cls] = cls(self)

        if self.sample.is_all and names == self.numeric:
            batches = iter(self.sample.batches)
        else:
            batches = self._reading(names).batches(self.examined)
        with tqdm(
            desc="doctor",
            total=int(self.lengths[self.examined].sum()),
            unit=" frames",
            unit_scale=True,
            disable=not self._progress,
        ) as bar:
            for batch in batches:
                for facts in self.sample_facts.values():
                    facts.add(batch)
                for collector in self._collectors.values():
                    collector.add(batch)
                bar.update(len(batch) - batch.overlap)
        for collector in self._collectors.values():
            collector.finish()

    def read(self, number: int, name: str, start: int = 0, stop: int | None = None) -> Array:
        """Read a field of one episode again, as `[T, D]`."""
        values = np.asarray(self.recording[number].read(name, start, stop))
        return values.reshape(len(values), -1)

    def runs(
        self, numbers: Array, name: str, test: Callable[..., Array], *arguments: Any
    ) -> list[tuple[int, int, int]]:
        """Return (episode, start, stop) of the frames that pass a test, in the first 20 episodes.

        Args:
            numbers: Episodes.
            name: Field to test.
            test: `test(rows, *arguments)` returns bool `[T]`, or bool `[T - 1]` of the steps
                between rows. Both rows of a step pass then.
            arguments: Further arguments of `test`.
        """
        frames = []
        for number in numbers[:MAX_FRAMES].tolist():
            rows = self.read(number, name)
            passes = test(rows, *arguments)
            num_more = len(rows) - len(passes)
            frames += [(number, start, stop + num_more) for start, stop in runs_of(passes)]
        return frames

    def whole(self, numbers: Array) -> list[tuple[int, int, int]]:
        """Return (episode, start, stop) of the first 20 episodes from start to end."""
        return [(number, 0, int(self.lengths[number])) for number in numbers[:MAX_FRAMES].tolist()]

    @property
    def declared_rate_hz(self) -> float | None:
        """Frames per second in the metadata; None unless the value is a positive number."""
        for key in ("fps", "frame_rate_hz"):
            rate = self.metadata.get(key)
            if isinstance(rate, (int, float)) and rate > 0:
                return rate
        return None

    def _reading(self, names: Sequence[str]) -> Reading:
        schema_index, schemas = self._schemas
        return Reading(
            self.recording,
            self.lengths,
            names,
            self._note_unreadable,
            schema_index,
            schemas,
        )

    @cached_property
    def _schemas(self) -> tuple[Array, list[Schema]]:
        return self.recording.schemas()

    def _note_unreadable(self, number: int, error: Exception) -> None:
        if all(number != noted for noted, _ in self.unreadable):
            self.unreadable.append((number, error))


def _is_uint8_picture(field: Any) -> bool:
    return len(field.shape) == 3 and field.dtype == "uint8" and min(field.shape[:2]) > 1
