"""Transition: a batch of a streamed dataset."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from storage.core.object_summary import described

#: A tensor, or a (nested) dict of tensors by component.
Observation = torch.Tensor | dict[str, Any]


class Transition(NamedTuple):
    """A batch of transitions, `[T, num_envs, ...]`, or `[num_envs, ...]` without T.

    All tensors are on the dataset's device and belong to the caller: later batches do not overwrite
    them. Fields that were not recorded are None. `observation` and `next_observation` may share
    memory, and so may the fields of one frame. Clone a tensor before writing into it.

    `RolloutWriter.add` and `add_rollout` can record a batch again. A batch lacks two facts of the
    recording: policy versions, and whether a trajectory was truncated or its recording was cut.
    Both ends are recorded as truncated. A recorded final observation looks like a following frame.
    If all ends have one, pass `final_observation=batch.next_observation` too. After a reset of some
    envs, discard their unfinished trajectories in the writer.

    Attributes:
        observation: Components joined along the last axis in `obs_segments` order, or a dict.
        privileged_observation: Observation for critics and teachers, in the same form.
        action: A tensor, or a dict if actions were recorded by name.
        reward: `[..., R]`, or without the last axis if it was recorded so; or a dict.
        done: Whether the frame is the last of its trajectory, bool. It is also True on the first
            delivered frame of a trajectory, where recurrent learners reset, unless
            `mark_first_frame=False`.
        timeout: Whether the trajectory was truncated after this frame, or its recording was cut,
            bool.
        next_observation: Observation of the following frame. At the end of a trajectory: its final
            observation if one was recorded, else the next frame of the stream.
        next_privileged_observation: The same for `privileged_observation`.
        is_first: Whether the frame is the first delivered frame of its trajectory, bool.
        valid: Whether the env still has frames, bool. An exhausted env repeats its last transition.
        stream_id: Rank of the process that reads these envs.
        extras: Further recorded fields by name; None without such fields.
        is_last: Whether the frame is the last of its trajectory, bool, independent of
            `mark_first_frame`. None if a custom reader does not set it.
        end_unknown: Whether the frame is the last of a trajectory whose file does not state how it
            ended, bool. `done` is True and `timeout` False there. None if all ends are known.
    """

    observation: Observation
    privileged_observation: Observation | None
    action: Observation | None
    reward: Observation | None
    done: torch.Tensor
    timeout: torch.Tensor
    next_observation: Observation
    next_privileged_observation: Observation | None
    is_first: torch.Tensor
    valid: torch.Tensor
    stream_id: int = 0
    extras: dict[str, Any] | None = None
    is_last: torch.Tensor | None = None

    def __repr__(self) -> str:
        return described(self)

    end_unknown: torch.Tensor | None = None

    def tensors(self) -> dict[str, Any]:
        """Return the recorded fields, the extras and the flags as a plain dict without None."""
        named = {name: value for name, value in self._asdict().items() if value is not None}
        del named["stream_id"]
        return {**named.pop("extras", {}), **named}
