"""Which rows of which files are an episode of a LeRobot dataset: its index, compared with the data.

One rule: the rows say of which episode they are. Where the index says something else, the dataset is refused, or with
`on_bad_index="rebuild"` read as the rows say; all of them are looked at, which takes 0.2 s per thousand episodes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, repeat
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from storage.core.arguments import is_real, is_whole
from storage.core.durable_files import read_text
from storage.errors import CorruptFileError, DataFileError, RolloutDataError

from ...sources.natural_order import natural
from ..input_checks import file_inside, parse_json
from ..parquet import ParquetFile, ParquetFiles, shared_texts
from .lerobot_info import INDEX_COLUMNS, UNFINISHED, Info, file_name

SUCCESS = "next.success"
TASK = "task_index"
#: Version -> the file of the texts of tasks.
_TASK_NAMES = {2: "meta/tasks.jsonl", 3: "meta/tasks.parquet"}
#: As objects they take twenty times as much.
_MAX_LINES_BYTES = 1 << 24
#: More parts of episodes than this in a file, besides those of the index, are no recording.
_MAX_RUNS = 1 << 16
#: Episodes of a damaged file that are named.
_NUM_SHOWN = 20
_ADVICE = 'Open it with on_bad_index="rebuild" to group the rows by their episode_index'


class Run(NamedTuple):
    """Consecutive rows of one episode in one file."""

    episode: int
    frame: int
    position: int
    file: str
    row: int
    length: int
    task: int
    success: bool | None


@dataclass(frozen=True)
class Entry:
    """What the index says of an episode.

    Attributes:
        tasks: What was to be done.
        length: Frames.
        start: First frame in the whole dataset.
        file: Its data; "" if it does not say.
        videos: Camera -> file, and time of the first frame in seconds.
        other: Whatever else is said.
    """

    tasks: tuple[str, ...]
    length: int
    start: int
    file: str
    videos: Mapping[str, tuple[str, float]]
    other: Mapping[str, Any] = field(default_factory=dict)


class Index:
    """The index of a dataset, and its rows.

    Attributes:
        entries: Episode -> what the index says.
        runs: Episode -> its rows, in order; as the index says, or rebuilt.
        tasks: Number -> text.
        files: The data.
        problems: What was left out or rebuilt.

    Raises:
        DataFileError: The index disagrees with the data, and `rebuilds` is False.
    """

    def __init__(self, info: Info, rebuilds: bool) -> None:
        self._info = info
        self._rebuilds = rebuilds
        self.problems: list[RolloutDataError] = []
        self.files = ParquetFiles(info.path)
        self.entries: dict[int, Entry] = {}
        self.tasks: dict[int, str] = {}
        read_tasks = _read_tasks_3 if info.major == 3 else _read_tasks_2
        if (info.path / _TASK_NAMES[info.major]).exists():
            self._take(lambda: self.tasks.update(read_tasks(info)), "metadata")
        else:
            where = f"the tasks of {str(info.path)!r}"
            advice = "The index of the episodes tells their tasks"
            wrong = CorruptFileError("open", where, f"a file {_TASK_NAMES[info.major]!r}", "none", advice)
            self.problems.append(wrong.of("metadata"))
        self._take(self._read_entries, "metadata")
        self._take(self._check_entries)
        runs = self._read_runs()
        self.runs: dict[int, tuple[Run, ...]] = {}
        if not self._take(lambda: self.runs.update(self._as_indexed(runs))):
            self.runs = self._rebuilt(runs)
            for episode in set(self.runs) - set(self.entries):
                self._take(partial(self._add_usual, episode))

    def _take(self, step: Callable[[], None], kind: str = "counts") -> bool:
        """Take a step; where it fails the dataset is refused, or the failure is reported and the step is False."""
        try:
            step()
        except DataFileError as problem:
            if not self._rebuilds:
                raise
            self.problems.append(problem.of(kind))
            return False
        return True

    def bad(self, what: str, expected: str, got: str, kind: str = "counts") -> CorruptFileError:
        """Build the error for an index that disagrees, of "episode 7" or something else."""
        where = f"{what} of {str(self._info.path)!r}"
        number = what.removeprefix("episode ") if what.startswith("episode ") else ""
        return CorruptFileError("open", where, expected, got, _ADVICE).of(kind, number)

    def _read_entries(self) -> None:
        for row in _rows_3(self._info) if self._info.major == 3 else _rows_2(self._info):
            self._take(partial(self._add, row))
        self.entries = dict(sorted(self.entries.items()))

    def _add(self, row: dict[str, Any]) -> None:
        episode: Any = row.get("episode_index")
        if not is_whole(episode) or episode in self.entries:
            got = f"another one for {episode!r}"
            raise self.bad("the index", "one entry for each episode_index", got, "twice").of("", str(episode))
        start: Any = row.get("dataset_from_index")
        before = self.entries.get(episode - 1)
        try:
            self.entries[episode] = _entry_3(self._info, row) if self._info.major == 3 else _entry_2(self._info, row)
        except DataFileError as problem:
            if before is not None and is_whole(start) and start < before.start + before.length:
                problem.kind = "shared"
            raise

    def _add_usual(self, episode: int) -> None:
        """Add an entry for an episode without one where its video is known by its number."""
        length = sum(run.length for run in self.runs[episode])
        row: dict[str, Any] = {"episode_index": episode, "length": length, "dataset_from_index": 0}
        if self._info.major == 2:
            self.entries[episode] = _entry_2(self._info, row)
        elif self._info.content.get(UNFINISHED) is True:
            row["dataset_to_index"] = length
            for place in ("data", *(f"videos/{camera}" for camera in self._info.cameras)):
                chunk, file = divmod(episode, self._info.chunks_size)
                row |= {f"{place}/chunk_index": chunk, f"{place}/file_index": file, f"{place}/from_timestamp": 0.0}
            self.entries[episode] = _entry_3(self._info, row)

    def _check_entries(self) -> None:
        start = 0
        for number, (episode, entry) in enumerate(self.entries.items()):
            if number != episode:
                raise self.bad(f"episode {number}", "each number once", "none of that number")
            if entry.length < 1 or entry.start != start:
                got = f"{entry.start}:{entry.start + entry.length}"
                kind = "shared" if entry.start < start else "counts"
                raise self.bad(f"episode {episode}", f"frames from {start} on", got, kind)
            start += entry.length
        for name, found in (("total_episodes", len(self.entries)), ("total_frames", start)):
            if self._info.content.get(name) not in (None, found):
                raise self.bad("the index", f"{name} {self._info.content[name]}", str(found))

    def _read_runs(self) -> list[Run]:
        """Look at every row of every file. The episodes of a damaged file are left out."""
        runs: list[Run] = []
        damages: list[CorruptFileError] = []
        episodes: dict[str, list[int]] = defaultdict(list)
        for episode, entry in self.entries.items():
            episodes[entry.file].append(episode)
        for name in [*episodes, *(name for name in _data_files(self._info) if name not in episodes)]:
            try:
                runs += self._runs_of(name)
            except DataFileError as cause:
                listed = episodes.get(name, [])
                got = cause.got if len(listed) < 2 else f"{cause.got} (episodes {_shortened(listed)} are left out)"
                problem = self.bad(f"the data {name!r}", cause.expected, got, cause.kind or "unreadable")
                problem.episode = str(listed[0]) if len(listed) == 1 else ""
                problem.__cause__ = cause
                is_contradiction = cause.kind == "counts"
                if is_contradiction and self._info.major == 3 and not self._rebuilds:
                    raise problem from cause
                damages.append(problem)
                for episode in listed:
                    del self.entries[episode]
        if damages and not runs and not self._rebuilds:
            raise damages[0]
        self.problems += damages
        return runs

    def _runs_of(self, name: str) -> list[Run]:
        file = self.files[name]
        if not self._rebuilds and (run := _run_of_footer(name, file)):
            return [run]
        total = sum(entry.length for entry in self.entries.values())
        if not self._rebuilds and file.num_rows > total + _MAX_RUNS:
            raise self.bad(f"the data {name!r}", f"at most {total} rows", str(file.num_rows))
        told = [one for one in (TASK, SUCCESS) if str(file.types.get(one)).startswith(("int", "bool"))]
        rows = file.integers([*INDEX_COLUMNS, *told])
        if not file.num_rows:
            return []
        episode, frame, index = (rows[column] for column in INDEX_COLUMNS)
        is_next = (np.diff(episode) == 0) & (np.diff(frame) == 1) & (np.diff(index) == 1)
        starts = np.flatnonzero(np.concatenate([[True], ~is_next]))
        if len(starts) > len(self.entries) + _MAX_RUNS:
            raise self.bad(f"the data {name!r}", "rows of an episode one after the other", f"{len(starts)} parts")
        tasks = rows[TASK][starts].tolist() if TASK in told else [-1] * len(starts)
        wins = np.logical_or.reduceat(rows[SUCCESS], starts).tolist() if SUCCESS in told else [None] * len(starts)
        firsts = [column[starts].tolist() for column in (episode, frame, index)]
        lengths = np.diff([*starts, file.num_rows]).tolist()
        return list(map(Run, *firsts, repeat(name), starts.tolist(), lengths, tasks, wins))

    def _as_indexed(self, runs: Sequence[Run]) -> dict[int, tuple[Run, ...]]:
        found: dict[int, tuple[Run, ...]] = {}
        for run in runs:
            entry = self.entries.get(run.episode)
            if entry is None or run.episode in found:
                expected, kind = ("rows in one place", "twice") if entry else ("an entry in the index", "counts")
                raise self.bad(f"episode {run.episode}", expected, f"rows from {run.row} on in {run.file!r}", kind)
            if wrong := _difference(run, entry):
                is_short = wrong[0].startswith("consecutive") and run.length < entry.length
                kind = "twice" if entry.file != run.file else "outside" if is_short else "counts"
                raise self.bad(f"episode {run.episode}", *wrong, kind)
            found[run.episode] = (run,)
        if missing := sorted(set(self.entries) - set(found)):
            file = self.entries[missing[0]].file
            raise self.bad(f"episode {missing[0]}", f"its rows in {file!r}", "none there", "outside")
        return dict(sorted(found.items()))

    def _rebuilt(self, runs: Sequence[Run]) -> dict[int, tuple[Run, ...]]:
        of_episode: dict[int, list[Run]] = defaultdict(list)
        for run in runs:
            of_episode[run.episode].append(run)
        found = {}
        for episode, listed in sorted(of_episode.items()):
            entry = self.entries.get(episode)
            indexed = [run for run in listed if entry and not _difference(run, entry)]
            chain = indexed[:1] or sorted(listed, key=lambda run: (run.frame, run.file, run.row))
            ends = np.cumsum([0, *(run.length for run in chain)])
            is_whole_episode = episode >= 0 and [run.frame for run in chain] == ends[:-1].tolist()
            if is_whole_episode:
                found[episode] = tuple(chain)
            if not is_whole_episode or len(chain) < len(listed):
                got = f"{len(listed)} parts, from frame {min(run.frame for run in listed)} on"
                advice = "Rows that the index does not name are left out" if is_whole_episode else "It is left out"
                where = f"episode {episode} of {str(self._info.path)!r}"
                wrong = CorruptFileError("open", where, "each frame once, from 0 on", got, advice)
                self.problems.append(wrong.of("counts", str(episode)))
        return found


def _run_of_footer(name: str, file: ParquetFile) -> Run | None:
    """Make a run of what a footer says of its rows, in a third of the time; None if that does not tell a run.

    Opening a thousand files takes 0.3 s instead of 0.8 s. Reading looks at the rows.
    """
    bounds = [file.bounds(column) for column in (*INDEX_COLUMNS, TASK, SUCCESS)]
    (episode, frame, position, task), success = bounds[:-1], bounds[-1]
    if episode is None or frame is None or position is None or task is None:
        return None
    is_run = all(high - low + 1 == file.num_rows for low, high in (frame, position))
    if not is_run or episode[0] != episode[1] or task[0] != task[1] or (SUCCESS in file.types and not success):
        return None
    return Run(episode[0], frame[0], position[0], name, 0, file.num_rows, task[0], success and bool(success[1]))


def _difference(run: Run, entry: Entry) -> tuple[str, str] | None:
    """Return what an index expects of the rows of an episode, and what is there; None if it is that."""
    for name, expected, got in (
        ("its rows in the file", entry.file, run.file),
        ("frame_index from", 0, run.frame),
        ("index from", entry.start, run.position),
        ("consecutive rows:", entry.length, run.length),
    ):
        if expected != got:
            return f"{name} {expected!r}", repr(got)
    return None


def _data_files(info: Info) -> list[str]:
    """List the data files by the template, in the order of their numbers."""
    found = info.path.glob(re.sub(r"\{[^}]*\}", "*", info.data_path))
    return sorted((path.relative_to(info.path).as_posix() for path in found), key=natural)


def _read_tasks_3(info: Info) -> dict[int, str]:
    file = ParquetFile(file_inside(info.path, _TASK_NAMES[3]))
    texts = [name for name, kind in file.types.items() if "string" in str(kind)]
    texts = [name for name in texts if name in ("task", "__index_level_0__")] or texts
    if len(texts) != 1:
        raise CorruptFileError("read", repr(str(file.path)), "the column task_index and a column of texts", str(texts))
    numbers = file.integers([TASK])[TASK].tolist()
    known: dict[str, str] = {}
    found: list[str] = []
    for batch in file.batches({texts[0]: None}, 0, file.num_rows):
        found += shared_texts(batch[texts[0]], known)
    return dict(zip(numbers, found, strict=True))


def _read_tasks_2(info: Info) -> dict[int, str]:
    return {line[TASK]: str(line.get("task", "")) for line in _read_lines(info, _TASK_NAMES[2], TASK)}


def _read_lines(info: Info, name: str, *numbers: str) -> list[dict[str, Any]]:
    path = file_inside(info.path, name)
    lines = [
        parse_json(line, path) for line in read_text(path, max_bytes=_MAX_LINES_BYTES).splitlines() if line.strip()
    ]
    for row, line in enumerate(lines):
        if not isinstance(line, dict) or not all(is_whole(line.get(one)) for one in numbers):
            raise CorruptFileError(
                "read", f"line {row} of {str(path)!r}", f"an object with {', '.join(numbers)}", "none"
            )
    return lines


def _shortened(numbers: Sequence[int]) -> str:
    """Return numbers as text, the first ones if there are many."""
    shown = ", ".join(map(str, numbers[:_NUM_SHOWN]))
    return f"{shown} and {len(numbers) - _NUM_SHOWN} more" if len(numbers) > _NUM_SHOWN else shown


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _rows_2(info: Info) -> list[dict[str, Any]]:
    rows = sorted(_read_lines(info, "meta/episodes.jsonl", "episode_index", "length"), key=itemgetter("episode_index"))
    starts = accumulate((row["length"] for row in rows), initial=0)
    return [{**row, "dataset_from_index": start} for row, start in zip(rows, starts, strict=False)]


def _entry_2(info: Info, row: dict[str, Any]) -> Entry:
    episode = row["episode_index"]
    values = {"episode_chunk": episode // info.chunks_size, "episode_index": episode}
    videos = {one: (file_name(info.video_path, {**values, "video_key": one}, info.path), 0.0) for one in info.cameras}
    known = ("episode_index", "length", "tasks", "dataset_from_index")
    other = {name: value for name, value in row.items() if name not in known}
    file = file_name(info.data_path, values, info.path)
    return Entry(_texts(row.get("tasks")), row["length"], row["dataset_from_index"], file, videos, other)


def _shared(value: Any, known: dict[str, str]) -> Any:
    """Return a value of a table in which equal texts, also those of lists, are one object; `known` grows."""
    if isinstance(value, list):
        return [_shared(part, known) for part in value]
    return known.setdefault(value, value) if isinstance(value, str) else value


def _rows_3(info: Info) -> Iterator[dict[str, Any]]:
    """Yield the rows of the tables of episodes, without statistics."""
    known: dict[str, str] = {}
    found = info.path.glob("meta/episodes/**/*.parquet")
    for name in sorted((path.relative_to(info.path).as_posix() for path in found), key=natural):
        file = ParquetFile(file_inside(info.path, name))
        columns = [name for name in file.types if not name.startswith(("stats/", "meta/"))]
        for batch in file.batches(dict.fromkeys(columns), 0, file.num_rows):
            values = [[_shared(row, known) for row in batch[column].to_pylist()] for column in columns]
            yield from ({**dict(zip(columns, row, strict=True))} for row in zip(*values, strict=True))


def _entry_3(info: Info, row: dict[str, Any]) -> Entry:
    where = f"an episode of {str(info.path)!r}"

    def take(name: str) -> int:
        if not is_whole(value := row.pop(name, None)):
            raise CorruptFileError("open", where, f"a whole number {name!r} in the index", repr(value)[:40], _ADVICE)
        return int(value)

    start = take("dataset_from_index")
    length = take("length")
    stop = take("dataset_to_index")
    total: Any = info.content.get("total_frames")
    if stop - start != length:
        wrong = CorruptFileError("open", where, f"a range of {length} frames from {start} on", "another", _ADVICE)
        is_outside = is_whole(total) and stop > total
        raise wrong.of("outside" if is_outside else "counts", str(row.get("episode_index")))
    file = file_name(info.data_path, {name: take(f"data/{name}") for name in ("chunk_index", "file_index")}, info.path)
    videos = {}
    for camera in info.cameras:
        numbers = {name: take(f"videos/{camera}/{name}") for name in ("chunk_index", "file_index")}
        start_s = row.pop(f"videos/{camera}/from_timestamp", None)
        if not is_real(start_s) or not 0 <= start_s < 1e9:
            raise CorruptFileError("open", where, f"the time of its first frame of {camera!r}", repr(start_s), _ADVICE)
        videos[camera] = (file_name(info.video_path, {**numbers, "video_key": camera}, info.path), start_s)
    tasks = _texts(row.pop("tasks", None))
    other = {name: value for name, value in row.items() if "/" not in name and name != "episode_index"}
    return Entry(tasks, length, start, file, videos, other)
