"""Transition: a batch of a streamed dataset."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from storage.core.object_summary import described

#: A tensor, or a (nested) dict of tensors by component.
Observation = torch.Tensor | dict[str, Any]


class Transition(NamedTuple):
    """A batch of transitions, `[T, num_envs, ...]`, or `[num_envs, ...]` without T.

    All tensors are on the dataset's device and belong to the caller: they are never overwritten.
    Fields that were not recorded are None. `observation` and `next_observation` may share memory
    with each other (the following frame is the next one's own observation), and so may fields of
    one frame: clone before writing into one of them.

    `RolloutWriter.add` and `add_rollout` record a batch again. What it does not hold is lost:
    policy versions, and whether an end was a limit or a cut (both come back as truncated). True
    final observations stand among the next ones, where nothing tells them from a following frame:
    where all ends have one, give `final_observation=batch.next_observation` besides. After a reset
    of some envs discard what the writer has of them.

    Attributes:
        observation: Components joined along the last axis in `obs_segments` order, or a dict.
        privileged_observation: What only critics and teachers see, in the same form.
        action: As recorded: a tensor, or a dict of those that were recorded under names.
        reward: As recorded: `[..., R]`, or without the last axis if it was recorded so; or a dict.
        done: bool. The last frame of a trajectory; also the first frame delivered of one, by
            which recurrent learners reset (unless `mark_first_frame=False`).
        timeout: bool. The trajectory ended here by a limit, or its recording was cut here.
        next_observation: The frame after this one; at the end of a trajectory its true final
            observation if one was recorded, otherwise the next frame of the stream.
        next_privileged_observation: Likewise.
        is_first: bool. The first frame delivered of a trajectory.
        valid: bool. False where an env had nothing left and repeats its last transition.
        stream_id: The rank whose envs these are.
        extras: Further recorded fields by name, or None if there are none.
        is_last: bool. The last frame of a trajectory, whatever `mark_first_frame` says; None if the
            reader does not tell, as readers of your own need not.
        end_unknown: bool. The last frame of a trajectory whose file does not tell how it ended, as
            files of other systems may: `done` is true there and `timeout` false. None where all
            ends are known.
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
        """Return a plain dict of what was recorded and of the flags: no None, extras beside the other fields."""
        named = {name: value for name, value in self._asdict().items() if value is not None}
        del named["stream_id"]
        return {**named.pop("extras", {}), **named}
