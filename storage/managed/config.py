"""The buffers that a manager's configuration describes.

One rule: a configuration is checked whole; kinds of buffers are looked up in `KINDS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import UsageError, nearest
from .advanced import AdvancedReplayBuffer
from .buffer import ManagedBuffer
from .episodes import EpisodeReplayBuffer
from .naive import NaiveReplayBuffer

KINDS: dict[str, type[ManagedBuffer]] = {
    "advanced": AdvancedReplayBuffer,
    "naive": NaiveReplayBuffer,
    "episode": EpisodeReplayBuffer,
}
#: Names in a configuration that are not those of buffers.
_RESERVED = ("buffer_name", "sample_ratio")


def make_buffers(cfg: Any, device: torch.device) -> dict[str, ManagedBuffer]:
    """Make the buffers of a configuration, by name; see `BufferManager`."""
    action = "make a buffer manager"
    names = cfg.get("buffer_name") if isinstance(cfg, Mapping) else None
    if isinstance(names, str) or not isinstance(names, Sequence) or not names:
        raise UsageError(action, "", "a mapping with 'buffer_name', a list of names", repr(names))
    made: dict[str, ManagedBuffer] = {}
    for name in names:
        if not isinstance(name, str) or not name or name in made or name in _RESERVED:
            expected = f"names that are different non-empty str and not one of {', '.join(_RESERVED)}"
            raise UsageError(action, "", expected, repr(name))
        options = cfg.get(name)
        if not isinstance(options, Mapping):
            raise UsageError(action, "", f"the arguments of {name!r} under its name", repr(options))
        options = {"device": device, **options}
        kind = options.pop("type", "advanced")
        if kind not in KINDS:
            raise UsageError(action, f"with {name!r}", f"type {nearest(str(kind), KINDS)}", repr(kind))
        try:
            made[name] = KINDS[kind](**options, name=name)
        except TypeError as cause:
            raise UsageError(action, f"with {name!r}", f"arguments of {KINDS[kind].__name__}", str(cause)) from cause
    unknown = sorted(set(map(str, cfg)) - set(made) - set(_RESERVED))
    if unknown:
        raise UsageError(action, "", nearest(unknown[0], [*made, *_RESERVED]), repr(unknown[0]))
    return made


def arguments_of(cfg: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Give the arguments that a buffer was made with from those in a manager's configuration."""
    return {**{key: value for key, value in cfg.items() if key != "type"}, "name": name}


def part_of_state(
    numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], place: int, name: str
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Cut one buffer's state out of a manager's."""
    prefix = f"buffer/{place}/"
    return numbers["buffers"][name], {
        key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)
    }
