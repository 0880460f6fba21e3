"""The scan: what rules may ask of a recording. Tables come at once, data in one pass when a rule first asks.

One rule: rules ask, and only the scan reads; what one episode costs in memory has a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from storage.core.fields import Schema
from storage.errors import RolloutDataError

from ...sources.recording import Recording
from .batched_reading import Array, Reading
from .batched_reading import Collector as Collector
from .field_facts import Facts, Sample, runs_of
from .field_roles import roles_of
from .file_facts import Files
from .findings import MAX_FRAMES, Inapplicable

#: Fields of more numbers a row are pictures to the rules: read for those of images only.
MAX_ELEMENTS = 4096
_MIN_EPISODES = 8
_MIN_FRAMES = 100


class Columns(dict[str, Array]):
    """Columns of `Recording.table`; nothing is read for them, and returns are NaN."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __missing__(self, name: str) -> Array:
        self[name] = self._recording.column(name)
        return self[name]


Kind = TypeVar("Kind", bound=Collector)
Made = TypeVar("Made")


class Scan:
    """One examination of a recording.

    Attributes:
        recording: What was opened; None if that failed.
        failure: Why it could not be opened, or None.
        path: As the caller gave it.
        examined: int64, places of the episodes whose data are read: all, or a sample evenly spread.
        unreadable: (episode, error) of those that could not be read.
        with_pictures: Read the fields that are pictures as well.
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
        self._kinds = tuple(dict.fromkeys(collectors))
        self.unreadable: list[tuple[int, Exception]] = []
        self._made: dict[type[Any], Any] = {}
        count = self.num_episodes if sample is None else min(sample, self.num_episodes)
        self.examined = np.unique(np.linspace(0, self.num_episodes - 1, count).astype(np.int64))

    @property
    def recording(self) -> Recording:
        """What was opened.

        Raises:
            Inapplicable: It could not be.
        """
        if self._recording is None:
            raise Inapplicable("the recording cannot be opened")
        return self._recording

    @cached_property
    def files(self) -> Files:
        """What the files tell besides rows."""
        return Files(self)

    @cached_property
    def columns(self) -> Columns:
        """Columns of the table of episodes by their names, each made when it is asked for."""
        return Columns(self.recording)

    @cached_property
    def lengths(self) -> Array:
        """int64 `[E]`: frames of each episode."""
        return self.recording.column("length")

    @cached_property
    def schema(self) -> Schema:
        """All numeric fields, each as the first episode has it."""
        return self.recording.schema

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the files say of the whole; {} if nothing could be opened."""
        return {} if self._recording is None else self._recording.metadata

    @property
    def problems(self) -> Sequence[RolloutDataError]:
        """Data that opening did not read, repaired or left out."""
        return () if self._recording is None else self._recording.problems

    @property
    def advice(self) -> Sequence[RolloutDataError]:
        """Remarks of opening on data that are read as they are stored."""
        return () if self._recording is None else self._recording.advice

    @cached_property
    def num_episodes(self) -> int:
        """How many episodes there are."""
        return 0 if self._recording is None else len(self._recording)

    @property
    def is_small(self) -> bool:
        """Too few episodes or frames for comparing them."""
        return self.num_episodes < _MIN_EPISODES or int(self.lengths.sum()) < _MIN_FRAMES

    @cached_property
    def roles(self) -> dict[str, list[str]]:
        """Role -> fields: "time", "success", "task_index", "quaternion", "heading", "frame_index"."""
        return roles_of(self.metadata, self.schema)

    def role(self, name: str) -> list[str]:
        """Return the fields of a role.

        Raises:
            Inapplicable: There is none.
        """
        if not self.roles.get(name):
            raise Inapplicable(f"no field has the role {name!r}")
        return self.roles[name]

    @cached_property
    def pictures(self) -> list[str]:
        """Names of the fields that are pictures: bytes of three axes, or more than `MAX_ELEMENTS` numbers."""
        fields = self.schema.values()
        return [one.name for one in fields if _is_bytes(one) or one.num_elements > MAX_ELEMENTS]

    @cached_property
    def numeric(self) -> list[str]:
        """Names of all other fields."""
        return [name for name in self.schema if name not in self.pictures and self.schema[name].num_elements]

    def group(self, name: str) -> list[str]:
        """Return the numeric fields called `name` or below it: those of "observation" or "action"."""
        return [one for one in self.schema.below(name) if one in self.numeric]

    @cached_property
    def sample(self) -> Sample:
        """Batches of numeric fields, spread over the episodes: all of a small recording."""
        return Sample(self._reading(self.numeric), self.examined)

    @cached_property
    def facts(self) -> dict[str, Facts]:
        """Numeric field -> what the pass found."""
        self._pass  # noqa: B018
        return self.pending

    @cached_property
    def pending(self) -> dict[str, Facts]:
        """The same before the pass, for collectors: with what the sample tells only."""
        about = self._reading(self.numeric)
        return {name: Facts(about, name, self.examined, self.sample) for name in self.numeric}

    def once(self, kind: type[Made]) -> Made:
        """Return `kind(scan)`, which is made once for all rules that ask; or raise again that it does not apply."""
        if kind not in self._made:
            try:
                self._made[kind] = kind(self)  # type: ignore[call-arg]
            except Inapplicable as why:
                self._made[kind] = why
        if isinstance(found := self._made[kind], Inapplicable):
            raise found
        assert isinstance(found, kind)
        return found

    def collected(self, kind: type[Kind]) -> Kind:
        """Return what a collector gathered."""
        self._pass  # noqa: B018
        found = self._collectors[kind]
        assert isinstance(found, kind)
        return found

    @cached_property
    def _pass(self) -> None:
        if not len(self.examined):
            raise Inapplicable("there are no episodes")
        names = [*self.numeric, *(self.pictures if self.with_pictures else ())]
        self._collectors: dict[type[Collector], Collector] = {kind: kind(self) for kind in self._kinds}
        total = int(self.lengths[self.examined].sum())
        with tqdm(desc="doctor", total=total, unit=" frames", unit_scale=True, disable=not self._progress) as bar:
            is_kept = self.sample.is_all and names == self.numeric
            for batch in self.sample.batches if is_kept else self._reading(names).batches(self.examined):
                for facts in self.pending.values():
                    facts.add(batch)
                for collector in self._collectors.values():
                    collector.add(batch)
                bar.update(len(batch) - batch.overlap)
        for collector in self._collectors.values():
            collector.finish()

    def read(self, number: int, name: str, start: int = 0, stop: int | None = None) -> Array:
        """Read a field of one episode again, `[T, D]`: for the few that look wrong."""
        values = np.asarray(self.recording[number].read(name, start, stop))
        return values.reshape(len(values), -1)

    def runs(self, numbers: Array, name: str, test: Callable[..., Array], *given: Any) -> list[tuple[int, int, int]]:
        """Find (episode, start, stop) where something is so in a field of the first 20 of some episodes.

        Args:
            numbers: Of the episodes.
            name: Of the field.
            test: `test(rows, *given)` gives bool `[T]`, or `[T - 1]` of the steps between rows; both rows count then.
            given: Further arguments.
        """
        found = []
        for number in numbers[:MAX_FRAMES].tolist():
            rows = self.read(number, name)
            mask = test(rows, *given)
            found += [(number, start, stop + len(rows) - len(mask)) for start, stop in runs_of(mask)]
        return found

    def whole(self, numbers: Array) -> list[tuple[int, int, int]]:
        """Return (episode, start, stop) of some episodes from start to end."""
        return [(number, 0, int(self.lengths[number])) for number in numbers[:MAX_FRAMES].tolist()]

    def declared(self, *keys: str) -> Any:
        """Return the first positive number that the metadata have under one of some keys; None without any."""
        told = (self.metadata.get(key) for key in keys)
        return next((one for one in told if isinstance(one, (int, float)) and one > 0), None)

    def _reading(self, names: Sequence[str]) -> Reading:
        return Reading(self.recording, self.lengths, names, self._note, *self._schemas)

    @cached_property
    def _schemas(self) -> tuple[Array, list[Schema]]:
        return self.recording.schemas()

    def _note(self, number: int, error: Exception) -> None:
        if all(number != one for one, _ in self.unreadable):
            self.unreadable.append((number, error))


def _is_bytes(field: Any) -> bool:
    return len(field.shape) == 3 and field.dtype == "uint8" and min(field.shape[:2]) > 1
