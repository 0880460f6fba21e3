"""`Scan`: the object through which the rules of `doctor` read a recording.

Reading all data is called the pass. It happens once, when a rule first needs its results: the facts
about each field, and the results of the collectors. All rules share these results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from storage.core.fields import Schema
from storage.errors import RolloutDataError, UnansweredError

from ...sources.recordings.recording import Recording
from .batched_reading import Array, Reading, evenly_spread
from .batched_reading import Collector as Collector
from .field_facts import Facts, Sample, runs_of
from .field_roles import roles_of
from .file_facts import ExaminedFiles
from .findings import MAX_FRAMES, Inapplicable

#: Maximum number of elements per frame of a numeric field. Larger fields are treated as images.
MAX_ELEMENTS = 4096
#: Minimum number of episodes of a recording for rules that compare episodes.
_MIN_EPISODES = 8
#: Minimum number of frames of a recording for rules that compare episodes.
_MIN_FRAMES = 100


class Columns(dict[str, Array]):
    """Columns of `Recording.table` by name. A column is read when it is first used.

    The column `return` (sum of rewards) is NaN, because computing it would read all rewards.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __missing__(self, name: str) -> Array:
        self[name] = self._recording.column(name)
        return self[name]


CollectorType = TypeVar("CollectorType", bound=Collector)
Computed = TypeVar("Computed")


class Scan:
    """Facts and data of a recording for an examination.

    Attributes:
        failure: Error of opening the recording; None if it was opened.
        path: Path as the caller passed it.
        examined: int64, indices of the episodes whose data are read: all episodes, or evenly spaced
            ones.
        unreadable: Episodes that could not be read, as (index, error).
        with_pictures: Whether the pass also reads image fields.
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
    def files(self) -> ExaminedFiles:
        """Facts about the files of the recording, such as block headers."""
        return ExaminedFiles(self)

    @cached_property
    def columns(self) -> Columns:
        """Columns of the table of episodes, by name."""
        return Columns(self.recording)

    @cached_property
    def lengths(self) -> Array:
        """Number of frames of each episode, int64 `[E]`."""
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
        """Errors from opening the recording: data that were unreadable, repaired or left out."""
        return () if self._recording is None else self._recording.problems

    @property
    def advice(self) -> Sequence[RolloutDataError]:
        """Advice from opening the recording, about unusual data that are read unchanged."""
        return () if self._recording is None else self._recording.advice

    @cached_property
    def num_episodes(self) -> int:
        """Number of episodes; 0 if the recording cannot be opened."""
        return 0 if self._recording is None else len(self._recording)

    @property
    def is_small(self) -> bool:
        """Whether the recording has too few episodes or frames to compare episodes."""
        return self.num_episodes < _MIN_EPISODES or int(self.lengths.sum()) < _MIN_FRAMES

    @cached_property
    def roles(self) -> dict[str, list[str]]:
        """Map from role, such as "time", to the fields with this role."""
        return roles_of(self.metadata, self.schema)

    def role(self, name: str) -> list[str]:
        """Return the fields with a role, such as "time".

        Raises:
            Inapplicable: No field has the role.
        """
        if not self.roles.get(name):
            raise Inapplicable(f"no field has the role {name!r}")
        return self.roles[name]

    @cached_property
    def pictures(self) -> list[str]:
        """Names of image fields: uint8 with three axes, or more than 4096 elements per frame."""
        return [
            field.name
            for field in self.schema.values()
            if _is_uint8_picture(field) or field.num_elements > MAX_ELEMENTS
        ]

    @cached_property
    def numeric(self) -> list[str]:
        """Names of all fields except image fields and fields without elements."""
        names = [name for name in self.schema if name not in self.pictures]
        return [name for name in names if self.schema[name].num_elements]

    def group(self, name: str) -> list[str]:
        """Return the numeric fields of a group: the field `name` and its components."""
        return [field for field in self.schema.below(name) if field in self.numeric]

    @cached_property
    def sample(self) -> Sample:
        """Sample of the rows of numeric fields. It has all rows of a small recording."""
        return Sample(self._reading(self.numeric), self.examined)

    @cached_property
    def facts(self) -> dict[str, Facts]:
        """Facts about each numeric field, by name. Reads all data, if no earlier call has."""
        self._pass  # noqa: B018
        return self.sample_facts

    @cached_property
    def sample_facts(self) -> dict[str, Facts]:
        """Facts about each numeric field, by name, which are computed from sampled rows.

        Only facts such as quantiles are valid before all data are read. Collectors use these facts,
        because they are created earlier.
        """
        reading = self._reading(self.numeric)
        return {name: Facts(reading, name, self.examined, self.sample) for name in self.numeric}

    def computed(self, cls: type[Computed]) -> Computed:
        """Return the object `cls(scan)`, which is created once and shared by all rules.

        Raises:
            Inapplicable: The constructor raised this error in this call or in an earlier one.
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
        """Return the collector of class `cls` with its result.

        Reads all data, if no earlier call has.

        Raises:
            Exception: Any error that the collector raised while the data were read.
        """
        self._pass  # noqa: B018
        if cls in self._collector_errors:
            raise self._collector_errors[cls]
        collector = self._collectors[cls]
        assert isinstance(collector, cls)
        return collector

    @cached_property
    def _pass(self) -> None:
        """Read all data once, and give each batch to all facts and collectors.

        If a collector raises an error, reading continues without this collector.
        """
        if not len(self.examined):
            raise Inapplicable("there are no episodes")
        names = [*self.numeric, *(self.pictures if self.with_pictures else ())]
        self._collectors: dict[type[Collector], Collector] = {}
        self._collector_errors: dict[type[Collector], Exception] = {}
        for cls in self._collector_types:
            with self._storing_errors_of(cls):
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
                for cls, collector in self._collectors.items():
                    if cls not in self._collector_errors:
                        with self._storing_errors_of(cls):
                            collector.add(batch)
                bar.update(len(batch) - batch.overlap)
        for cls, collector in self._collectors.items():
            if cls not in self._collector_errors:
                with self._storing_errors_of(cls):
                    collector.finish()

    @contextmanager
    def _storing_errors_of(self, cls: type[Collector]) -> Iterator[None]:
        """Store an error of a collector, so that only the rules that need it fail."""
        try:
            yield
        except UnansweredError:
            raise
        except Exception as error:  # noqa: BLE001 - `collected` raises it
            self._collector_errors[cls] = error

    def read(self, number: int, name: str, start: int = 0, stop: int | None = None) -> Array:
        """Read a field of one episode, flattened to `[T, D]`, for a rule that needs single frames."""
        values = np.asarray(self.recording[number].read(name, start, stop))
        return values.reshape(len(values), -1)

    def runs(
        self, numbers: Array, name: str, test: Callable[..., Array], *arguments: Any
    ) -> list[tuple[int, int, int]]:
        """Return the frame ranges in which a field passes a test, as (episode, start, stop).

        To limit the time, only the first 20 episodes are read.

        Args:
            numbers: Indices of the episodes to read.
            name: Name of the field.
            test: Function that is called as `test(rows, *arguments)` with the rows of an episode,
                `[T, D]`. Returns bool `[T]` for a test of rows, or bool `[T - 1]` for a test of the
                steps between rows. A range has both rows of a step.
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
        """Return a frame range (episode, start, stop) for all frames of the first 20 episodes."""
        return [(number, 0, int(self.lengths[number])) for number in numbers[:MAX_FRAMES].tolist()]

    @property
    def declared_rate_hz(self) -> float | None:
        """Frame rate in the metadata in Hz; None if it is missing or not positive."""
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
