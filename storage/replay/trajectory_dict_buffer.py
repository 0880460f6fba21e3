"""`TrajectoryDictBuffer`: fixed set of episodes, drawn by priority. `PrefixSum`: episode bounds.

Only the priorities change after the construction. Frames are stored episode after episode. The
bounds of an episode are its first frame and the frame after its last. They are computed from the
lengths of the episodes, never from end flags.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import fsum
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from ..core import arguments
from ..core.arguments import is_whole, whole
from ..core.fields import Schema, flatten, unflatten
from ..core.memory import last_copies, lasting, on_device, sent
from ..core.random_indices import Weighted, below, generator_on
from ..core.records import Key, RecordReader, flat_name, numbers
from ..errors import OutOfRangeError, RolloutDataWarning, SchemaError, UsageError
from ..ring.row_store import RowFront, RowOptions, RowStore
from ..saving.buffer_store import KEY_SEPARATOR, BufferStore
from ..saving.hdf5_columns import Table
from ..saving.saved_folder import ROWS
from ..saving.saved_store import State
from .row_buffer import lane_parts
from .trajectory_window_buffer import as_list, check_length, count_windows

_OPTIONS = (
    "seq_length",
    "output_key_t",
    "output_key_tp1",
    "end_key",
    "motion_id_key",
    "contiguous",
    "nested_key_separator",
)
#: An episode: leaves `[T, 1, *event]`, motion id, and name of the source file.
_Episode = tuple[list[torch.Tensor], Any, str | None]
Integers = npt.NDArray[np.int64]
_FIRST_ROOM = 16


class TrajectoryDictBuffer(RowFront, BufferStore):
    """Buffer of expert episodes, sampled as windows of consecutive frames.

    Args:
        episodes: One nested mapping per episode, with leaves `[T, *event]`. T is the length of the
            episode. The leaf `motion_id_key` may be a single value. A leaf `file_name` is a str.
        device: Device of the episodes.
        seq_length: Default number of rows of a window.
        output_key_t: Fields to return from every row of a window.
        output_key_tp1: Fields to return from the row after each row, below `next`; [] for none.
        end_key: Field that is True only on the last frame of every episode; created if missing.
        motion_id_key: Name of the leaf with the motion id of an episode.
        file_names: Path of the source file of each episode.
        split_on_end: Whether to split an episode after each frame with a True `end_key`. Otherwise
            a True `end_key` before the last frame is an error.
        contiguous, output_device, generator: As for `DictBuffer`.
        nested_key_separator: Text that joins the levels of a key in saved files.

    Attributes:
        lengths: Frames per episode, `[E]` int64.
        start_idx, stop_idx: First frame of each episode, and the frame after its last, `[E]` int64.
        motion_ids, file_names: Lists of E entries; None for an unknown entry.
        priorities: `[E]` float32 with sum 1, initially equal.
        capacity: Number of frames of all episodes.
    """

    # The constructor or `load` sets these attributes.
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
        nested_key_separator: str = KEY_SEPARATOR,
        generator: torch.Generator | int | None = None,
    ) -> None:
        end_name = flat_name(end_key, "end_key")
        motion_name = flat_name(motion_id_key, "motion_id_key")
        arguments.instance("episodes", episodes, "a list of mappings", Iterable)
        if file_names is not None:
            arguments.instance("file_names", file_names, "a list of names", Iterable)
        arguments.instance("nested_key_separator", nested_key_separator, "a str", str)
        arguments.flag("split_on_end", split_on_end)
        arguments.flag("contiguous", contiguous)
        schema, pieces = _read(list(episodes), end_name, motion_name, file_names, split_on_end)
        device = arguments.device("device", device)
        output_device = arguments.optional_device("output_device", output_device)
        self._set_devices(device, output_device, generator_on(generator, device))
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
        """Return the number of frames of all episodes."""
        return self.capacity

    @property
    def storage(self) -> dict[str, Any]:
        """Nested dict of all frames, episode after episode: `[capacity, *event]` by field.

        Tensors share memory with the buffer. Do not write to them.
        """
        self._order.wait(is_write=False)
        return unflatten(self._columns())

    @property
    def num_episodes(self) -> int:
        """Number of episodes."""
        return len(self.lengths)

    @torch.no_grad()
    def sample(self, batch_size: int = 1, seq_length: int | None = None) -> dict[str, Any]:
        """Draw windows: an episode by priority, then a start frame uniformly.

        Only episodes that are long enough are drawn. If no such episode has a priority above 0, all
        such episodes are equally likely, and a warning is issued.

        Args:
            batch_size: Total number of rows, a multiple of the window length.
            seq_length: Number of rows of a window; None for `seq_length` of the buffer.

        Returns:
            Fields in the layout of `TrajectoryDictBufferMultiDim.sample`.
        """
        length = self.seq_length if seq_length is None else seq_length
        num_windows = count_windows(batch_size, length)
        num_frames = length + (1 if self.output_key_tp1 else 0)
        with self._lock:
            ring = self._ring
            cut = ring.cut_of(
                tuple(self.output_key_t), tuple(self.output_key_tp1), self.contiguous, apart=True
            )
            # New weights are written to the device. Other CUDA streams must wait for that write.
            access = self._order.reads if num_frames in self._weighted else self._order.writes
            with access:
                episode = self._weighted_episodes(num_frames).draw(
                    num_windows, self._rows.generator
                )
                starts = below(self.lengths[episode] - num_frames + 1, self._rows.generator)
                windows = ring.windows(
                    self.start_idx[episode] + starts, length, cut, never_wraps=True
                )
        return on_device(windows, self.output_device)

    @lasting
    def update_priorities(self, priorities: Any, idxs: Any = None) -> None:
        """Set the priorities of some episodes, then scale all priorities to a sum of 1.

        The host does not wait for priorities and indices on a GPU. Invalid entries there are
        ignored, and a later call raises `UsageError`.

        Args:
            priorities: `[num]`, finite and >= 0.
            idxs: Indices of episodes, `[num]`. For a repeated index the last priority is used. None
                for all episodes.
        """
        values = numbers("priorities", priorities).flatten()
        if idxs is None:
            places = torch.arange(self.num_episodes, device=values.device)
        else:
            places = numbers("idxs", idxs).flatten()
        is_on_cpu = self.device.type == "cpu"
        if is_on_cpu:
            values, places = values.cpu(), places.cpu()
        self._check_priorities(values, places)
        with self._lock, self._order.writes:
            if is_on_cpu:
                self._set_priorities(values, places)
            else:
                self._set_priorities_on_device(sent(values, self.device), sent(places, self.device))
            self._weighted.clear()

    def _check_priorities(self, values: torch.Tensor, places: torch.Tensor) -> None:
        """Raise `UsageError` if priorities or indices of episodes are invalid.

        The values of tensors on a device are not checked, since the host would have to wait.
        """
        if len(places) and (places.is_floating_point() or places.dtype is torch.bool):
            raise UsageError(
                f"idxs must be integers, got {places.dtype}. "
                "For a mask, pass mask.nonzero().flatten()."
            )
        if len(values) != len(places):
            raise UsageError(f"{len(values)} priorities are given for {len(places)} idxs.")
        if values.is_cpu:
            values = values.double()
            wrong_values = values[~torch.isfinite(values) | (values < 0)]
            if len(wrong_values):
                raise UsageError(
                    f"priorities must be finite and >= 0, got {wrong_values[0].item()}."
                )
        if places.is_cpu:
            wrong_places = places[(places < 0) | (places >= self.num_episodes)]
            if len(wrong_places):
                raise UsageError(
                    f"idxs must be in 0:{self.num_episodes}, got {wrong_places[0].item()}."
                )

    def _set_priorities(self, values: torch.Tensor, places: torch.Tensor) -> None:
        new = self.priorities.to(torch.float64).numpy()
        # numpy assigns in order, so that the last priority of a repeated index is kept.
        new[places.long().numpy()] = values.double().numpy()
        if new.any():
            new = new / new.max()  # The sum of very large priorities may be infinite.
            new = new / fsum(new)  # `fsum` is exact and does not depend on the order.
        self.priorities = torch.from_numpy(new.astype(np.float32))

    def _set_priorities_on_device(self, values: torch.Tensor, places: torch.Tensor) -> None:
        self._order.deferred.raise_arrived()
        values = values.double()
        places = places.long()
        is_right = values.isfinite() & (values >= 0) & (places >= 0) & (places < self.num_episodes)
        self._order.deferred.note((~is_right).sum(), self._invalid_entries)
        # Invalid entries are written to an extra element after the last episode.
        places = torch.where(is_right, places, self.num_episodes)
        new = torch.cat([self.priorities.double(), values.new_zeros(1)])
        if len(places):
            new.index_copy_(0, places, last_copies(places, values, len(new)))
        new = new[:-1]
        largest = new.max()
        # The sum of very large priorities may be infinite.
        new = torch.where(largest > 0, new / largest, new)
        self.priorities = torch.where(largest > 0, new / new.sum(), new).float()

    def _invalid_entries(self, num_wrong: int) -> UsageError | None:
        """Return the error to raise if an earlier `update_priorities` on a device was invalid.

        `num_wrong` is the number of invalid entries of that call. None if it is 0.
        """
        if not num_wrong:
            return None
        return UsageError(
            f"an earlier call passed {num_wrong} invalid priorities or idxs, which were ignored. "
            f"Priorities must be finite and >= 0, and idxs in 0:{self.num_episodes}."
        )

    def _warn_if_empty(self, num_frames: int, is_empty: bool) -> None:
        """Warn if `is_empty`: no episode with at least `num_frames` frames has a priority above 0."""
        if is_empty:
            text = (
                f"no episode of at least {num_frames} frames has a priority above 0; all are equally "
                "likely"
            )
            warnings.warn(text, RolloutDataWarning, stacklevel=6)

    @torch.no_grad()
    def get_full_buffer(self) -> dict[str, Any]:
        """Copy all frames, episode after episode: nested dict of `[len(self), *event]`."""
        with self._lock, self._order.reads:
            columns = self._columns()
            copies = {
                name: x.clone(memory_format=torch.contiguous_format) for name, x in columns.items()
            }
        return unflatten(copies)

    @classmethod
    def _from_arguments(cls, arguments: Mapping[str, Any], device: torch.device) -> Any:
        """Create a buffer without episodes. The caller then loads a saved state into it."""
        buffer = cls.__new__(cls)
        buffer._set_devices(device, None, generator_on(0, device))
        return buffer

    @classmethod
    def _of_flat(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        # `_set_tables` reads all options from the numbers of the state.
        return {}

    def _get_state(self) -> State:
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
                f"the state has {table.num_rows} frames, and its lengths add up to {sum(lengths)}."
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
            raise SchemaError(
                f"priorities of the state must be {self.num_episodes} finite numbers >= 0, got "
                f"{str(priorities.tolist())[:60]}."
            )
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
        """Copy the frames of all episodes into new memory.

        Args:
            schema: Fields of a frame.
            parts: Runs of consecutive frames, as pairs (number of the first frame, leaves). The
                leaves of a run of n frames are `[n, 1, *event]` by field name.
        """
        rows = self._rows.emptied(self.capacity)
        self._ring = rows.load(schema, 1, self.capacity, parts, {})
        self._use(rows)

    def _columns(self) -> dict[str, torch.Tensor]:
        """Return views of all frames, `[capacity, *event]` by flat field name."""
        return {name: self._ring.slots_view(name)[:, 0] for name in self._ring.schema}

    @lasting
    def _set_up(self, lengths: Sequence[int], options: Mapping[str, Any]) -> None:
        """Set the options, compute the bounds of the episodes, and make all priorities equal."""
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
        #: Map from a number of frames to weighted draws of the episodes with at least this number of
        #: frames.
        self._weighted: dict[int, Weighted] = {}
        self._frame_counts = bounds.lengths

    def _weighted_episodes(self, num_frames: int) -> Weighted:
        """Return an object that draws episodes with at least `num_frames` frames by priority.

        The object is cached until the priorities change.
        """
        self._order.deferred.raise_arrived()
        if num_frames not in self._weighted:
            longest = int(self._frame_counts.max())
            if longest < num_frames:
                raise UsageError(
                    f"the longest episode has {longest} frames, and a window needs {num_frames}."
                )
            is_long = self.lengths >= num_frames
            weights = torch.where(is_long, self.priorities, 0.0)
            is_empty = weights.sum() <= 0
            self._order.deferred.note(is_empty, partial(self._warn_if_empty, num_frames))
            if weights.is_cpu:
                self._order.deferred.raise_arrived()
            weights = torch.where(is_empty, is_long.to(torch.float32), weights)
            self._weighted[num_frames] = Weighted(weights)
        return self._weighted[num_frames]


def _read(
    episodes: list[Mapping[str, Any]],
    end_name: str,
    motion_name: str,
    file_names: Iterable[str | None] | None,
    split_on_end: bool,
) -> tuple[Schema, list[_Episode]]:
    """Check episodes, and split them into leaves, motion ids and file names.

    Returns:
        The schema of a frame, and the episodes.

    Raises:
        UsageError, SchemaError, FieldTypeError: A leaf does not match the schema. The message names
            the episode and the leaf.
    """
    names = [None] * len(episodes) if file_names is None else list(file_names)
    if not episodes or len(names) != len(episodes):
        if not episodes:
            raise UsageError("episodes is empty. Pass at least one episode.")
        raise UsageError(f"{len(names)} file names are given for {len(episodes)} episodes.")
    parts = [_take_apart(flatten(episode), motion_name) for episode in episodes]
    # Every episode must have the same columns. If the motion id is missing or a single value in
    # one episode, no episode has a column of motion ids; the attribute `motion_ids` has them all.
    keeps_ids = all(motion_name in columns for columns, _, _ in parts)
    reader = RecordReader(1, False, auto_unsqueeze=True, narrow=False)
    records = []
    for number, (columns, motion_id, own_name) in enumerate(parts):
        if not keeps_ids:
            columns.pop(motion_name, None)
        if not columns:
            raise UsageError(f"episode {number} has no fields.")
        if end_name not in columns:
            length = len(next(iter(columns.values())))
            columns[end_name] = torch.zeros((length, 1), dtype=torch.bool, device="cpu")
        try:
            rows = reader.read(unflatten(columns))
        except SchemaError as error:
            error.message = f"episode {number}: {error.message}"
            raise
        if rows is None or not rows.num_rows:
            raise UsageError(f"episode {number} has no frames.")
        if reader.schema is None:
            reader.freeze(rows.schema, 1)
        place = list(rows.schema).index(end_name)
        for piece in _split(rows.tensors, place, split_on_end, number):
            records.append((piece, motion_id, names[number] or own_name))
    assert reader.schema is not None
    return reader.schema, records


def _take_apart(
    columns: dict[str, Any], motion_name: str
) -> tuple[dict[str, Any], Any, str | None]:
    """Split an episode into (columns, motion id, file name); None for a missing id or name.

    The motion id stays a column if it has one value per frame.
    """
    file_name = columns.pop("file_name", None)
    value: Any = columns.get(motion_name)
    if value is None or isinstance(value, (str, int, float)) or getattr(value, "ndim", 1) == 0:
        columns.pop(motion_name, None)
        return columns, value.item() if hasattr(value, "item") else value, file_name
    first = torch.as_tensor(value, device="cpu")[:1].flatten().tolist()
    return columns, (first[0] if len(first) == 1 else first or None), file_name


def _split(
    rows: list[torch.Tensor], place: int, split_on_end: bool, number: int
) -> Iterator[list[torch.Tensor]]:
    """Split an episode after each set end flag and reset the end flags of the pieces."""
    inside = (rows[place] != 0).flatten(1).any(1)[:-1].nonzero().flatten().tolist()
    if inside and not split_on_end:
        raise UsageError(
            f"episode {number} has an end flag on frame {inside[0]}, before its last frame. "
            "Pass split_on_end=True to split it."
        )
    for start, stop in pairwise([0, *(step + 1 for step in inside), len(rows[0])]):
        piece = [leaf[start:stop] for leaf in rows]
        piece[place] = torch.zeros_like(piece[place])
        piece[place][-1] = 1
        yield piece


class PrefixSum:
    """Lengths of episodes, oldest first, and the running sum of the lengths.

    Frames and episodes are numbered from 0. Number 0 is the oldest episode that was not removed,
    and its first frame.

    Args:
        lengths: Lengths of the initial episodes. An int is interpreted as `max_len`.
        max_len: Expected number of episodes. It is not a limit: the arrays grow as needed.
    """

    def __init__(self, lengths: int | Iterable[int] = (), *, max_len: int | None = None) -> None:
        expected = max_len
        if is_whole(lengths):
            expected = cast(int, lengths)
            lengths = ()
        if expected is not None:
            whole("max_len", expected, 0)
        if not isinstance(lengths, Iterable):
            raise UsageError(
                f"lengths must be a list of lengths or a number, got {repr(lengths)[:60]}."
            )
        #: Number of frames up to the end of each episode, including removed episodes. The oldest
        #: episode has the frames `_ends[_first]` to `_ends[_first + 1]`.
        self._ends: Integers = np.zeros(_FIRST_ROOM, np.int64)
        self._first = 0
        self._last = 0
        self.extend(lengths)

    def __len__(self) -> int:
        """Return the number of episodes."""
        return self._last - self._first

    @property
    def total(self) -> int:
        """Total number of frames of all episodes."""
        return int(self._ends[self._last] - self._ends[self._first])

    @property
    def lengths(self) -> Integers:
        """Length of every episode, `[len(self)]`, a new array."""
        lengths: Integers = np.diff(self._ends[self._first : self._last + 1])
        return lengths

    @property
    def starts(self) -> Integers:
        """First frame of every episode, `[len(self)]`, a new array."""
        starts: Integers = self._ends[self._first : self._last] - self._ends[self._first]
        return starts

    @property
    def ar(self) -> Integers:
        """Alias of `lengths`."""
        return self.lengths

    @property
    def prefix_sum(self) -> Integers:
        """Running sum of `lengths`, `[len(self)]`: frames up to each episode's end; a new array."""
        sums: Integers = self._ends[self._first + 1 : self._last + 1] - self._ends[self._first]
        return sums

    def add(self, val: int) -> None:
        """Append an episode of `val` frames in amortized O(1).

        Raises:
            UsageError: `val` is not an integer >= 0.
        """
        length = whole("val", val, 0)
        self._make_room(1)
        self._ends[self._last + 1] = self._ends[self._last] + length
        self._last += 1

    def extend(self, lengths: Iterable[int]) -> None:
        """Append many episodes at once. If a length is invalid, no episode is appended."""
        integers = arguments.instance("lengths", lengths, "integers", Iterable)
        values = np.asarray(integers if isinstance(integers, np.ndarray) else list(integers))
        if not values.size:
            return
        if values.ndim != 1 or values.dtype.kind not in "iu" or (values < 0).any():
            raise UsageError(f"lengths must be integers >= 0, got {repr(values.tolist())[:60]}.")
        self._make_room(len(values))
        stop = self._last + len(values)
        self._ends[self._last + 1 : stop + 1] = self._ends[self._last] + np.cumsum(
            values, dtype=np.int64
        )
        self._last = stop

    def pop_oldest(self, num_episodes: int = 1) -> int:
        """Remove the oldest episodes and return the number of removed frames.

        Raises:
            IndexError: There are fewer than `num_episodes` episodes.
        """
        if not is_whole(num_episodes) or not 0 <= num_episodes <= len(self):
            raise OutOfRangeError(
                f"num_episodes must be in 0:{len(self) + 1}, got {num_episodes!r}."
            )
        before = self.total
        self._first += int(num_episodes)
        return before - self.total

    def locate(self, index: Any) -> tuple[Any, Any]:
        """Return the number of the episode of a frame, and the offset of the frame in the episode.

        Args:
            index: Frame number, or an array of frame numbers of any shape, in `[0, total)`.

        Returns:
            Two ints, or two int64 arrays with the shape of `index`. Episodes without frames are
            never returned.
        """
        wanted = np.asarray(index)
        if wanted.size and wanted.dtype.kind not in "iu":
            raise OutOfRangeError(f"index must have an integer dtype, got {wanted.dtype}.")
        wanted = wanted.astype(np.int64)
        outside = (wanted < 0) | (wanted >= self.total)
        if outside.any():
            raise OutOfRangeError(
                f"index must be in 0:{self.total}, got {wanted[outside].flat[0]}."
            )
        ends = self._ends[self._first : self._last + 1]
        episode = np.searchsorted(ends, wanted + ends[0], side="right") - 1
        offset = wanted + ends[0] - ends[episode]
        return (int(episode), int(offset)) if wanted.ndim == 0 else (episode, offset)

    def get_range_idx(self, idx: Any) -> Any:
        """Return the number of the episode that contains frame `idx`."""
        return self.locate(idx)[0]

    def _make_room(self, num_episodes: int) -> None:
        num_ends = self._last + num_episodes + 1
        if num_ends <= len(self._ends):
            return
        kept = self._ends[self._first : self._last + 1]
        room = np.zeros(max(_FIRST_ROOM, 2 * (len(kept) + num_episodes)), np.int64)
        room[: len(kept)] = kept
        self._ends = room
        self._first, self._last = 0, len(kept) - 1
