"""The index of a LeRobot dataset, compared with the rows of its data files.

The index consists of the files `meta/episodes*` and `meta/tasks*`. It has one entry per episode:
length, tasks, and position in the data files and video files. Each row of a data file also contains
the number of its episode. If the index contradicts the rows, an error is raised. With
`on_bad_index="rebuild"`, the index is rebuilt from the rows instead. Checking all rows takes 0.2 s
per thousand episodes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np

from storage.core.arguments import is_real, is_whole
from storage.core.durable_files import read_text
from storage.errors import CorruptFileError, DataFileError, RolloutDataError

from ...sources.recordings.natural_order import natural
from ..input_checks import file_inside, parse_json
from ..parquet import ParquetFile, ParquetFiles
from .lerobot_info import INDEX_COLUMNS, UNFINISHED, Info, file_name
from .lerobot_subtasks import numbered_texts

SUCCESS = "next.success"
TASK = "task_index"
_EPISODE = "episode_index"
#: Maps the major version to the file with the texts of tasks.
_TASK_FILES = {2: "meta/tasks.jsonl", 3: "meta/tasks.parquet"}
#: Possible names of the text column in the table of tasks.
_TASK_TEXTS = ("task", "__index_level_0__")
#: Maximum bytes of a JSON lines file. The parsed objects take 20 times as much memory.
_MAX_LINES_BYTES = 1 << 24
#: Maximum number of rows that a file may have in addition to the frames in the index, and of runs
#: in addition to the episodes. This limits the memory for a file that contradicts the index.
_MAX_UNINDEXED = 1 << 16
#: Maximum number of episodes of a damaged file listed in an error.
_NUM_SHOWN = 20
_REBUILD_ADVICE = 'Pass on_bad_index="rebuild" to group the rows by their episode_index.'


class Run(NamedTuple):
    """Consecutive rows of one episode in one file.

    Attributes:
        episode: Number of the episode.
        frame: Frame of the first row in the episode.
        position: Position of the first row in the whole dataset.
        file: Name of the data file.
        row: First row in the file.
        length: Number of rows.
        task: Number of the task; -1 if the rows have no task number.
        success: Whether a row is marked as a success; None if the rows have no success flag.
    """

    episode: int
    frame: int
    position: int
    file: str
    row: int
    length: int
    task: int
    success: bool | None


@dataclass(frozen=True)
class EpisodeEntry:
    """The entry of an episode in the index.

    Attributes:
        tasks: Texts of the tasks of the episode.
        length: Number of frames.
        start: Position of the first frame in the whole dataset.
        file: Name of the data file; "" if unknown.
        videos: Maps camera names to (video file, start time of the episode in the file in seconds).
        other: Remaining values of the entry.
    """

    tasks: tuple[str, ...]
    length: int
    start: int
    file: str
    videos: Mapping[str, tuple[str, float]]
    other: Mapping[str, Any] = field(default_factory=dict)


class Index:
    """The index of a dataset and the rows of its episodes.

    Args:
        info: Description of the dataset.
        rebuilds: Whether to rebuild an index that contradicts the data.

    Attributes:
        entries: Maps episode numbers to entries.
        runs: Maps episode numbers to the rows of the episode, in the order of the frames.
        tasks: Maps task numbers to texts.
        files: Parquet files with the rows.
        problems: Errors about data that were left out or rebuilt.

    Raises:
        DataFileError: The index contradicts the data, and `rebuilds` is False.
    """

    def __init__(self, info: Info, rebuilds: bool) -> None:
        self._info = info
        self._rebuilds = rebuilds
        self.problems: list[RolloutDataError] = []
        self.files = ParquetFiles(info.path)
        self.entries: dict[int, EpisodeEntry] = {}
        self.tasks: dict[int, str] = {}
        self.runs: dict[int, tuple[Run, ...]] = {}

        self._attempt(self._read_tasks, "metadata")
        self._attempt(self._read_entries, "metadata")
        self._attempt(self._check_entries)
        runs = self._read_runs()
        is_index_right = self._attempt(partial(self._take_indexed, runs))
        if not is_index_right:
            self._rebuild(runs)
            for episode in self.runs.keys() - self.entries.keys():
                self._attempt(partial(self._add_default_entry, episode))

    def _attempt(self, step: Callable[[], None], kind: str = "counts") -> bool:
        """Call `step` and return whether it succeeded.

        If the index may be rebuilt, a `DataFileError` is added to `problems`, not raised.

        Args:
            step: Function without arguments.
            kind: Kind of defect, for errors without a kind.
        """
        try:
            step()
        except DataFileError as error:
            if not self._rebuilds:
                raise
            self.problems.append(error.of(kind))
            return False
        return True

    def error(
        self,
        subject: str,
        problem: str,
        kind: str = "counts",
        episode: str = "",
    ) -> CorruptFileError:
        """Build the error for an index that contradicts the data.

        Args:
            subject: Subject of the message, a part of the dataset, such as "The index".
            problem: Rest of the sentence that starts with the subject, such as "has no rows".
            kind: Kind of the defect.
            episode: Number of the episode; "" for several.
        """
        message = f"{subject} of {str(self._info.path)!r} {problem}. {_REBUILD_ADVICE}"
        return CorruptFileError(message, kind=kind, episode=episode)

    def episode_error(self, episode: int, problem: str, kind: str = "counts") -> CorruptFileError:
        """Build the error for an index that contradicts the data of an episode."""
        return self.error(f"Episode {episode}", problem, kind, str(episode))

    def _read_tasks(self) -> None:
        info = self._info
        name = _TASK_FILES[info.major]
        if not (info.path / name).exists():
            message = (
                f"{str(info.path)!r} has no file {name!r}. The tasks are read from the index of "
                "the episodes."
            )
            self.problems.append(CorruptFileError(message, kind="metadata"))
        elif info.major == 3:
            self.tasks = _read_tasks_3(info)
        else:
            self.tasks = _read_tasks_2(info)

    def _read_entries(self) -> None:
        read_rows = _index_rows_3 if self._info.major == 3 else _index_rows_2
        for row in read_rows(self._info):
            self._attempt(partial(self._add_entry, row))
        self.entries = dict(sorted(self.entries.items()))

    def _add_entry(self, row: dict[str, Any]) -> None:
        episode: Any = row.get(_EPISODE)
        if not is_whole(episode) or episode in self.entries:
            problem = f"has an invalid or duplicate episode_index {episode!r}"
            raise self.error("The index", problem, "twice", str(episode))
        start: Any = row.get("dataset_from_index")
        before = self.entries.get(episode - 1)
        try:
            self.entries[episode] = _entry_of(self._info, row)
        except DataFileError as error:
            if before is not None and is_whole(start) and start < before.start + before.length:
                error.kind = "shared"
            raise

    def _add_default_entry(self, episode: int) -> None:
        """Add an entry for an episode without one, if its number determines its video files."""
        info = self._info
        length = sum(run.length for run in self.runs[episode])
        row: dict[str, Any] = {_EPISODE: episode, "length": length, "dataset_from_index": 0}
        if info.major == 3:
            if info.content.get(UNFINISHED) is not True:
                return
            # An unfinished dataset of this library has a separate data file and separate video
            # files for each episode.
            chunk, file = divmod(episode, info.chunks_size)
            row["dataset_to_index"] = length
            for group in ("data", *(f"videos/{camera}" for camera in info.cameras)):
                row[f"{group}/chunk_index"] = chunk
                row[f"{group}/file_index"] = file
                row[f"{group}/from_timestamp"] = 0.0
        self.entries[episode] = _entry_of(info, row)

    def _check_entries(self) -> None:
        """Check that the numbers of episodes and frames in the entries have no gaps."""
        start = 0
        for number, (episode, entry) in enumerate(self.entries.items()):
            if number != episode:
                raise self.episode_error(number, "is missing from the index")
            if entry.length < 1 or entry.start != start:
                frames = f"{entry.start}:{entry.start + entry.length}"
                problem = f"has the frames {frames} in the index, expected frames from {start} on"
                kind = "shared" if entry.start < start else "counts"
                raise self.episode_error(episode, problem, kind)
            start += entry.length
        for name, total in (("total_episodes", len(self.entries)), ("total_frames", start)):
            stated = self._info.content.get(name)
            if stated not in (None, total):
                raise self.error("The index", f"has {name} {total}, expected {stated}")

    def _read_runs(self) -> list[Run]:
        """Read the runs of all data files: the consecutive rows of an episode in a file.

        The episodes of a damaged file are left out.
        """
        episodes: dict[str, list[int]] = defaultdict(list)
        for episode, entry in self.entries.items():
            episodes[entry.file].append(episode)
        names = list(dict.fromkeys([*episodes, *_data_files(self._info)]))

        runs: list[Run] = []
        damages: list[CorruptFileError] = []
        for name in names:
            try:
                runs += self._runs_of(name)
            except DataFileError as cause:
                damages.append(self._damage(name, cause, episodes.get(name, [])))
        if damages and not runs and not self._rebuilds:
            raise damages[0]
        self.problems += damages
        return runs

    def _damage(self, name: str, cause: DataFileError, episodes: list[int]) -> CorruptFileError:
        """Remove the entries of the episodes in a damaged file, and return the error to report.

        Args:
            name: The file.
            cause: The damage.
            episodes: Episodes in the file according to the index.

        Raises:
            CorruptFileError: The dataset has version 3, and the file contradicts the index.
        """
        kind = cause.kind or "unreadable"
        episode = str(episodes[0]) if len(episodes) == 1 else ""
        is_contradiction = cause.kind == "counts"
        if is_contradiction and self._info.major == 3 and not self._rebuilds:
            message = f"{cause.message} {_REBUILD_ADVICE}"
            raise CorruptFileError(message, kind=kind, episode=episode) from cause

        message = f"{name!r} is left out: {cause.message}"
        if len(episodes) == 1:
            message += f" It contains episode {episode}."
        elif episodes:
            message += f" It contains the episodes {_shortened(episodes)}."
        problem = CorruptFileError(message, kind=kind, episode=episode)
        problem.__cause__ = cause
        for number in episodes:
            del self.entries[number]
        return problem

    def _runs_of(self, name: str) -> list[Run]:
        """Divide the rows of a data file into runs, the consecutive rows of one episode."""
        file = self.files[name]
        subject = f"File {name!r}"
        if not self._rebuilds:
            run = _run_of_footer(name, file)
            if run is not None:
                return [run]
            total = sum(entry.length for entry in self.entries.values())
            if file.num_rows > total + _MAX_UNINDEXED:
                problem = f"has {file.num_rows} rows, but the index has {total} frames"
                raise self.error(subject, problem)

        stated = [column for column in (TASK, SUCCESS) if _is_integer(file.types.get(column))]
        columns = file.integers([*INDEX_COLUMNS, *stated])
        if not file.num_rows:
            return []
        episode, frame, position = (columns[column] for column in INDEX_COLUMNS)
        is_next_frame = (np.diff(frame) == 1) & (np.diff(position) == 1)
        continues = (np.diff(episode) == 0) & is_next_frame
        starts = np.flatnonzero(np.concatenate([[True], ~continues]))
        num_runs = len(starts)
        if num_runs > len(self.entries) + _MAX_UNINDEXED:
            raise self.error(subject, f"has the rows of its episodes in {num_runs} separate parts")

        lengths = np.diff([*starts, file.num_rows]).tolist()
        tasks: list[int] = [-1] * num_runs
        if TASK in stated:
            tasks = columns[TASK][starts].tolist()
        successes: list[bool | None] = [None] * num_runs
        if SUCCESS in stated:
            successes = np.logical_or.reduceat(columns[SUCCESS], starts).tolist()
        runs = map(
            Run,
            episode[starts].tolist(),
            frame[starts].tolist(),
            position[starts].tolist(),
            repeat(name),
            starts.tolist(),
            lengths,
            tasks,
            successes,
        )
        return list(runs)

    def _take_indexed(self, runs: Sequence[Run]) -> None:
        """Use the runs if they match the index, or raise an error for the first difference."""
        indexed: dict[int, tuple[Run, ...]] = {}
        for run in runs:
            entry = self.entries.get(run.episode)
            rows = f"rows from {run.row} on in {run.file!r}"
            if entry is None:
                problem = f"has {rows}, but no entry in the index"
                raise self.episode_error(run.episode, problem)
            if run.episode in indexed:
                problem = f"has duplicate {rows}"
                raise self.episode_error(run.episode, problem, "twice")
            difference = _difference(run, entry)
            if difference:
                kind = _kind_of_difference(run, entry)
                raise self.episode_error(run.episode, difference, kind)
            indexed[run.episode] = (run,)

        missing = self.entries.keys() - indexed.keys()
        if missing:
            episode = min(missing)
            problem = f"has no rows in {self.entries[episode].file!r}"
            raise self.episode_error(episode, problem, "outside")
        self.runs = dict(sorted(indexed.items()))

    def _rebuild(self, runs: Sequence[Run]) -> None:
        """Group the runs by the episode numbers in the rows, and report incomplete episodes."""
        runs_of: dict[int, list[Run]] = defaultdict(list)
        for run in runs:
            runs_of[run.episode].append(run)
        for episode, parts in sorted(runs_of.items()):
            chain = self._chain(episode, parts)
            is_complete = episode >= 0 and _starts_at_zero(chain)
            if is_complete:
                self.runs[episode] = tuple(chain)
            if not is_complete or len(chain) < len(parts):
                first = min(run.frame for run in parts)
                parts_text = "1 part" if len(parts) == 1 else f"{len(parts)} parts"
                outcome = "The episode is left out."
                if is_complete:
                    outcome = "Rows that are not in the index are left out."
                message = (
                    f"Episode {episode} of {str(self._info.path)!r} has {parts_text} from frame "
                    f"{first} on, expected each frame once from 0 on. {outcome}"
                )
                problem = CorruptFileError(message, kind="counts", episode=str(episode))
                self.problems.append(problem)

    def _chain(self, episode: int, parts: list[Run]) -> list[Run]:
        """Return the runs that form an episode, in the order of their frames.

        If one of the `parts` matches the index entry, only this run is returned, and the caller
        reports the other parts. Otherwise all parts are returned, sorted by their first frames.
        """
        entry = self.entries.get(episode)
        if entry is not None:
            for run in parts:
                if not _difference(run, entry):
                    return [run]
        return sorted(parts, key=attrgetter("frame", "file", "row"))


def _starts_at_zero(chain: Sequence[Run]) -> bool:
    """Return whether the frame numbers of runs count up from 0 without gaps."""
    next_frame = 0
    for run in chain:
        if run.frame != next_frame:
            return False
        next_frame += run.length
    return True


def _is_integer(arrow_type: Any) -> bool:
    return str(arrow_type).startswith(("int", "bool"))


def _run_of_footer(name: str, file: ParquetFile) -> Run | None:
    """Read the position of the rows of a file with one episode from its Parquet footer.

    The footer states the smallest and largest value of each column. If they do not prove that the
    file has one episode without gaps, the result is None. Without reading rows, opening a thousand
    files takes 0.3 s instead of 0.8 s. The rows are checked when they are read.
    """
    bounds = [file.bounds(column) for column in (*INDEX_COLUMNS, TASK, SUCCESS)]
    episode, frame, position, task, success = bounds
    if episode is None or frame is None or position is None or task is None:
        return None
    if SUCCESS in file.types and not success:
        return None
    has_one_episode = episode[0] == episode[1] and task[0] == task[1]
    has_all_frames = all(high - low + 1 == file.num_rows for low, high in (frame, position))
    if not has_one_episode or not has_all_frames:
        return None
    return Run(
        episode=episode[0],
        frame=frame[0],
        position=position[0],
        file=name,
        row=0,
        length=file.num_rows,
        task=task[0],
        success=success and bool(success[1]),
    )


def _difference(run: Run, entry: EpisodeEntry) -> str:
    """Describe how the rows of an episode first differ from its index entry; "" if they agree."""
    if entry.file != run.file:
        return f"has its rows in {run.file!r}, but the index names {entry.file!r}"
    for name, expected, got in (
        ("starts at frame_index", 0, run.frame),
        ("starts at index", entry.start, run.position),
        ("has the number of consecutive rows", entry.length, run.length),
    ):
        if expected != got:
            return f"{name} {got}, expected {expected}"
    return ""


def _kind_of_difference(run: Run, entry: EpisodeEntry) -> str:
    """Return the kind of defect for an episode whose rows differ from its index entry."""
    if entry.file != run.file:
        return "twice"
    is_at_start = run.frame == 0 and run.position == entry.start
    return "outside" if is_at_start and run.length < entry.length else "counts"


def _data_files(info: Info) -> list[str]:
    """Return the existing files that match the template `info.data_path`, in natural order."""
    return _sorted_names(info, re.sub(r"\{[^}]*\}", "*", info.data_path))


def _sorted_names(info: Info, pattern: str) -> list[str]:
    paths = info.path.glob(pattern)
    return sorted((path.relative_to(info.path).as_posix() for path in paths), key=natural)


def _read_tasks_3(info: Info) -> dict[int, str]:
    file = ParquetFile(file_inside(info.path, _TASK_FILES[3]))
    texts = [name for name, arrow_type in file.types.items() if "string" in str(arrow_type)]
    texts = [name for name in texts if name in _TASK_TEXTS] or texts
    if len(texts) != 1:
        raise CorruptFileError(
            f"{str(file.path)!r} has the text columns {texts}, expected one column with the tasks."
        )
    return numbered_texts(file, TASK, texts[0])


def _read_tasks_2(info: Info) -> dict[int, str]:
    lines = _read_lines(info, _TASK_FILES[2], [TASK])
    return {line[TASK]: str(line.get("task", "")) for line in lines}


def _read_lines(info: Info, name: str, integers: Sequence[str]) -> list[dict[str, Any]]:
    """Read a JSON lines file. Each line must be an object with the keys `integers`."""
    path = file_inside(info.path, name)
    text = read_text(path, max_bytes=_MAX_LINES_BYTES)
    lines = [parse_json(line, path) for line in text.splitlines() if line.strip()]
    for row, line in enumerate(lines):
        if not isinstance(line, dict) or not all(is_whole(line.get(key)) for key in integers):
            raise CorruptFileError(
                f"Line {row} of {str(path)!r} is not a JSON object with integer values for "
                f"{', '.join(integers)}."
            )
    return lines


def _shortened(numbers: Sequence[int]) -> str:
    """Format at most `_NUM_SHOWN` numbers as text for an error."""
    text = ", ".join(map(str, numbers[:_NUM_SHOWN]))
    if len(numbers) > _NUM_SHOWN:
        text += f" and {len(numbers) - _NUM_SHOWN} more"
    return text


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _index_rows_2(info: Info) -> list[dict[str, Any]]:
    """Read the index of version 2, `meta/episodes.jsonl`: a dict per episode, sorted by number.

    The file states no positions. `dataset_from_index` is computed from the lengths.
    """
    rows = _read_lines(info, "meta/episodes.jsonl", [_EPISODE, "length"])
    rows.sort(key=itemgetter(_EPISODE))
    start = 0
    for row in rows:
        row["dataset_from_index"] = start
        start += row["length"]
    return rows


def _index_rows_3(info: Info) -> Iterator[dict[str, Any]]:
    """Yield the rows of the index of version 3, the tables in `meta/episodes`: one per episode.

    The columns with statistics of episodes are not read.
    """
    known: dict[str, str] = {}
    for name in _sorted_names(info, "meta/episodes/**/*.parquet"):
        file = ParquetFile(file_inside(info.path, name))
        columns = [column for column in file.types if not column.startswith(("stats/", "meta/"))]
        for batch in file.batches(dict.fromkeys(columns), 0, file.num_rows):
            values = []
            for column in columns:
                values.append([_shared(value, known) for value in batch[column].to_pylist()])
            for row in zip(*values, strict=True):
                yield dict(zip(columns, row, strict=True))


def _shared(value: Any, known: dict[str, str]) -> Any:
    """Replace equal texts in a value, also in lists, by one object to save memory.

    Args:
        value: Value of a table.
        known: Maps each text to the object to use for equal texts. New texts are added.
    """
    if isinstance(value, list):
        return [_shared(item, known) for item in value]
    if isinstance(value, str):
        return known.setdefault(value, value)
    return value


def _entry_of(info: Info, row: dict[str, Any]) -> EpisodeEntry:
    """Build the entry of an episode from a row of the index. This removes keys from `row`."""
    return _entry_3(info, row) if info.major == 3 else _entry_2(info, row)


def _entry_2(info: Info, row: dict[str, Any]) -> EpisodeEntry:
    episode = row.pop(_EPISODE)
    values = {"episode_chunk": episode // info.chunks_size, _EPISODE: episode}
    videos = {}
    for camera in info.cameras:
        file = file_name(info.video_path, {**values, "video_key": camera}, info.path)
        videos[camera] = (file, 0.0)
    return EpisodeEntry(
        tasks=_texts(row.pop("tasks", None)),
        length=row.pop("length"),
        start=row.pop("dataset_from_index"),
        file=file_name(info.data_path, values, info.path),
        videos=videos,
        other=row,
    )


def _entry_3(info: Info, row: dict[str, Any]) -> EpisodeEntry:
    where = f"the index of {str(info.path)!r}"

    def take_integer(name: str) -> int:
        value = row.pop(name, None)
        if not is_whole(value):
            raise CorruptFileError(
                f"An entry in {where} has {name!r} {repr(value)[:40]}, expected an integer. "
                f"{_REBUILD_ADVICE}"
            )
        return int(value)

    def take_file_numbers(group: str) -> dict[str, int | str]:
        return {name: take_integer(f"{group}/{name}") for name in ("chunk_index", "file_index")}

    start = take_integer("dataset_from_index")
    length = take_integer("length")
    stop = take_integer("dataset_to_index")
    if stop - start != length:
        total: Any = info.content.get("total_frames")
        is_outside = is_whole(total) and stop > total
        raise CorruptFileError(
            f"An entry in {where} states length {length}, but frames {start}:{stop}. "
            f"{_REBUILD_ADVICE}",
            kind="outside" if is_outside else "counts",
            episode=str(row.get(_EPISODE)),
        )

    file = file_name(info.data_path, take_file_numbers("data"), info.path)
    videos = {}
    for camera in info.cameras:
        values = {**take_file_numbers(f"videos/{camera}"), "video_key": camera}
        start_s = row.pop(f"videos/{camera}/from_timestamp", None)
        if not is_real(start_s) or not 0 <= start_s < 1e9:
            raise CorruptFileError(
                f"An entry in {where} has the start time {start_s!r} for {camera!r}, expected "
                f"seconds >= 0. {_REBUILD_ADVICE}"
            )
        videos[camera] = (file_name(info.video_path, values, info.path), start_s)
    tasks = _texts(row.pop("tasks", None))
    other = {name: value for name, value in row.items() if "/" not in name and name != _EPISODE}
    return EpisodeEntry(tasks, length, start, file, videos, other)
