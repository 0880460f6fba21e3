"""`TrajectoryDictBuffer`: a fixed set of episodes, drawn by priority; `PrefixSum`: the episode of a frame.

Only the priorities change after the construction. Frames are stored episode after episode. The
lengths of the episodes decide where they end, never the flags.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import fsum
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from ..core import arguments
from ..core.arguments import is_whole, whole
from ..core.fields import Schema, flatten, unflatten
from ..core.memory import LateNumber, last_copies, lasting, sent
from ..core.random_indices import Weighted, below, generator_on
from ..core.records import Key, RecordReader, flat_name, numbers
from ..errors import OutOfRangeError, RolloutDataWarning, SchemaError, UsageError
from ..ring.row_store import RowFront, RowOptions, RowStore
from ..saving.buffer_store import BufferStore
from ..saving.hdf5_columns import Table
from ..saving.saved_folder import ROWS
from ..saving.saved_store import State
from .row_buffer import lane_parts, on_device
from .trajectory_window_buffer import as_list, check_length, count_windows

_ACTION = "sample windows"
_MAKE = "make a trajectory buffer"
_OPTIONS = (
    "seq_length",
    "output_key_t",
    "output_key_tp1",
    "end_key",
    "motion_id_key",
    "contiguous",
    "nested_key_separator",
)
#: An episode: its leaves `[T, 1, *event]`, its motion id, and the file that it came from.
_Episode = tuple[list[torch.Tensor], Any, str | None]
Integers = npt.NDArray[np.int64]
_FIRST_ROOM = 16


class TrajectoryDictBuffer(RowFront, BufferStore):
    """Expert episodes, sampled as windows of consecutive frames.

    Args:
        episodes: Nested mappings whose leaves are `[T, *event]`, T of each its own. A
            `motion_id_key` may also be one value, and `file_name` a str.
        device: Device of the episodes.
        seq_length: Rows of a window; `sample` may use another number.
        output_key_t: Fields of every row of a window.
        output_key_tp1: Fields of the row after each row, below `next`; [] for none.
        end_key: Field that is True on the last frame of every episode and nowhere else; made if
            absent.
        motion_id_key: Name of the leaf with the motion id of an episode.
        file_names: Path of the source file of each episode.
        split_on_end: Whether an episode is cut behind a frame whose `end_key` is True; otherwise
            such a frame before the last one is an error.
        contiguous, output_device, generator: As for `DictBuffer`.
        nested_key_separator: Joins the levels of a key in saved files.

    Attributes:
        lengths, start_idx, stop_idx: `[E]` int64, of the episodes; frames `start_idx` to
            `stop_idx`.
        motion_ids, file_names: Lists of E entries, None where unknown.
        priorities: `[E]` float32 of sum 1, equal at first.
        capacity: Number of frames.
    """

    # Set by the constructor or by `load`.
    seq_length: int
    output_key_t: list[str]
    output_key_tp1: list[str]
    end_key: str
    motion_id_key: str
    contiguous: bool
    output_device: torch.device | None
    priorities: torch.Tensor
    motion_ids: list[Any]
    file_names: list[str | None]
    #: Wrong priorities that a device found, in all and when last raised.
    _num_wrong: torch.Tensor | int
    _num_wrong_raised: int
    _late_wrong: LateNumber
    #: Whether a device found no priority above 0.
    _late_empty: LateNumber

    def __init__(
        self,
        episodes: Iterable[Mapping[str, Any]],
        device: torch.device | str = "cpu",
        seq_length: int = 1,
        output_key_t: Sequence[Key] = ("observation",),
        output_key_tp1: Sequence[Key] = ("observation",),
        end_key: Key = "done",
        motion_id_key: Key = "motion_id",
        *,
        file_names: Iterable[str | None] | None = None,
        split_on_end: bool = False,
        contiguous: bool = False,
        output_device: torch.device | str | None = None,
        nested_key_separator: str = "-",
        generator: torch.Generator | int | None = None,
    ) -> None:
        end_name = flat_name(end_key, "end_key")
        motion_name = flat_name(motion_id_key, "motion_id_key")
        action = arguments.creating(self)
        arguments.instance(action, "episodes", episodes, "as a list of mappings", Iterable)
        if file_names is not None:
            arguments.instance(action, "file_names", file_names, "as a list of names", Iterable)
        arguments.instance(action, "nested_key_separator", nested_key_separator, "as a str", str)
        arguments.flag(action, "split_on_end", split_on_end)
        arguments.flag(action, "contiguous", contiguous)
        schema, pieces = _read(list(episodes), end_name, motion_name, file_names, split_on_end)
        device = arguments.device(action, "device", device)
        output_device = arguments.optional_device(action, "output_device", output_device)
        self._set_devices(device, output_device, generator_on(generator, device, action))
        lengths = [len(leaves[0]) for leaves, _, _ in pieces]
        options = (
            seq_length,
            output_key_t,
            output_key_tp1,
            end_name,
            motion_name,
            contiguous,
            nested_key_separator,
        )
        self._set_up(lengths, dict(zip(_OPTIONS, options, strict=True)))
        starts = self.start_idx.tolist()
        columns = [dict(zip(schema, leaves, strict=True)) for leaves, _, _ in pieces]
        self._load_rows(schema, zip(starts, columns, strict=True))
        self.motion_ids = [motion_id for _, motion_id, _ in pieces]
        self.file_names = [name for _, _, name in pieces]

    def __len__(self) -> int:
        """Frames of all episodes."""
        return self.capacity

    @property
    def storage(self) -> dict[str, Any]:
        """All frames of every field, episode after episode: nested dict of `[capacity, *event]`.

        The tensors share memory with the buffer and are for reading.
        """
        return unflatten(self._columns())

    @property
    def num_episodes(self) -> int:
        """Number of episodes."""
        return len(self.lengths)

    @torch.no_grad()
    def sample(self, batch_size: int = 1, seq_length: int | None = None) -> dict[str, Any]:
        """Draw windows: an episode by priority, then a start, uniformly over all that it has.

        Only episodes that are long enough take part. If none of those has a priority above 0, all
        are equally likely, with a warning.

        Args:
            batch_size: Rows in all: a multiple of the window's length.
            seq_length: Rows of a window, instead of the buffer's own.

        Returns:
            As `TrajectoryDictBufferMultiDim.sample`.
        """
        length = self.seq_length if seq_length is None else seq_length
        num_windows = count_windows(batch_size, length)
        needed = length + (1 if self.output_key_tp1 else 0)
        with self._lock:
            ring = self._ring
            cut = ring.cut_of(
                tuple(self.output_key_t), tuple(self.output_key_tp1), self.contiguous, apart=True
            )
            # Other streams wait for new weights.
            access = self._order.reads if needed in self._drawn_by else self._order.writes
            with access:
                episode = self._weights(needed).draw(num_windows, self._rows.generator)
                starts = below(self.lengths[episode] - needed + 1, self._rows.generator)
                windows = ring.windows(
                    self.start_idx[episode] + starts, length, cut, never_wraps=True
                )
        return on_device(windows, self.output_device)

    @lasting
    def update_priorities(self, priorities: Any, idxs: Any = None) -> None:
        """Set the priorities of some episodes, then scale all to a sum of 1.

        Priorities and indices on a GPU are not waited for: wrong ones are left out, and a later
        call raises.

        Args:
            priorities: `[num]`, finite and >= 0.
            idxs: `[num]` episodes; of one that stands twice the last value counts. None for all.
        """
        action = "update priorities"
        values = numbers(action, "priorities", priorities).flatten()
        places = None if idxs is None else numbers(action, "idxs", idxs).flatten()
        is_on_cpu = self.device.type == "cpu"
        if is_on_cpu or (values.is_cpu and (places is None or places.is_cpu)):
            values, places = self._checked(values.cpu(), None if places is None else places.cpu())
        elif places is None:
            places = torch.arange(self.num_episodes, device=self.device)
        if len(values) != len(places):
            raise UsageError(
                action, "", f"{len(places)} priorities, one per index", str(len(values))
            )
        if len(places) and (places.is_floating_point() or places.dtype is torch.bool):
            raise UsageError(
                action, "", "integers as indices, idxs", str(places.dtype), "A mask has nonzero()"
            )
        with self._lock, self._order.writes:
            if is_on_cpu:
                self._set_priorities(values, places)
            else:
                self._set_priorities_on_device(sent(values, self.device), sent(places, self.device))
            self._drawn_by.clear()

    def _checked(
        self, values: torch.Tensor, places: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Check priorities and indices on the CPU."""
        values = values.to(torch.float64)
        places = torch.arange(self.num_episodes, device="cpu") if places is None else places
        action = "update priorities"
        if len(places) and (places.is_floating_point() or places.dtype is torch.bool):
            raise UsageError(
                action, "", "integers as indices, idxs", str(places.dtype), "A mask has nonzero()"
            )
        if len(values) != len(places):
            raise UsageError(
                action, "", f"{len(places)} priorities, one per index", str(len(values))
            )
        for wrong, expected, shown in (
            (~torch.isfinite(values) | (values < 0), "finite priorities >= 0", values),
            (
                (places < 0) | (places >= self.num_episodes),
                f"idxs of episodes below {self.num_episodes}",
                places,
            ),
        ):
            if bool(wrong.any()):
                place = int(wrong.nonzero()[0])
                raise UsageError(action, f"at index {place}", expected, str(shown[place].item()))
        return values, places

    def _set_priorities(self, values: torch.Tensor, places: torch.Tensor) -> None:
        new = self.priorities.to(torch.float64).numpy()
        new[places.long().numpy()] = values.numpy()  # numpy assigns in order: the last one stays
        if new.any():
            new = new / new.max()  # or the sum may be infinite
            new = new / fsum(new)  # exact, in whatever order
        self.priorities = torch.from_numpy(new.astype(np.float32))

    def _set_priorities_on_device(self, values: torch.Tensor, places: torch.Tensor) -> None:
        self._read_numbers()
        values = values.double()
        places = places.long()
        is_right = values.isfinite() & (values >= 0) & (places >= 0) & (places < self.num_episodes)
        self._num_wrong = self._num_wrong + (~is_right).sum()
        self._late_wrong.send(self._num_wrong)
        # What is wrong goes behind the last episode.
        places = torch.where(is_right, places, self.num_episodes)
        new = torch.cat([self.priorities.double(), values.new_zeros(1)])
        if len(places):
            new.index_copy_(0, places, last_copies(places, values, len(new)))
        new = new[:-1]
        largest = new.max()
        new = torch.where(largest > 0, new / largest, new)  # or the sum may be infinite
        self.priorities = torch.where(largest > 0, new / new.sum(), new).float()

    def _read_numbers(self) -> None:
        """Raise or warn about invalid priorities that earlier calls found on a device."""
        received = self._late_wrong.receive()
        if received is not None and received[0] > self._num_wrong_raised:
            num_wrong = received[0] - self._num_wrong_raised
            self._num_wrong_raised = received[0]
            expected = f"finite priorities >= 0 of episodes below {self.num_episodes}"
            got = f"{num_wrong} others at an earlier call, which were left out"
            raise UsageError("update priorities", "", expected, got)
        received = self._late_empty.receive()
        if received is not None and received[0]:
            self._warn_of_no_priority(received[1])

    def _warn_of_no_priority(self, needed: int) -> None:
        text = (
            f"no episode of at least {needed} frames has a priority above 0; all are equally likely"
        )
        warnings.warn(text, RolloutDataWarning, stacklevel=4)

    @torch.no_grad()
    def get_full_buffer(self) -> dict[str, Any]:
        """Copy every frame of every field, episode after episode: nested dict of `[len(self), *event]`."""
        with self._lock, self._order.reads:
            columns = self._columns()
            copies = {
                name: x.clone(memory_format=torch.contiguous_format) for name, x in columns.items()
            }
        return unflatten(copies)

    @classmethod
    def _from_arguments(cls, arguments: Mapping[str, Any], device: torch.device) -> Any:
        """Create a buffer without episodes; its state is loaded next."""
        buffer = cls.__new__(cls)
        buffer._set_devices(device, None, generator_on(0, device))
        return buffer

    @classmethod
    def _of_flat(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return {}  # All options are in the state.

    def _get_state(self) -> State:
        self._order.wait(is_write=False)
        numbers: dict[str, Any] = {"capacity": self.capacity, "_idx": 0, "_is_full": True}
        numbers |= {name: getattr(self, name) for name in _OPTIONS}
        numbers |= {"motion_ids": list(self.motion_ids), "file_names": list(self.file_names)}
        numbers |= {"lengths": self.lengths.tolist(), "priorities": self.priorities.tolist()}
        return State(
            {}, numbers, {f"{ROWS}/{name}": column for name, column in self._columns().items()}
        )

    def _set_tables(self, numbers: Mapping[str, Any], tables: Mapping[str, Table]) -> None:
        table = tables[ROWS]
        lengths = numbers["lengths"]
        if table.num_rows != sum(lengths):
            raise SchemaError(
                "load episodes", expected=f"{sum(lengths)} frames", got=str(table.num_rows)
            )
        self._set_up(lengths, numbers)
        self._load_rows(table.schema(1), lane_parts(table, 1))
        self.motion_ids = list(numbers["motion_ids"])
        self.file_names = list(numbers["file_names"])
        priorities = torch.as_tensor(
            numbers["priorities"], dtype=torch.float32, device=self.device
        ).clone()
        if priorities.shape != self.lengths.shape or not bool(
            (priorities >= 0).all() & priorities.isfinite().all()
        ):
            expected = f"{self.num_episodes} finite priorities >= 0"
            raise SchemaError("load a state", "", expected, str(priorities.tolist())[:60])
        self.priorities = priorities

    def _set_devices(
        self, device: torch.device, output_device: torch.device | None, generator: torch.Generator
    ) -> None:
        self.device = device
        self.output_device = output_device
        reader = RecordReader(1, False, auto_unsqueeze=True, narrow=False)
        self._use(RowStore(RowOptions(1, num_guards=0), reader, device, generator))

    def _load_rows(
        self, schema: Schema, parts: Iterable[tuple[int, Mapping[str, torch.Tensor]]]
    ) -> None:
        """Store all frames: first frame and `[n, 1, *event]` per field."""
        rows = self._rows.emptied(self.capacity)
        self._ring = rows.load(schema, 1, self.capacity, parts, {})
        self._use(rows)

    def _columns(self) -> dict[str, torch.Tensor]:
        """Return all frames of every field by flat name, `[capacity, *event]`, sharing memory."""
        return {name: self._ring.slots_view(name)[:, 0] for name in self._ring.schema}

    @lasting
    def _set_up(self, lengths: Sequence[int], options: Mapping[str, Any]) -> None:
        """Set options and the bounds of episodes of these lengths."""
        bounds = PrefixSum([int(length) for length in lengths])
        for name in _OPTIONS:
            setattr(self, name, options[name])
        self.seq_length = check_length(self.seq_length)
        self.contiguous = bool(self.contiguous)
        self.output_key_t = as_list(self.output_key_t, "output_key_t")
        self.output_key_tp1 = as_list(self.output_key_tp1, "output_key_tp1")
        self.capacity = bounds.total
        self.lengths = torch.from_numpy(bounds.lengths).to(self.device)
        self.start_idx = torch.from_numpy(bounds.starts).to(self.device)
        self.stop_idx = self.start_idx + self.lengths
        self.motion_ids = [None] * len(bounds)
        self.file_names = [None] * len(bounds)
        self.priorities = torch.full((len(bounds),), 1 / len(bounds), device=self.device)
        #: Length that is needed -> how episodes of at least that length are drawn.
        self._drawn_by: dict[int, Weighted] = {}
        self._frame_counts = bounds.lengths
        self._num_wrong = 0
        self._num_wrong_raised = 0
        self._late_wrong = LateNumber(self.device)
        self._late_empty = LateNumber(self.device)

    def _weights(self, needed: int) -> Weighted:
        """Return how episodes of at least `needed` frames are drawn."""
        self._read_numbers()
        if needed not in self._drawn_by:
            longest = int(self._frame_counts.max())
            if longest < needed:
                expected = f"an episode of at least {needed} frames"
                raise UsageError(_ACTION, "", expected, f"a longest one of {longest}")
            is_long = self.lengths >= needed
            weights = torch.where(is_long, self.priorities, 0.0)
            is_empty = weights.sum() <= 0
            if not weights.is_cpu:
                weights = torch.where(is_empty, is_long.to(torch.float32), weights)
                self._late_empty.send(is_empty.long(), needed)
            elif is_empty:
                self._warn_of_no_priority(needed)
                weights = is_long.to(torch.float32)
            self._drawn_by[needed] = Weighted(weights)
        return self._drawn_by[needed]


def _read(
    episodes: list[Mapping[str, Any]],
    end_name: str,
    motion_name: str,
    file_names: Iterable[str | None] | None,
    split_on_end: bool,
) -> tuple[Schema, list[_Episode]]:
    """Check episodes, and cut out what describes them.

    Raises:
        UsageError, SchemaError, FieldTypeError: Naming the episode and the leaf that does not fit.
    """
    names = [None] * len(episodes) if file_names is None else list(file_names)
    if not episodes or len(names) != len(episodes):
        expected = (
            f"{len(episodes)} file names, one per episode" if episodes else "at least one episode"
        )
        raise UsageError(_MAKE, "", expected, str(len(names)) if episodes else "none")
    parts = [_take_apart(flatten(episode), motion_name) for episode in episodes]
    # A motion id that only some episodes have is known of them, but no column.
    keeps_ids = all(motion_name in columns for columns, _, _ in parts)
    reader = RecordReader(1, False, auto_unsqueeze=True, narrow=False)
    found = []
    for number, (columns, motion_id, own_name) in enumerate(parts):
        if not keeps_ids:
            columns.pop(motion_name, None)
        if not columns:
            raise UsageError(_MAKE, f"of episode {number}", "columns", "none")
        if end_name not in columns:
            length = len(next(iter(columns.values())))
            columns[end_name] = torch.zeros((length, 1), dtype=torch.bool, device="cpu")
        try:
            rows = reader.read(unflatten(columns))
        except SchemaError as error:
            error.where = f"{error.where} in episode {number}"
            raise
        if rows is None or not rows.num_rows:
            raise UsageError(_MAKE, f"of episode {number}", "at least one frame", "none")
        if reader.schema is None:
            reader.freeze(rows.schema, 1)
        place = list(rows.schema).index(end_name)
        for piece in _split(rows.tensors, place, split_on_end, f"of episode {number}"):
            found.append((piece, motion_id, names[number] or own_name))
    assert reader.schema is not None
    return reader.schema, found


def _take_apart(
    columns: dict[str, Any], motion_name: str
) -> tuple[dict[str, Any], Any, str | None]:
    """Split an episode into columns, motion id and file name."""
    file_name = columns.pop("file_name", None)
    value: Any = columns.get(motion_name)
    if value is None or isinstance(value, (str, int, float)) or getattr(value, "ndim", 1) == 0:
        columns.pop(motion_name, None)
        return columns, value.item() if hasattr(value, "item") else value, file_name
    first = torch.as_tensor(value, device="cpu")[:1].flatten().tolist()
    return columns, (first[0] if len(first) == 1 else first or None), file_name


def _split(
    rows: list[torch.Tensor], place: int, split_on_end: bool, where: str
) -> Iterator[list[torch.Tensor]]:
    """Cut an episode where a flag inside it says so; set the flags of all pieces anew."""
    inside = (rows[place] != 0).flatten(1).any(1)[:-1].nonzero().flatten().tolist()
    if inside and not split_on_end:
        advice = "Cut it there, or give split_on_end=True"
        got = f"one on frame {inside[0]}"
        raise UsageError(_MAKE, where, "an end flag on the last frame only", got, advice)
    for start, stop in pairwise([0, *(step + 1 for step in inside), len(rows[0])]):
        piece = [leaf[start:stop] for leaf in rows]
        piece[place] = torch.zeros_like(piece[place])
        piece[place][-1] = 1
        yield piece


class PrefixSum:
    """Lengths of episodes, oldest first, and the running sum of them.

    Args:
        lengths: Episodes to begin with; or an int, which is taken as `max_len`.
        max_len: Number of episodes expected. It limits nothing: the arrays grow as needed.

    Frames are numbered from 0 at the start of the oldest episode that is kept; so are episodes.
    """

    def __init__(self, lengths: int | Iterable[int] = (), *, max_len: int | None = None) -> None:
        expected = max_len
        if is_whole(lengths):
            expected = cast(int, lengths)
            lengths = ()
        if expected is not None:
            whole("create PrefixSum", "max_len", expected, 0)
        if not isinstance(lengths, Iterable):
            raise UsageError(
                "create PrefixSum", "", "lengths, or a number max_len", repr(lengths)[:60]
            )
        #: Ends of the episodes in frames since creation; [_first] is the start of the oldest kept
        #: one.
        self._ends: Integers = np.zeros(_FIRST_ROOM, np.int64)
        self._first = 0
        self._last = 0
        self.extend(lengths)

    def __len__(self) -> int:
        """Number of episodes."""
        return self._last - self._first

    @property
    def total(self) -> int:
        """Number of frames of all episodes together."""
        return int(self._ends[self._last] - self._ends[self._first])

    @property
    def lengths(self) -> Integers:
        """Length of every episode, `[len(self)]`, a new array."""
        found: Integers = np.diff(self._ends[self._first : self._last + 1])
        return found

    @property
    def starts(self) -> Integers:
        """First frame of every episode, `[len(self)]`, a new array."""
        found: Integers = self._ends[self._first : self._last] - self._ends[self._first]
        return found

    @property
    def ar(self) -> Integers:
        """Another name of `lengths`."""
        return self.lengths

    @property
    def prefix_sum(self) -> Integers:
        """Number of frames up to the end of every episode, `[len(self)]`, a new array: the running sum of `ar`."""
        found: Integers = self._ends[self._first + 1 : self._last + 1] - self._ends[self._first]
        return found

    def add(self, val: int) -> None:
        """Append an episode of `val` frames; amortized O(1). A number below 0, or none at all, raises `UsageError`."""
        length = whole("call PrefixSum.add", "val", val, 0)
        self._make_room(1)
        self._ends[self._last + 1] = self._ends[self._last] + length
        self._last += 1

    def extend(self, lengths: Iterable[int]) -> None:
        """Append many episodes at once; all or none."""
        given = arguments.instance("add episodes", "lengths", lengths, "as integers", Iterable)
        values = np.asarray(given if isinstance(given, np.ndarray) else list(given))
        if not values.size:
            return
        if values.ndim != 1 or values.dtype.kind not in "iu" or (values < 0).any():
            raise UsageError("add episodes", "", "lengths >= 0", repr(values.tolist())[:60])
        self._make_room(len(values))
        stop = self._last + len(values)
        self._ends[self._last + 1 : stop + 1] = self._ends[self._last] + np.cumsum(
            values, dtype=np.int64
        )
        self._last = stop

    def pop_oldest(self, num_episodes: int = 1) -> int:
        """Remove the oldest episodes; return the number of removed frames.

        Raises:
            IndexError: There are fewer than `num_episodes` episodes.
        """
        if not is_whole(num_episodes) or not 0 <= num_episodes <= len(self):
            raise OutOfRangeError(
                "drop episodes", "", f"num_episodes in 0 to {len(self)}", repr(num_episodes)
            )
        before = self.total
        self._first += int(num_episodes)
        return before - self.total

    def locate(self, index: Any) -> tuple[Any, Any]:
        """Return the number of the episode of a frame, and the offset of the frame in the episode.

        Args:
            index: A number, or an array of numbers of any shape, in `[0, total)`.

        Returns:
            Two ints, or two int64 arrays of that shape. Episodes without frames are never found.
        """
        wanted = np.asarray(index)
        if wanted.size and wanted.dtype.kind not in "iu":
            raise OutOfRangeError("locate frames", "", "an index of integers", str(wanted.dtype))
        wanted = wanted.astype(np.int64)
        outside = (wanted < 0) | (wanted >= self.total)
        if outside.any():
            got = str(wanted[outside].flat[0])
            raise OutOfRangeError("locate a frame", "", f"an index in [0, {self.total})", got)
        ends = self._ends[self._first : self._last + 1]
        episode = np.searchsorted(ends, wanted + ends[0], side="right") - 1
        offset = wanted + ends[0] - ends[episode]
        return (int(episode), int(offset)) if wanted.ndim == 0 else (episode, offset)

    def get_range_idx(self, idx: Any) -> Any:
        """Return the number of the episode that holds frame `idx`: an int, or int64 for an array; see `locate`."""
        return self.locate(idx)[0]

    def _make_room(self, num_episodes: int) -> None:
        needed = self._last + num_episodes + 1
        if needed <= len(self._ends):
            return
        kept = self._ends[self._first : self._last + 1]
        room = np.zeros(max(_FIRST_ROOM, 2 * (len(kept) + num_episodes)), np.int64)
        room[: len(kept)] = kept
        self._ends = room
        self._first, self._last = 0, len(kept) - 1
