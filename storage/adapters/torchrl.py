"""`ReplayBuffer` and `PrioritizedReplayBuffer`: replacements for the buffers of torchrl.

Arguments and results are `TensorDict`s. This module only converts names and shapes. torchrl is not
imported. `tensordict` is imported when a batch is drawn.

    from storage.adapters.torchrl import ReplayBuffer
    buffer = ReplayBuffer(DictBuffer(100_000, device="cuda"), batch_size=256)
"""

from __future__ import annotations

from typing import Any

import torch

from ..core import arguments
from ..core.fields import flatten, unflatten
from ..core.records import listed
from ..errors import MissingFieldError, SchemaError, UsageError
from ..managed.advanced_buffer import AdvancedReplayBuffer
from ..prioritized.prioritized_windows import PrioritizedWindows
from ..replay.dict_buffer import DictBuffer
from .step_pairs import StepPairs

#: Names of rewards and flags, without parent levels.
#: All other fields that exist both in the root and below `next` are observations.
_OF_STEP = ("reward", "done", "terminated", "truncated")
#: Flags to set in a step after which the environment was reset without an end flag.
_CUT_NAMES = ("truncated", "done")
_NEXT = "next/"


class ReplayBuffer:
    """Wrapper of a `DictBuffer` with the methods of torchrl's `ReplayBuffer`.

    If the buffer has an `end_key`, `extend` takes steps in the form of torchrl's collectors, and
    `sample` returns transitions. Each observation is stored once. Batches have the reward and the
    flags below `next`, but not in the root. Without an `end_key`, rows are stored and returned
    unchanged.

    Args:
        buffer: Buffer that stores the rows. Its `end_key` is None or names "truncated".
        batch_size: Rows per sample, unless `sample` is called with another number.
        options: Options of `DictBuffer.sample_transitions` except `next_keys`.
    """

    def __init__(self, buffer: DictBuffer, batch_size: int | None = None, **options: Any) -> None:
        self.buffer: DictBuffer = arguments.instance("buffer", buffer, "a DictBuffer", DictBuffer)
        self.batch_size = batch_size
        self._options = options
        self._pairs: StepPairs | None = None
        #: Names of the observations, which are in the root and below `next`.
        self._observed: tuple[str, ...] = ()
        #: Names of the fields that are only below `next` in batches: rewards, flags and others.
        self._of_next: tuple[str, ...] = ()
        if buffer.end_key is not None:
            if "truncated" not in listed(buffer.end_key):
                raise UsageError(
                    f"the end_key of the buffer must name 'truncated', got {buffer.end_key!r}."
                )
            self._pairs = StepPairs(buffer, _CUT_NAMES)

    def __len__(self) -> int:
        """Return the number of rows in `buffer`.

        If the buffer has an `end_key`, it does not contain the newest step of each environment yet.
        """
        return len(self.buffer)

    def extend(self, data: Any) -> None:
        """Add rows.

        Args:
            data: `TensorDict` of the batch size `[n]`: n rows. If the buffer has an `end_key`, the
                batch size is `[num_envs]` for one step of each environment, and `[num_envs, T]` for
                T steps. With one environment, `[T]` also means T steps.

        Raises:
            MissingFieldError, SchemaError: A field is missing or has another size.
        """
        if self._pairs is None:
            self.buffer.extend(data)
            return
        columns = flatten(_time_first(data, self.buffer.num_envs))
        steps: dict[str, torch.Tensor] = {}
        following: dict[str, torch.Tensor] = {}
        of_next = []
        for name, column in columns.items():
            own_name = name.removeprefix(_NEXT)
            is_of_step = own_name.rpartition("/")[2] in _OF_STEP
            if not name.startswith(_NEXT):
                if not is_of_step:
                    steps[name] = column
            elif own_name in columns and not is_of_step:
                following[own_name] = column
            else:
                steps[own_name] = column
                of_next.append(own_name)
        if not following:
            raise MissingFieldError(
                "no observation: expected a field that is in the root and below 'next', got the "
                f"fields {list(columns)}."
            )
        if "truncated" not in steps:
            like = next(iter(following.values()))
            steps["truncated"] = like.new_zeros((*like.shape[:2], 1), dtype=torch.bool)
            of_next.append("truncated")
        self._observed = tuple(following)
        self._of_next = tuple(of_next)
        self._pairs.add(steps, following)

    def add(self, data: Any) -> None:
        """Add one row: a `TensorDict` without a batch size."""
        self.extend(data.unsqueeze(0))

    def sample(self, batch_size: int | None = None) -> Any:
        """Draw rows or transitions uniformly with replacement: a `TensorDict` of `[batch_size]`.

        Raises:
            UsageError, BufferEmptyError: There is no batch size, neither in this call nor in the
                constructor, or the buffer has nothing to draw.
        """
        size = _size(self, batch_size)
        if self._pairs is None:
            return _tensordict(self.buffer.sample(size), size)
        drawn = self.buffer.sample_transitions(size, next_keys=self._observed, **self._options)
        fields = flatten(drawn)
        for name in self._of_next:
            fields[_NEXT + name] = fields.pop(name)
        return _tensordict(unflatten(fields), size)

    def empty(self) -> None:
        """Remove all rows."""
        if self._pairs is None:
            self.buffer.clear()
        else:
            self._pairs.clear()


