"""MCAP recordings: a file is an episode, and each message of one topic, the clock, is a step.

A step has the latest message of every topic at or before the time of the clock message. Values are
not interpolated. Messages must be JSON. For another encoding, the error names a package that
converts the messages to JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from storage.core.fields import Field, Schema
from storage.errors import CorruptFileError, DataFileError, RolloutDataError, UsageError

from ...sources.episode_info import EpisodeInfo
from ...sources.file_source import FileSource
from ..format_detection import mcap_files
from ..input_checks import damage_named, file_inside
from .mcap_messages import Log, Topic

Array = np.ndarray[Any, Any]

_PACKAGES = {
    "cdr": "mcap-ros2-support",
    "ros1": "mcap-ros1-support",
    "protobuf": "mcap-protobuf-support",
}
_TEXT = "text"
_MAX_DEPTH = 16
#: Maximum number of messages of a text topic that become metadata.
_MAX_TEXTS = 4096
_TIME = "log_time"
_TASKS = ("task", "language_instruction")
_TRUTHS = {"true": True, "false": False}
#: Maps field dtypes to the accepted `dtype.kind` codes of numpy arrays of JSON values.
_KINDS = {"float64": "iuf", "int64": "iu", "bool": "b", _TEXT: "U"}
_MAX_INT64 = np.iinfo(np.int64).max
#: Integers of at most this magnitude are exact in float64.
_EXACT = 2.0**53
_DAMAGE = (ValueError, TypeError, LookupError, OverflowError, RecursionError)


class _Leaf(NamedTuple):
    """A value in the JSON messages of a topic, which becomes a field.

    Attributes:
        topic: Name of the topic.
        keys: Keys of the nested JSON objects on the path to the value.
        dtype: "float64", "int64", "bool" or "text"; "" for a value that cannot be a field.
        shape: Shape of the value.
    """

    topic: str
    keys: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]


class _Source(NamedTuple):
    """Source of the fields of an episode.

    Attributes:
        log: Messages of the file.
        leaves: Maps field names to values in the messages.
        messages: Maps topic names to the message number at each step, and `log_time` to the time of
            each step in ns.
    """

    log: Log
    leaves: dict[str, _Leaf]
    messages: dict[str, Array]


class McapReader(FileSource):
    """Reader of an MCAP file, or of a folder of files sorted by the numbers in their names.

    Options:
        action: Topic of the actions, or a list of topics.
        clock: Topic whose messages are the steps; None means the first action topic.
    """

    format = "mcap"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"action": None, "clock": None}

    def scan(self) -> Sequence[EpisodeInfo]:
        self._actions, self._clock = self._checked_options()
        #: Key (episode, topic, start, stop) of the cached columns, and the columns.
        self._latest: tuple[Any, dict[Any, Any]] = (None, {})
        #: Integers that were rounded to float64. Maps (episode number, field) to a dict that maps
        #: steps to (number of rounded integers, largest difference).
        self._rounded: dict[tuple[int, str], dict[int, tuple[int, int]]] = {}
        episodes = []
        errors = list[RolloutDataError]()
        for path in mcap_files(self.path):
            if path != self.path:
                path = file_inside(self.path, path.name)
            try:
                log = Log(path)
                if not log.is_whole:
                    self._report_truncated(log)
                episodes.append(self._episode(log))
            except (DataFileError, UsageError) as error:
                errors.append(error)
        if errors and not episodes:
            raise errors[0]
        self.problems += errors
        return episodes

    def _checked_options(self) -> tuple[list[str], Any]:
        """Return the checked options: the action topics, and the clock topic or None."""
        action = self.options["action"]
        actions = [action] if action else []
        if isinstance(action, (list, tuple)):
            actions = list(action)
        clock: Any = self.options["clock"] or next(iter(actions), None)
        if not all(isinstance(name, (str, type(None))) for name in (*actions, clock)):
            raise UsageError(
                f"action and clock must be names of topics, got action={action!r} and "
                f"clock={self.options['clock']!r}."
            )
        return actions, clock

    def _report_truncated(self, log: Log) -> None:
        message = f"{str(log.path)!r} is truncated. The complete messages are read."
        self.problem(message, kind="unreadable", episode=log.path.stem)

    def _episode(self, log: Log) -> EpisodeInfo:
        self._check_topics(log)
        topics, metadata = self._described_topics(log)
        times = log.topics[self._clock].times[self._first_step(log, topics) :]
        messages = {}
        for name in topics:
            messages[name] = np.searchsorted(log.topics[name].times, times, "right") - 1

        leaves = self._named_leaves(log, topics)
        fields = []
        texts = []
        for name, leaf in leaves.items():
            if leaf.dtype == _TEXT:
                texts.append(name)
            else:
                fields.append(Field(name, leaf.shape, leaf.dtype))
        return EpisodeInfo(
            log.path.stem,
            len(times),
            Schema([*fields, Field(_TIME, (), "int64")]),
            tuple(texts),
            success=_TRUTHS.get(str(metadata.get("success")).lower()),
            task=next((str(metadata[key]) for key in _TASKS if key in metadata), ""),
            metadata={**metadata, "end_time_ns": int(times[-1])},
            source=_Source(log, leaves, {**messages, _TIME: times}),
        )

    def _first_step(self, log: Log, topics: Mapping[str, Any]) -> int:
        """Return the number of the first clock message at which every topic has a message.

        Raises:
            CorruptFileError: There is no such clock message.
        """
        clock = log.topics[self._clock].times
        where = repr(str(log.path))
        first = max(int(np.searchsorted(clock, log.topics[name].times[0])) for name in topics)
        if first == len(clock):
            raise CorruptFileError(
                f"{where} has no step with a message of every topic: a topic starts after the "
                f"last message of {self._clock!r}."
            )
        if first:
            self.problem(
                f"Topic {self._clock!r} of {where} has {first} messages before the first message "
                "of another topic. These messages are left out."
            )
        return first

    def _named_leaves(self, log: Log, topics: Mapping[str, list[_Leaf]]) -> dict[str, _Leaf]:
        """Map field names of all topics to values in the messages.

        Of several values with the same name, the first is kept.
        """
        leaves: dict[str, _Leaf] = {}
        for topic_leaves in topics.values():
            for leaf in topic_leaves:
                name = self._name(leaf, len(topic_leaves))
                first = leaves.setdefault(name, leaf)
                if first is not leaf:
                    self.problem(
                        f"Topics {first.topic!r} and {leaf.topic!r} of {str(log.path)!r} would both "
                        f"become field {name!r}. The second topic is left out."
                    )
        return leaves

    def _check_topics(self, log: Log) -> None:
        """Check that the action topics and the clock topic have JSON messages.

        Raises:
            UsageError: A topic has no messages.
            DataFileError: The messages of a topic are not JSON.
        """
        for name in (*self._actions, self._clock):
            if name not in log.topics or not len(log.topics[name].times):
                listed = "; ".join(map(_described, log.topics.values())) or "none"
                raise UsageError(
                    f"{str(log.path)!r} has no messages of topic {name!r}. Its topics are: {listed}. "
                    "Pass a topic as action=... or clock=..."
                )
            if log.topics[name].encoding != "json":
                raise _other_encoding(log, log.topics[name])

    def _described_topics(self, log: Log) -> tuple[dict[str, list[_Leaf]], dict[str, Any]]:
        """Divide the topics of a file into topics that become fields, and metadata.

        Topics with only texts become metadata, as do the metadata records of the file.

        Returns:
            A dict that maps topic names to the values in their messages; and the metadata.
        """
        if log.num_left_out:
            self.problem(
                f"{str(log.path)!r} has too much metadata. {log.num_left_out} metadata records are "
                "left out."
            )
        metadata: dict[str, Any] = {}
        for _, record in log.metadata:
            metadata |= record

        topics: dict[str, list[_Leaf]] = {}
        for name, topic in sorted(log.topics.items()):
            if not len(topic.times):
                continue
            if topic.encoding != "json":
                self.problems.append(_other_encoding(log, topic))
                continue
            leaves = self._leaves_of(log, topic)
            if name not in self._actions and all(leaf.dtype == _TEXT for leaf in leaves):
                for leaf in leaves:
                    metadata[f"{name.strip('/')}/{'/'.join(leaf.keys)}"] = self._texts(log, leaf)
            else:
                topics[name] = leaves
        topics.setdefault(self._clock, [])
        return topics, metadata

    def _leaves_of(self, log: Log, topic: Topic) -> list[_Leaf]:
        """Return the values in the first message of a topic, which determine its fields.

        Values that cannot be fields are reported.
        """
        where = f"{topic.name!r} of {str(log.path)!r}"
        with damage_named(f"The first message of {where}", *_DAMAGE):
            value = json.loads(next(log.messages(topic, slice(1))))
            leaves = []
            for keys, dtype, shape in _leaves(value, _schema(topic)):
                leaves.append(_Leaf(topic.name, keys, dtype, shape))

        unusable = ["/".join(leaf.keys) for leaf in leaves if not leaf.dtype]
        if unusable:
            names = ", ".join(unusable)[:200]
            self.problem(
                f"Topic {where} has values that are neither numbers, texts nor arrays of numbers: "
                f"{names}. These values are left out."
            )
        return [leaf for leaf in leaves if leaf.dtype]

    def _texts(self, log: Log, leaf: _Leaf) -> Any:
        """Read the texts of a topic: one text, or a list if there are several messages."""
        topic = log.topics[leaf.topic]
        num_texts = len(topic.times)
        if num_texts > _MAX_TEXTS:
            self.problem(
                f"Topic {topic.name!r} of {str(log.path)!r} has {num_texts} texts. Only the first "
                f"{_MAX_TEXTS} become metadata."
            )
        texts = _columns(log, [leaf], np.arange(min(num_texts, _MAX_TEXTS)))[leaf.keys]
        return texts[0] if len(texts) == 1 else texts

    def _name(self, leaf: _Leaf, num_leaves: int) -> str:
        """Return the field name of a value in a topic with `num_leaves` values."""
        key = "/".join(leaf.keys)
        if self._actions == [leaf.topic]:
            return "action" if num_leaves == 1 else f"action/{key}"
        group = "action" if leaf.topic in self._actions else "observation"
        parts = [part for part in leaf.topic.split("/") if part]
        return "/".join((group, *parts, key))

    def read(self, number: int, name: str, start: int, stop: int) -> Any:
        source: _Source = self.episodes[number].source
        if name == _TIME:
            return source.messages[_TIME][start:stop].copy()
        leaf = source.leaves[name]
        # All fields of a topic are cached, because they come from the same messages and are usually
        # read one after another.
        key = (number, leaf.topic, start, stop)
        if self._latest[0] != key:
            columns = self._read_topic(number, leaf.topic, start, stop)
            self._latest = (key, columns)
        rows = self._latest[1][leaf.keys]
        return rows.copy()

    def _read_topic(self, number: int, topic: str, start: int, stop: int) -> dict[Any, Any]:
        """Read steps of all fields of a topic, and remember integers rounded to floats."""
        source: _Source = self.episodes[number].source
        names = {leaf.keys: name for name, leaf in source.leaves.items() if leaf.topic == topic}
        leaves = [source.leaves[name] for name in names.values()]
        rounded: dict[Any, dict[int, tuple[int, int]]] = {}
        columns = _columns(source.log, leaves, source.messages[topic][start:stop], rounded)
        for keys, changes in rounded.items():
            steps = self._rounded.setdefault((number, names[keys]), {})
            for row, change in changes.items():
                steps[start + row] = change
        return columns

    def rounded(self, number: int) -> dict[str, tuple[int, int]]:
        rounded = {}
        for (episode, name), steps in self._rounded.items():
            if episode == number:
                num_values = sum(count for count, _ in steps.values())
                rounded[name] = (num_values, max(difference for _, difference in steps.values()))
        return rounded


def _columns(
    log: Log,
    leaves: Sequence[_Leaf],
    rows: Array,
    rounded: dict[Any, dict[int, tuple[int, int]]] | None = None,
) -> dict[Any, Any]:
    """Read values from messages of one topic.

    Args:
        log: Messages of the file.
        leaves: Values to read, all from the same topic.
        rows: Ascending numbers of messages; may contain duplicates.
        rounded: Output, extended in place; None to omit it. Maps the keys of a value to a dict that
            maps rows to (number of integers rounded to float64, largest difference).

    Returns:
        A dict that maps the keys of a value to an array `[len(rows), ...]` or a list of texts.
    """
    columns: dict[Any, Any] = {}
    for leaf in leaves:
        is_text = leaf.dtype == _TEXT
        columns[leaf.keys] = (
            [""] * len(rows) if is_text else np.empty((len(rows), *leaf.shape), leaf.dtype)
        )
    topic = log.topics[leaves[0].topic]
    with damage_named(f"Topic {topic.name!r} of {str(log.path)!r}", *_DAMAGE):
        numbers, starts = np.unique(rows, return_index=True)
        stops = [*starts[1:].tolist(), len(rows)]
        for text, start, stop in zip(log.messages(topic, numbers), starts, stops, strict=True):
            message = json.loads(text)
            for leaf in leaves:
                value = message
                for key in leaf.keys:
                    value = value[key]
                array = _checked_array(value, leaf)
                if rounded is not None and leaf.dtype == "float64":
                    change = _rounding(value, array)
                    if change is not None:
                        steps = dict.fromkeys(range(start, stop), change)
                        rounded.setdefault(leaf.keys, {}).update(steps)
                is_text = leaf.dtype == _TEXT
                columns[leaf.keys][start:stop] = [value] * (stop - start) if is_text else array
    return columns


def _checked_array(value: Any, leaf: _Leaf) -> Array:
    """Convert a value of a message to an array.

    Raises:
        ValueError: The type or shape differs from the first message, or an integer exceeds 64 bits.
    """
    array = np.asarray(value)
    has_other_kind = array.size > 0 and array.dtype.kind not in _KINDS[leaf.dtype]
    if has_other_kind or array.shape != leaf.shape:
        raise ValueError(
            f"{'/'.join(leaf.keys)} has another type or shape than in the first message"
        )
    if leaf.dtype == "int64" and array.dtype.kind == "u" and (array > _MAX_INT64).any():
        raise ValueError(f"{'/'.join(leaf.keys)} does not fit into a 64-bit integer")
    return array


def _rounding(value: Any, array: Array) -> tuple[int, int] | None:
    """Count the integers in a value that float64 cannot represent exactly.

    Returns:
        The number of such integers, and the largest difference to the float64 value. None if all
        integers are exact.
    """
    if not array.size or np.abs(array.astype(np.float64)).max() < _EXACT:
        return None
    stack = [value]
    differences = list[int]()
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack += item
        elif isinstance(item, int):
            difference = abs(int(float(item)) - item)
            if difference:
                differences.append(difference)
    return (len(differences), max(differences)) if differences else None


def _leaves(
    value: Any, schema: Any, keys: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str, tuple[int, ...]]]:
    """Yield (keys, dtype, shape) of each value in a message.

    The dtype is "" for a value that cannot be a field.
    """
    if isinstance(value, dict) and (value or not keys) and len(keys) < _MAX_DEPTH:
        properties = schema.get("properties", {}) if isinstance(schema, dict) else {}
        for key, child in value.items():
            child_schema = properties.get(key) if isinstance(properties, dict) else None
            yield from _leaves(child, child_schema, (*keys, key))
        return
    try:
        array = np.asarray(value)
    except ValueError:  # Nested lists of different lengths.
        array = np.asarray(None)
    is_named = len(keys) > 0 and all(key and "/" not in key for key in keys)
    yield keys, _leaf_dtype(array, schema) if is_named else "", array.shape


def _leaf_dtype(array: Array, schema: Any) -> str:
    """Return the dtype of a field for a value.

    JSON numbers are floats unless the schema declares integers.
    """
    while isinstance(schema, dict) and "items" in schema:
        schema = schema["items"]
    if array.dtype.kind == "b":
        return "bool"
    if array.dtype.kind == "U":
        return _TEXT if array.ndim == 0 else ""
    if array.dtype.kind in "iu":
        is_integer = isinstance(schema, dict) and schema.get("type") == "integer"
        return "int64" if is_integer else "float64"
    return "float64" if array.dtype.kind == "f" else ""


def _schema(topic: Topic) -> Any:
    try:
        return json.loads(topic.schema)
    except _DAMAGE:
        # The schema only distinguishes integers from floats. Without it, numbers are floats.
        return None


def _described(topic: Topic) -> str:
    """Return a description of a topic for errors: name, encoding, number of messages, rate."""
    num_messages = len(topic.times)
    text = f"{topic.encoding}, {num_messages} messages"
    span_s = float(topic.times[-1] - topic.times[0]) / 1e9 if num_messages else 0.0
    if span_s:
        text += f", {(num_messages - 1) / span_s:.3g} Hz"
    return f"{topic.name!r} ({text})"


def _other_encoding(log: Log, topic: Topic) -> DataFileError:
    package = _PACKAGES.get(topic.encoding, "another package")
    return DataFileError(
        f"Topic {topic.name!r} of {str(log.path)!r} has messages in {topic.encoding!r}, which are "
        f"not read. Convert the messages to JSON with {package}."
    )
