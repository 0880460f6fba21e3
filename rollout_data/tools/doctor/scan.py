"""`Scan`: the object through which the rules of `doctor` read a recording.

Rules read the recording only through the scan. All data are read in one pass, when a rule first
needs them, and shared by all rules.
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
from .file_facts import ExaminedFiles
from .findings import MAX_FRAMES, Inapplicable

#: Maximum number of elements per frame of a numeric field. Larger fields are treated as images.
MAX_ELEMENTS = 4096
#: Minimum number of episodes, and of frames, for rules that compare episodes.
_MIN_EPISODES = 8
_MIN_FRAMES = 100


class Columns(dict[str, Array]):
    """Columns of `Recording.table`, read when first used.

    The column `return` (sum of rewards) is NaN here, because it would need all data.
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
        failure: Error if the recording could not be opened, or None.
        path: Path as the caller passed it.
        examined: int64, indices of the episodes whose data are read: all, or an even sample.
        unreadable: Episodes that could not be read, as (episode, error).
        with_pictures: Whether image fields are read too.
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
        """Evenly spaced sample of the numeric fields. It has all rows of a small recording."""
        return Sample(self._reading(self.numeric), self.examined)

    @cached_property
    def facts(self) -> dict[str, Facts]:
        """Facts about each numeric field, by name. Reads all data if necessary."""
        self._pass  # noqa: B018
        return self.sample_facts

    @cached_property
    def sample_facts(self) -> dict[str, Facts]:
        """Facts about each numeric field that are known before all data are read, for collectors.

        They are the same objects as in `facts`, but only facts about the sample are known.
        """
        reading = self._reading(self.numeric)
        return {name: Facts(reading, name, self.examined, self.sample) for name in self.numeric}

    def computed(self, cls: type[Computed]) -> Computed:
        """Return `cls(scan)`, which is created once for all rules.

        Raises:
            Inapplicable: The constructor raised this error, also in an earlier call.
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
        """Return the collector of class `cls`, after all data were read."""
        self._pass  # noqa: B018
        collector = self._collectors[cls]
        assert isinstance(collector, cls)
        return collector

    @cached_property
    def _pass(self) -> None:
        """Read all data once, and pass each batch to all facts and collectors."""
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
        """Read a field of one episode as `[T, D]`, in addition to the pass over all data."""
        values = np.asarray(self.recording[number].read(name, start, stop))
        return values.reshape(len(values), -1)

    def runs(
        self, numbers: Array, name: str, test: Callable[..., Array], *arguments: Any
    ) -> list[tuple[int, int, int]]:
        """Return triples (episode, start, stop): the ranges of frames for which a test is True.

        Only the first 20 episodes are tested.

        Args:
            numbers: Indices of the episodes to test.
            name: Field to test.
            test: `test(rows, *arguments)` returns bool `[T]` for rows, or bool `[T - 1]` for steps
                between rows. Both rows of a step are then in the range.
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
        """Return frame ranges (episode, start, stop) that cover the first 20 of `numbers`."""
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
