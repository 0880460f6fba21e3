"""`FileScanner`: opens files of other systems, and selects episodes and fields for a stream.

The fields of most episodes become the fields of the stream. A missing field reads as NaN. An
episode with contradicting fields is left out. Both cases are reported once. Most files are listed
only when they are opened. Formats whose readers have a `listing_state` are listed again.
"""

from __future__ import annotations

import operator
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from storage.core.fields import Field, Schema
from storage.errors import DataFileError, RolloutDataError, UsageError, nearest

from ..remote.locations import Origin
from .common_fields import RESERVED, Fit, common_fields
from .episode_info import EpisodeInfo
from .file_source import FileSource
from .format_registry import detect, holds_files_of_others, open_foreign
from .origins import Origins, conventions
from .processes.shared_memory import Spot
from .rows.joined_files import EpisodeKey, JoinedFiles
from .rows.row_source import RowSource
from .scanner import BlocksInUse, Scanner

_ADVICE = "Read it from the episodes of rollout_data.open."


class FileScanner(Scanner):
    """Scanner of files of other systems, such as robomimic or LeRobot."""

    format = ""
    description = "files of another system"

    def __init__(self, source: Origins) -> None:
        self._source = source
        self._files = [_opened(origin) for origin in source.origins]
        self.format = " and ".join(dict.fromkeys(file.format for file in self._files))
        self._listing = (FileScanner, self._files)
        self._snapshot = self._joined()
        for file in self._files:
            for problem in file.problems:
                source.report(problem)
            for remark in file.advice:
                source.advise(remark)

    @staticmethod
    def is_there(path: Path) -> bool:
        # A folder of several files is accepted, so that `open_foreign` raises an error that names
        # them. Otherwise `BlockScanner` would report the files as damaged blocks.
        return detect(path) is not None or holds_files_of_others(path)

    @property
    def metadata(self) -> dict[str, Any]:
        metadata = dict(self._files[0].metadata)
        if "fps" in metadata:
            metadata.setdefault("frame_rate_hz", metadata["fps"])
        return metadata

    @property
    def conventions(self) -> set[tuple[str, str]]:
        of_files = [file.metadata for file in self._files]
        of_episodes = [
            self._files[number].episodes[episode].metadata for number, episode in self._chosen()
        ]
        return conventions([*of_files, *of_episodes])

    def refresh(self, in_use: BlocksInUse) -> None:
        """Open files again whose episodes have changed. Errors are reported and change nothing."""
        earlier = self._files
        try:
            self._files = [
                file.reopened() if origin.opened is None and file.has_changed() else file
                for origin, file in zip(self._source.origins, earlier, strict=True)
            ]
            if all(map(operator.is_, self._files, earlier)):
                return
            self._snapshot = self._joined()
        except RolloutDataError as error:
            self._files = earlier
            self._source.report(error)
            return
        self._listing = (FileScanner, self._files)
        for file in self._files:
            for problem in file.problems:
                self._source.report(problem)

    def snapshot(self, upto: Mapping[str, int] | None = None) -> RowSource:
        return self._snapshot

    def listing(self) -> Any:
        return self._listing

    def adopt(self, listing: Any, spot: Spot | None) -> bool:
        if listing is not None and listing is not self._listing:
            self._listing = listing
            _, self._files = listing
            self._snapshot = self._joined()
        return listing is not None

    def _chosen(self) -> list[EpisodeKey]:
        """Return (number of the file, number of the episode) for each selected episode."""
        keys: list[EpisodeKey] = []
        for number, (origin, file) in enumerate(
            zip(self._source.origins, self._files, strict=True)
        ):
            names = [info.name for info in file.episodes]
            keys += [
                (number, episode)
                for episode in sorted(chosen_episodes(names, origin.ids, file.path))
            ]
        return keys

    def _joined(self) -> JoinedFiles:
        """Build a snapshot of the selected episodes, with the fields that they have in common.

        Left-out episodes and fields are reported.
        """
        chosen = self._chosen()
        infos = [self._files[number].episodes[episode] for number, episode in chosen]
        fit = common_fields([info.schema for info in infos])
        self._report(fit, infos)
        kept = [
            (key, info)
            for key, info in zip(chosen, infos, strict=True)
            if info.schema not in fit.left_out
        ]
        if kept:
            self._source.check_schema(fit.schema, self._source.paths[0])
        texts = self._common_texts([info for _, info in kept], fit.schema)
        keys = [key for key, _ in kept]
        labels = self._source.labels
        return JoinedFiles(
            self._files, labels, keys, fit.schema, texts, self._source.chunk_cache_bytes
        )

    def _common_texts(self, infos: Sequence[EpisodeInfo], schema: Schema) -> Schema:
        """Return the text fields that all episodes have.

        The fields have dtype int64, since rows contain an id of each text. Text fields that only
        some episodes have are reported and left out.
        """
        counts = Counter(name for info in infos for name in info.texts)
        fields: list[Field] = []
        for name, count in counts.items():
            is_free = (
                name not in schema
                and not schema.below(name)
                and name.partition("/")[0] not in RESERVED
            )
            if is_free and count == len(infos):
                fields.append(Field(name, (), "int64", is_text=True))
                continue
            reason = "some episodes do not have them" if is_free else "their name is already used"
            self._source.report(
                DataFileError(
                    f"The texts {name!r} of {str(self._source.paths[0])!r} are left out of the "
                    f"stream: {reason}. {_ADVICE}"
                )
            )
        return Schema(fields)

    def _report(self, fit: Fit, infos: Sequence[EpisodeInfo]) -> None:
        """Report left-out episodes, left-out fields, and fields whose missing values read as NaN."""
        where = ", ".join(repr(str(path)) for path in self._source.paths)
        for schema, difference in fit.left_out.items():
            names = _named([info.name for info in infos if info.schema == schema])
            self._source.report(
                DataFileError(
                    f"{names} of {where}: {difference}, unlike most episodes. Left out of the stream."
                )
            )
        for schema, missing in fit.lacking.items():
            names = _named([info.name for info in infos if info.schema == schema])
            fields = ", ".join(map(repr, missing))
            self._source.report(
                DataFileError(f"{names} of {where}: no {fields}. The missing values read as NaN.")
            )
        for name, reason in fit.dropped.items():
            self._source.report(
                DataFileError(
                    f"Field {name!r} of {where} is left out of the stream: {reason}. {_ADVICE}"
                )
            )


def _named(names: Sequence[str]) -> str:
    """Return a text such as "Episodes 'a', 'b', 'c' and 2 more" for errors."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"Episode{'s' * (len(names) > 1)} {', '.join(map(repr, names[:3]))}{more}"


def _opened(origin: Origin) -> FileSource:
    if origin.opened is None:
        return open_foreign(origin.path, origin.format, **origin.options)
    # Copy the source of the open recording, since two threads may read at the same time.
    copied: FileSource = pickle.loads(pickle.dumps(origin.opened))
    return copied


def chosen_episodes(names: Sequence[str], ids: Sequence[str] | None, path: Path) -> list[int]:
    """Return the positions of the episodes that a user selected by name, in the order of `ids`.

    If `ids` is None, the positions of all episodes are returned.

    Raises:
        UsageError: A name in `ids` belongs to no episode.
    """
    if ids is None:
        return list(range(len(names)))
    number_of = {name: number for number, name in enumerate(names)}
    for name in ids:
        if name not in number_of:
            raise UsageError(
                f"{str(path)!r} has no episode {name!r} among its {len(number_of)} episodes, such "
                f"as {nearest(name, number_of, 4)}."
            )
    return [number_of[name] for name in ids]
