"""`Episode`: one episode of a recording of any format, whose fields are read lazily.

Properties are None if the file does not contain the value. Fields that are not in the file are not
listed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from storage.core.arguments import is_whole
from storage.errors import MissingFieldError, UsageError, nearest

from ..episode_info import EpisodeInfo, end_of
from ..episode_source import EpisodeSource
from ..video_range import VideoRange

Array = np.ndarray[Any, Any]
OBSERVATION = "observation"


class Fields(dict[str, Any]):
    """Dict of arrays by flat name, such as "images/left". A prefix "images" selects all below it.

    A key may start with "/", like the name of a ROS topic.
    """

    def __missing__(self, name: str) -> Any:
        if name.startswith("/"):
            return self[name[1:]]
        below = {
            key[len(name) + 1 :]: value for key, value in self.items() if key.startswith(f"{name}/")
        }
        if not below:
            raise MissingFieldError(
                f"unknown field {name!r}, expected one of {nearest(name, self)}."
            )
        return Fields(below)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and self.get(name) is not None)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field, or all fields below a prefix; `default` if there is no such field."""
        try:
            return self[name]
        except KeyError:
            return default


class Episode:
    """One episode: T steps from reset to end. Fields are read at their first access, then cached.

    Attributes:
        id: Name of the episode, unique in the recording.
        length: Number of steps, T.
        schema: Numeric fields, with the shape and dtype of one step.
        texts: Names of the text fields.
        final: Names of the fields of the final observation.
        terminated, truncated: Whether the episode was terminated or truncated; None if unknown.
        success: Whether the task succeeded; None if unknown.
        task: Description of the task; "" if unknown.
        metadata: All metadata of the episode, including `task` and `success` if they are known.
    """

    def __init__(self, source: EpisodeSource, number: int, info: EpisodeInfo) -> None:
        self._source = source
        self._number = number
        self._info = info
        self._read: dict[str, Any] = {}
        self.id = info.name
        self.length = info.length
        self.schema = info.schema
        self.texts: Collection[str] = info.texts
        self.final: Collection[str] = info.final.below(OBSERVATION)
        self.terminated = info.terminated
        self.truncated = info.truncated
        self.success = info.success
        self.task = info.task
        described = {"task": info.task or None, "success": info.success}
        self.metadata: Mapping[str, Any] = {
            **{name: value for name, value in described.items() if value is not None},
            **info.metadata,
        }

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        end = end_of(self._info)
        about = [
            f"{self.length} steps",
            {"unknown": "end unknown", "open": "open end"}.get(end, end),
            *(["success"] if self.success else []),
        ]
        about += [repr(self.task)] if self.task else []
        return f"<Episode {self.id!r}: {', '.join(about)}; {self.schema!r}>"

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Any:
        """Read steps `start:stop` of a field in `schema` or `texts`; `stop=None` means the end.

        Returns:
            Array `[stop - start, *shape]`, possibly a read-only map of the file; a list of str for
            a text field.

        Raises:
            UsageError: The field or the steps do not exist.
            DataFileError: The steps cannot be read.
        """
        end = self.length if stop is None else stop
        self._check_name(name)
        if not (is_whole(start) and is_whole(end) and 0 <= start <= end <= self.length):
            raise UsageError(
                f"steps {start!r}:{end!r} of episode {self.id!r} are invalid: expected "
                f"0 <= start <= stop <= {self.length}."
            )
        return self._source.read(self._number, name, start, end)

    def video(self, name: str) -> VideoRange | None:
        """Return the video file that stores a field, and the frames in it; None if no video does.

        Raises:
            UsageError: The field does not exist.
        """
        self._check_name(name)
        return self._source.video(self._number, name)

    def _check_name(self, name: str) -> None:
        if not isinstance(name, str) or (name not in self.schema and name not in self.texts):
            raise self._unknown_field(name, [*self.schema, *self.texts])

    def _unknown_field(self, name: object, known: Iterable[str]) -> UsageError:
        return UsageError(
            f"episode {self.id!r} has no field {name!r}, expected one of {nearest(name, known)}."
        )

    def rounded(self) -> dict[str, tuple[int, int]]:
        """Return the fields whose integers were rounded to floats in reads so far.

        Returns:
            Maps fields to (number of rounded values, largest difference).
        """
        return self._source.rounded(self._number)

    @property
    def observation(self) -> Any:
        """Observations, `[T, ...]`, or `Fields` of named components; None if there are none."""
        return self._group(OBSERVATION)

    @property
    def action(self) -> Any:
        """Actions, `[T, ...]` or `Fields`; None if there are none, as in motion files."""
        return self._group("action")

    @property
    def reward(self) -> Any:
        """Rewards, `[T, ...]`; None if the file contains no rewards."""
        return self._group("reward")

    @cached_property
    def final_observation(self) -> Any:
        """Observation after the last step, without a time axis; None if it was not recorded."""
        values = {name: self._source.read_final(self._number, name) for name in self.final}
        return joined(OBSERVATION, values)

    def __getitem__(self, name: str) -> Any:
        """Return the field `name`, or all fields below `name` as `Fields`.

        Raises:
            UsageError: There is no such field.
        """
        value = self._group(name)
        if value is None:
            raise self._unknown_field(name, self.keys())
        return value

    def keys(self) -> list[str]:
        """Return the flat names of all fields, including text fields."""
        return [*self.schema, *self.texts]

    def __contains__(self, name: object) -> bool:
        return name in self.schema or name in self.texts

    def _group(self, name: str) -> Any:
        names = [field for field in self.keys() if field == name or field.startswith(f"{name}/")]
        for field in names:
            if field not in self._read:
                self._read[field] = self.read(field)
        return joined(name, {field: self._read[field] for field in names})


def joined(name: str, values: dict[str, Any]) -> Any:
    """Return a single field, or several fields below `name` as `Fields` without this prefix.

    The result is None if `values` is empty.
    """
    if name in values or not values:
        return values.get(name)
    return Fields({field[len(name) + 1 :]: value for field, value in values.items()})
