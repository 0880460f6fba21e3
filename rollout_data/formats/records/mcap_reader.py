"""MCAP recordings: a file is an episode; topics are brought to the steps of one clock.

One rule: at each message of the clock every topic holds its last message at or before that time; nothing is
interpolated. Messages are JSON; other encodings are named with the package that reads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from storage.core.fields import Field, Schema
from storage.errors import CorruptFileError, DataFileError, RolloutDataError, UsageError

from ...sources.episode_reader import EpisodeInfo, ForeignReader
from ..format_detection import mcap_files
from ..input_checks import damage_named, file_inside
from .mcap_messages import Log, Topic
from .tfrecord import Array

_PACKAGES = {"cdr": "mcap-ros2-support", "ros1": "mcap-ros1-support", "protobuf": "mcap-protobuf-support"}
_TEXT = "text"
_MAX_DEPTH = 16
_MAX_TEXTS = 4096
_TIME = "log_time"
_TASKS = ("task", "language_instruction")
_TRUTHS = {"true": True, "false": False}
#: Dtype -> kinds of numpy that JSON gives for it.
_KINDS = {"float64": "iuf", "int64": "iu", "bool": "b", _TEXT: "U"}
_MAX_INT64 = np.iinfo(np.int64).max
#: Integers below are exact in float64.
_EXACT = 2.0**53
_DAMAGE = (ValueError, TypeError, LookupError, OverflowError, RecursionError)


class _Leaf(NamedTuple):
    """A value of each message of a topic: the keys that lead to it, and what it is."""

    topic: str
    keys: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]


class _Source(NamedTuple):
    """How the fields of an episode are found: the leaf of each, and the message of each topic at each step."""

    log: Log
    leaves: dict[str, _Leaf]
    messages: dict[str, Array]


class Reader(ForeignReader):
    """Reads a file, or a folder of them in the order of the numbers in their names.

    Option `action`: the topic of actions, or several. Option `clock`: the topic whose messages are the steps; None is
    the first of the actions.
    """

    format = "mcap"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"action": None, "clock": None}

    def scan(self) -> Sequence[EpisodeInfo]:
        action = self.options["action"]
        self._actions = list(action or ()) if isinstance(action, (list, tuple)) else [action] if action else []
        self._clock: Any = self.options["clock"] or next(iter(self._actions), None)
        if not all(isinstance(name, (str, type(None))) for name in (*self._actions, self._clock)):
            got = f"action={action!r}, clock={self.options['clock']!r}"
            raise UsageError("open", repr(str(self.path)), "names of topics", got)
        self._latest: tuple[Any, dict[Any, Any]] = (None, {})
        #: Episode and field -> step -> number of rounded integers, and the largest difference.
        self._rounded: dict[tuple[int, str], dict[int, tuple[int, int]]] = {}
        episodes = []
        refused = list[RolloutDataError]()
        for path in mcap_files(self.path):
            path = path if path == self.path else file_inside(self.path, path.name)
            try:
                log = Log(path)
                if not log.is_whole:
                    advice = "What is whole is read"
                    cut = self.problem(
                        "find the end of", repr(str(path)), "a whole file", "one that breaks off", advice
                    )
                    cut.of("unreadable", path.stem)
                episodes.append(self._episode(log))
            except (DataFileError, UsageError) as error:
                refused.append(error)
        if refused and not episodes:
            raise refused[0]
        self.problems += refused
        return episodes

    def _episode(self, log: Log) -> EpisodeInfo:
        self._check_topics(log)
        clock = log.topics[self._clock].times
        where = repr(str(log.path))
        topics, metadata = self._described_topics(log)
        first = max(int(np.searchsorted(clock, log.topics[name].times[0])) for name in topics)
        if first == len(clock):
            raise CorruptFileError(
                "read", where, f"a message of every topic before the last of {self._clock!r}", "none"
            )
        if first:
            got = f"{first} before the first message of another topic"
            advice = "They are left out"
            self.problem("make steps of", f"{self._clock!r} of {where}", "messages after all others", got, advice)
        times = clock[first:]
        messages = {name: np.searchsorted(log.topics[name].times, times, "right") - 1 for name in topics}
        leaves: dict[str, _Leaf] = {}
        for leaf in (leaf for found in topics.values() for leaf in found):
            name = self._name(leaf, len(topics[leaf.topic]))
            if (taken := leaves.setdefault(name, leaf)) is not leaf:
                got = f"{taken.topic!r} and {leaf.topic!r}"
                self.problem("name the fields of", where, f"one topic for {name!r}", got, "The latter is left out")
        fields = [Field(name, leaf.shape, leaf.dtype) for name, leaf in leaves.items() if leaf.dtype != _TEXT]
        return EpisodeInfo(
            log.path.stem,
            len(times),
            Schema([*fields, Field(_TIME, (), "int64")]),
            tuple(name for name, leaf in leaves.items() if leaf.dtype == _TEXT),
            success=_TRUTHS.get(str(metadata.get("success")).lower()),
            task=next((str(metadata[key]) for key in _TASKS if key in metadata), ""),
            metadata={**metadata, "end_time_ns": int(times[-1])},
            source=_Source(log, leaves, {**messages, _TIME: times}),
        )

    def _check_topics(self, log: Log) -> None:
        for name in (*self._actions, self._clock):
            if name not in log.topics or not len(log.topics[name].times):
                listed = "; ".join(map(_about, log.topics.values())) or "none"
                expected = "a topic as action= or clock="
                advice = f"The topics are: {listed}"
                raise UsageError("choose the steps of", repr(str(log.path)), expected, repr(name), advice)
            if log.topics[name].encoding != "json":
                raise _other_encoding(log, log.topics[name])

    def _described_topics(self, log: Log) -> tuple[dict[str, list[_Leaf]], dict[str, Any]]:
        """Return the leaves of the topics that become fields, and as metadata those of texts alone and the records."""
        if log.num_left_out:
            expected = "fewer and shorter records of metadata"
            got = f"{log.num_left_out} more"
            self.problem("keep the metadata of", repr(str(log.path)), expected, got, "They are left out")
        metadata: dict[str, Any] = {key: value for _, record in log.metadata for key, value in record.items()}
        found: dict[str, list[_Leaf]] = {}
        for name, topic in sorted(log.topics.items()):
            if topic.encoding != "json" and len(topic.times):
                self.problems.append(_other_encoding(log, topic))
            elif len(topic.times):
                where = f"{name!r} of {str(log.path)!r}"
                with damage_named("read the first message", f"of {where}", "a JSON object", *_DAMAGE):
                    value = json.loads(next(log.messages(topic, slice(1))))
                    leaves = [_Leaf(name, *one) for one in _leaves(value, _schema(topic))]
                known = [leaf for leaf in leaves if leaf.dtype]
                if len(known) < len(leaves):
                    got = ", ".join("/".join(leaf.keys) for leaf in leaves if not leaf.dtype)
                    self.problem("read", where, "numbers, texts and arrays of numbers", got[:200], "They are left out")
                if name not in self._actions and all(leaf.dtype == _TEXT for leaf in known):
                    metadata |= {f"{name.strip('/')}/{'/'.join(leaf.keys)}": self._texts(log, leaf) for leaf in known}
                else:
                    found[name] = known
        return {**found, self._clock: found.get(self._clock, [])}, metadata

    def _texts(self, log: Log, leaf: _Leaf) -> Any:
        topic = log.topics[leaf.topic]
        if (count := len(topic.times)) > _MAX_TEXTS:
            where = f"{topic.name!r} of {str(log.path)!r}"
            advice = "The first are taken as metadata"
            self.problem("keep the texts of", where, f"at most {_MAX_TEXTS}", str(count), advice)
        texts = _columns(log, [leaf], np.arange(min(count, _MAX_TEXTS)))[leaf.keys]
        return texts[0] if len(texts) == 1 else texts

    def _name(self, leaf: _Leaf, num_leaves: int) -> str:
        key = "/".join(leaf.keys)
        if self._actions == [leaf.topic]:
            return "action" if num_leaves == 1 else f"action/{key}"
        parts = (part for part in leaf.topic.split("/") if part)
        return "/".join(("action" if leaf.topic in self._actions else "observation", *parts, key))

    def read(self, number: int, name: str, start: int, stop: int) -> Any:
        source: _Source = self.episodes[number].source
        if name == _TIME:
            return source.messages[_TIME][start:stop].copy()
        leaf = source.leaves[name]
        # The fields of a topic lie in the same messages, and are mostly asked for one after the other.
        wanted = (number, leaf.topic, start, stop)
        if self._latest[0] != wanted:
            leaves = [one for one in source.leaves.values() if one.topic == leaf.topic]
            rounded: dict[Any, dict[int, tuple[int, int]]] = {}
            self._latest = wanted, _columns(source.log, leaves, source.messages[leaf.topic][start:stop], rounded)
            names = {(one.topic, one.keys): name for name, one in source.leaves.items()}
            for keys, rows in rounded.items():
                noted = self._rounded.setdefault((number, names[leaf.topic, keys]), {})
                noted.update({start + row: change for row, change in rows.items()})
        found = self._latest[1][leaf.keys]
        return found.copy()

    def rounded(self, number: int) -> dict[str, tuple[int, int]]:
        found = {}
        for (episode, name), rows in self._rounded.items():
            if episode == number:
                found[name] = sum(count for count, _ in rows.values()), max(most for _, most in rows.values())
        return found


def _columns(
    log: Log, leaves: Sequence[_Leaf], rows: Array, rounded: dict[Any, dict[int, tuple[int, int]]] | None = None
) -> dict[Any, Any]:
    """Read the leaves of one topic from messages: keys -> `[len(rows), ...]`, or a list of texts.

    `rounded` takes the integers that become other floats: keys -> row -> their number, and the largest difference.
    """
    columns: dict[Any, Any] = {
        leaf.keys: [""] * len(rows) if leaf.dtype == _TEXT else np.empty((len(rows), *leaf.shape), leaf.dtype)
        for leaf in leaves
    }
    where = f"messages of {leaves[0].topic!r} of {str(log.path)!r}"
    with damage_named("read", where, f"JSON with {', '.join('/'.join(leaf.keys) for leaf in leaves)}", *_DAMAGE):
        numbers, starts = np.unique(rows, return_index=True)
        stops = [*starts[1:].tolist(), len(rows)]
        for text, start, stop in zip(log.messages(log.topics[leaves[0].topic], numbers), starts, stops, strict=True):
            message = json.loads(text)
            for leaf in leaves:
                value = message
                for key in leaf.keys:
                    value = value[key]
                array = np.asarray(value)
                if (array.size and array.dtype.kind not in _KINDS[leaf.dtype]) or array.shape != leaf.shape:
                    raise ValueError(f"{'/'.join(leaf.keys)} of another kind or shape than in the first message")
                if leaf.dtype == "int64" and array.dtype.kind == "u" and (array > _MAX_INT64).any():
                    raise ValueError(f"{'/'.join(leaf.keys)} beyond 64-bit integers")
                if rounded is not None and leaf.dtype == "float64" and (change := _rounding(value, array)) is not None:
                    rounded.setdefault(leaf.keys, {}).update(dict.fromkeys(range(start, stop), change))
                columns[leaf.keys][start:stop] = [value] * (stop - start) if leaf.dtype == _TEXT else array
    return columns


def _rounding(value: Any, array: Array) -> tuple[int, int] | None:
    """Return how many integers of a value have no equal float64, and the largest difference; None for none."""
    if not array.size or np.abs(array.astype(np.float64)).max() < _EXACT:
        return None
    waiting = [value]
    differences = list[int]()
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        elif isinstance(one, int) and (difference := abs(int(float(one)) - one)):
            differences.append(difference)
    return (len(differences), max(differences)) if differences else None


def _leaves(
    value: Any, schema: Any, keys: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str, tuple[int, ...]]]:
    """Yield keys, dtype and shape of what a message holds; "" as dtype of what no field can hold."""
    if isinstance(value, dict) and (value or not keys) and len(keys) < _MAX_DEPTH:
        for key, child in value.items():
            inner = schema.get("properties", {}) if isinstance(schema, dict) else {}
            yield from _leaves(child, inner.get(key) if isinstance(inner, dict) else None, (*keys, key))
        return
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        array = np.asarray(None)
    while isinstance(schema, dict) and "items" in schema:
        schema = schema["items"]
    is_integer = isinstance(schema, dict) and schema.get("type") == "integer"
    found = {"b": "bool", "U": "" if array.ndim else _TEXT, "f": "float64"}
    dtype = found.get(array.dtype.kind, "") if array.dtype.kind not in "iu" else "int64" if is_integer else "float64"
    yield keys, dtype if all(key and "/" not in key for key in keys) and keys else "", array.shape


def _schema(topic: Topic) -> Any:
    try:
        return json.loads(topic.schema)
    except _DAMAGE:
        return None  # it only tells integers apart


def _about(topic: Topic) -> str:
    count = len(topic.times)
    span = float(topic.times[-1] - topic.times[0]) / 1e9 if len(topic.times) else 0.0
    return f"{topic.name!r} ({topic.encoding}, {count} messages{f', {(count - 1) / span:.3g} Hz' if span else ''})"


def _other_encoding(log: Log, topic: Topic) -> DataFileError:
    where = f"{topic.name!r} of {str(log.path)!r}"
    package = _PACKAGES.get(topic.encoding, "another package")
    return DataFileError("read", where, "messages of JSON", repr(topic.encoding), f"They need {package}; convert them")