class PrioritizedReplayBuffer:
    """Wrapper of a prioritized buffer with the methods of `TensorDictPrioritizedReplayBuffer`.

    Args:
        buffer: Buffer that stores rows, or a `PrioritizedWindows`, which draws windows.
        batch_size: Rows or windows per sample, unless `sample` is called with another number.
        priority_key: Field of the priorities in `extend` and `update_tensordict_priority`.
    """

    def __init__(
        self,
        buffer: AdvancedReplayBuffer | PrioritizedWindows,
        batch_size: int | None = None,
        priority_key: str = "td_error",
    ) -> None:
        kinds = (AdvancedReplayBuffer, PrioritizedWindows)
        expected = "an AdvancedReplayBuffer or a PrioritizedWindows"
        self.buffer: AdvancedReplayBuffer | PrioritizedWindows = arguments.instance(
            "buffer", buffer, expected, *kinds
        )
        self.batch_size = batch_size
        self.priority_key = priority_key

    def __len__(self) -> int:
        """Return the number of rows or windows that may be drawn. Waits for the GPU, if any."""
        if isinstance(self.buffer, PrioritizedWindows):
            return len(self.buffer)
        return self.buffer.count()

    def extend(self, data: Any) -> torch.Tensor | None:
        """Add rows.

        Args:
            data: For a buffer of rows, a `TensorDict` of the batch size `[n]`. It may have
                priorities in the field `priority_key`. For windows, a `TensorDict` of the batch
                size `[num_envs, T]` with T consecutive steps.

        Returns:
            Ids of the rows, `[n]` int64; None for windows.
        """
        if isinstance(self.buffer, PrioritizedWindows):
            self.buffer.extend(_time_first(data, None))
            return None
        rows = {name: x for name, x in data.items() if name != self.priority_key}
        priorities = data.get(self.priority_key)
        if priorities is not None:
            priorities = priorities.flatten()
        return self.buffer.extend_tensors(rows, priorities)

    def add(self, data: Any) -> torch.Tensor | None:
        """Add one row: a `TensorDict` without a batch size."""
        return self.extend(data.unsqueeze(0))

    def sample(self, batch_size: int | None = None) -> Any:
        """Draw by priority: a `TensorDict` of `[batch_size]` with `index` and `priority_weight`.

        If windows of L steps are drawn, the fields are `[batch_size, L, ...]`.

        Raises:
            UsageError, BufferEmptyError: There is no batch size, neither in this call nor in the
                constructor, or the buffer has nothing to draw.
        """
        size = _size(self, batch_size)
        if isinstance(self.buffer, PrioritizedWindows):
            rows, weights, ids = self.buffer.sample(size)
        else:
            rows, weights, ids = self.buffer.sample_tensors(size)
        return _tensordict({**rows, "index": ids, "priority_weight": weights}, size)

    def update_tensordict_priority(self, data: Any) -> None:
        """Set the priorities of the rows or windows of a sample to its field `priority_key`."""
        self.update_priority(data["index"], data[self.priority_key])

    def update_priority(self, index: torch.Tensor, priority: torch.Tensor) -> None:
        """Set the priorities, finite numbers >= 0, of the rows or windows with the ids `index`."""
        self.buffer.update_priorities(index, priority.flatten())

    def empty(self) -> None:
        """Remove all rows."""
        self.buffer.clear()


def _time_first(data: Any, num_envs: int | None) -> Any:
    """Return a view of steps with the batch size `[T, num_envs]`.

    Args:
        data: `TensorDict` of the batch size `[num_envs, T]` or `[num_envs]`, or `[T]` with one
            environment.
        num_envs: Number of environments; None for any.
    """
    size = list(data.batch_size)
    if len(size) == 2 and num_envs in (None, size[0]):
        return data.transpose(0, 1)
    if len(size) == 1 and num_envs == 1:
        return data.unsqueeze(1)
    if len(size) == 1 and num_envs in (None, size[0]):
        return data.unsqueeze(0)
    names = "num_envs" if num_envs is None else num_envs
    raise SchemaError(f"the batch size is {size}, expected [{names}] or [{names}, T].")


def _size(buffer: Any, batch_size: int | None) -> int:
    """Return the batch size of a call, by default the `batch_size` of the constructor."""
    size = buffer.batch_size if batch_size is None else batch_size
    return arguments.whole("batch_size", size, 1)


def _tensordict(tree: dict[str, Any], size: int) -> Any:
    from tensordict import TensorDict

    return TensorDict(tree, batch_size=[size])
