"""One episode of a recording, whatever the format; its fields are read when they are asked for.

One rule: what a file lacks is None or absent, and what it does not tell is None.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
    """Arrays by flat names, "images/left"; a name above others, "images", gives those below it.

    A name may begin with "/", as topics do.
    """

    def __missing__(self, name: str) -> Any:
        if name.startswith("/"):
            return self[name[1:]]
        below = {key[len(name) + 1 :]: value for key, value in self.items() if key.startswith(f"{name}/")}
        if not below:
            raise MissingFieldError("read the field", repr(name), nearest(name, self), "no such field")
        return Fields(below)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and self.get(name) is not None)

    def get(self, name: str, default: Any = None) -> Any:
        """Return what `fields[name]` does, or `default`."""
        try:
            return self[name]
        except KeyError:
            return default


class Episode:
    """T steps from reset to end; a field is read when it is first asked for, and then kept by this object.

    Attributes:
        id: Its name, unique in the recording.
        length: T.
        schema: Its numeric fields: name -> shape and dtype of a step.
        texts: Names of its fields of texts.
        final: Names of the fields of its final observation.
        terminated, truncated: How it ended; None where the file does not tell.
        success: None where the file does not tell.
        task: What was to be done, in words; "".
        metadata: Anything else that is known of it; `task` and `success` are there too if they are known.
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
        told = {"task": info.task or None, "success": info.success}
        self.metadata: Mapping[str, Any] = {
            **{name: value for name, value in told.items() if value is not None},
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
        """Read the steps `start:stop` of one field, named as in `schema` or `texts`; None is T.

        Returns:
            `[stop - start, *shape]`, perhaps a read-only map of the file; of texts a list.

        Raises:
            UsageError: There is no such field, or no such steps.
            DataFileError: They cannot be read.
        """
        end = self.length if stop is None else stop
        action = "call Episode.read"
        self._check_name(action, name)
        if not (is_whole(start) and is_whole(end) and 0 <= start <= end <= self.length):
            where = f"of episode {self.id!r}"
            expected = f"0 <= start <= stop <= {self.length}"
            raise UsageError(action, where, expected, f"{start!r}:{end!r}")
        return self._source.read(self._number, name, start, end)

    def video(self, name: str) -> VideoRange | None:
        """Return where the video of a field is; None if the field is not stored as video.

        Raises:
            UsageError: There is no such field.
        """
        self._check_name("call Episode.video", name)
        return self._source.video(self._number, name)

    def _check_name(self, action: str, name: str) -> None:
        if not isinstance(name, str) or (name not in self.schema and name not in self.texts):
            expected = f"name among {nearest(str(name), [*self.schema, *self.texts])}"
            raise UsageError(action, f"of episode {self.id!r}", expected, repr(name))

    def rounded(self) -> dict[str, tuple[int, int]]:
        """Return the fields in which reading rounded integers to floats so far.

        Returns:
            Field -> (number of changed values, largest difference).
        """
        return self._source.rounded(self._number)

    @property
    def observation(self) -> Any:
        """`[T, ...]`, or `Fields` of such arrays where the observation has names; None if there is none."""
        return self._group(OBSERVATION)

    @property
    def action(self) -> Any:
        """`[T, ...]`, or `Fields`; None if there is none, as in files of motions."""
        return self._group("action")

    @property
    def reward(self) -> Any:
        """`[T, ...]`; None where the file has none."""
        return self._group("reward")

    @cached_property
    def final_observation(self) -> Any:
        """The observation after the last step, without a time axis; None where the file has none."""
        found = {name: self._source.read_final(self._number, name) for name in self.final}
        return joined(OBSERVATION, found)

    def __getitem__(self, name: str) -> Any:
        """Return any field, or the `Fields` below a name, as in `episode["observation"]`.

        Raises:
            UsageError: There is none of this name.
        """
        found = self._group(name)
        if found is None:
            raise UsageError("read the field", f"of episode {self.id!r}", nearest(name, self.keys()), repr(name))
        return found

    def keys(self) -> list[str]:
        """Names of its fields, flat, those of texts included."""
        return [*self.schema, *self.texts]

    def __contains__(self, name: object) -> bool:
        return name in self.schema or name in self.texts

    def _group(self, name: str) -> Any:
        names = [one for one in self.keys() if one == name or one.startswith(f"{name}/")]
        for one in names:
            if one not in self._read:
                self._read[one] = self.read(one)
        return joined(name, {one: self._read[one] for one in names})


def joined(name: str, found: dict[str, Any]) -> Any:
    """Return a field by itself, fields below a name as `Fields` without it, or None."""
    if name in found or not found:
        return found.get(name)
    return Fields({one[len(name) + 1 :]: value for one, value in found.items()})
