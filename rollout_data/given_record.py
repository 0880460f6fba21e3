"""The kinds of records that a writer takes, as mappings: dicts, named tuples, dataclasses, objects, batches.

One rule: a batch of a dataset gives what was recorded, without what only its reader added. Names and values are
checked elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from storage.errors import SchemaError, UsageError
from storage.host_arrays import as_given

from .transition import Transition


def items_of(transition: Any) -> dict[str, Any]:
    """Give the values of a record by the names that it has for them.

    Raises:
        UsageError: It is no record, or a batch with marks that cannot be told from ends.
        SchemaError: A batch with flags of different sizes.
    """
    if transition is None:
        return {}
    if isinstance(transition, Mapping):
        return dict(transition)
    if isinstance(transition, Transition):
        values = {**transition._asdict(), "done": _recorded_done(transition)}
        del values["stream_id"], values["is_last"]
        return {**(values.pop("extras") or {}), **values}
    if hasattr(transition, "_asdict"):
        return dict(transition._asdict())
    if is_dataclass(transition):
        return {field.name: getattr(transition, field.name) for field in fields(transition)}
    if hasattr(transition, "__dict__"):
        return {name: value for name, value in vars(transition).items() if not name.startswith("_")}
    raise UsageError("add a record", "", "a mapping, named tuple or object with fields", type(transition).__name__)


def _recorded_done(batch: Transition) -> Any:
    """Give `done` of a batch as it was recorded: without the marks of first frames that are not the last as well.

    Raises:
        UsageError: A first frame is done, and the batch does not tell whether it is marked or ended.
        SchemaError: A flag of another size than `done`.
    """
    if batch.done is None or batch.is_first is None:
        return batch.done
    done = as_given(batch.done)

    def flag(name: str) -> torch.Tensor:
        tensor = as_given(getattr(batch, name))
        if tensor.numel() != done.numel():
            expected = f"shape {tuple(done.shape)} as of 'done'"
            raise SchemaError("add a record", f"with the flag {name!r}", expected, str(tuple(tensor.shape)))
        return tensor.to(done.device, torch.bool).reshape(done.shape)

    if batch.is_last is not None:
        return done.masked_fill(flag("is_first") & ~flag("is_last"), 0)
    # Only an end is a timeout, and what is not valid is no frame.
    is_unclear = done.bool() & flag("is_first")
    for name, is_told in (("timeout", False), ("valid", True)):
        if getattr(batch, name) is not None:
            is_unclear &= flag(name) == is_told
    if is_unclear.any():
        advice = "Give it with batch._replace(is_last=...): batch.done, where no first frame is marked"
        where = "with is_first where done is true"
        raise UsageError("add a record", where, "is_last, which tells marked frames from ended ones", "None", advice)
    return done
