"""`ZBuffer`: the last latent vectors, drawn uniformly.

One rule: it is a ring with one field; whatever is added is detached and cast.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from ..core.durable import existing_folder
from ..core.fields import DTYPES, Field, Schema, dtype_name
from ..core.modes import lasting
from ..core.records import as_tensor, is_count
from ..core.samplers import generator_on, uniform
from ..core.stream_order import StreamOrder
from ..errors import BufferEmptyError, CorruptFileError, SchemaError, UsageError
from ..ring.ring import RingStore
from ..saving.column_files import COLUMNS_NAME, SAVE_ID, device_for, open_columns
from .buffer_files import FolderBuffer, all_or_nothing, can_load, restore_generator, save_buffer

_Self = TypeVar("_Self", bound="ZBuffer")
_NAME = "z"


@can_load
class ZBuffer(FolderBuffer):
    """The last `capacity` vectors.

    Args:
        capacity: Vectors that are kept.
        dim: Size of one.
        device: Where they are kept.
        dtype: How they are kept.
        generator: As for `DictBuffer`.
    """

    def __init__(
        self,
        capacity: int,
        dim: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        generator: torch.Generator | int | None = None,
    ) -> None:
        for name, value in (("capacity", capacity), ("dim", dim)):
            if not is_count(value):
                raise UsageError("create a z buffer", "", f"{name} >= 1", repr(value))
        self.capacity, self.dim, self.dtype = int(capacity), int(dim), dtype
        self.device = torch.device(device)
        self.generator = generator_on(generator, self.device)
        schema = Schema([Field(_NAME, (dim,), dtype_name(dtype))])
        self._ring = RingStore(capacity, 1, schema, self.device, num_guards=0)
        self._lock = threading.RLock()
        self._order = StreamOrder(self.device)

    def __len__(self) -> int:
        """Vectors that are held."""
        return self._ring.num_live

    @torch.no_grad()
    def add(self, z: Any) -> None:
        """Append `[n, dim]` of any n; of more than fit the newest are kept."""
        values = (z if isinstance(z, torch.Tensor) else as_tensor(z, "add vectors", "")).detach()
        if values.dim() != 2 or values.shape[1] != self.dim or values.is_complex():
            raise SchemaError("add vectors", "", f"shape [n, {self.dim}]", f"{values.dtype} {list(values.shape)}")
        with self._lock:
            self._order.wait(is_write=True)
            self._ring.write([values.unsqueeze(1)])
            self._order.record(is_write=True)

    @torch.no_grad()
    def sample(self, num: int, device: torch.device | str | None = None) -> torch.Tensor:
        """Draw `[num, dim]` uniformly with replacement, on `device` or the buffer's own."""
        if not is_count(num):
            raise UsageError("sample vectors", "", "num >= 1", repr(num))
        with self._lock:
            if self.empty():
                raise BufferEmptyError("sample vectors", "", "vectors", "none", "Call add() first")
            self._order.wait(is_write=False)
            places = uniform(len(self), num, self.generator)
            found: torch.Tensor = self._ring.gather(places, contiguous=True)[_NAME]
            self._order.record(is_write=False)
        return found if device is None else found.to(device)

    def clear(self) -> None:
        """Forget every vector."""
        with self._lock:
            self._ring.clear()

    def state_dict(self) -> dict[str, Any]:
        """Copy everything."""
        with self._lock:
            rows = self._ring.copy_slots(0, len(self))[_NAME].squeeze(1)
            return {**self._config(), "generator": self.generator.get_state().clone(), _NAME: rows}

    @lasting
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` of an equal buffer gave; nothing is changed if it does not fit.

        Raises:
            SchemaError: It does not fit.
        """
        with self._lock, all_or_nothing(self):
            for key in ("capacity", "dim", "dtype"):
                if state[key] != self._config()[key]:
                    raise SchemaError("load a state", "", f"{key}={self._config()[key]!r}", repr(state[key]))
            rows, total = state[_NAME], int(state["total"])
            if tuple(rows.shape) != (min(total, self.capacity), self.dim) or rows.dtype is not self.dtype:
                expected = f"{self.dtype} of shape {[min(total, self.capacity), self.dim]}"
                raise SchemaError("load a state", f"with {_NAME!r}", expected, f"{rows.dtype} {list(rows.shape)}")
            self.generator.set_state(state["generator"].cpu())
            self._ring.put_slots(0, {_NAME: rows.unsqueeze(1)})
            self._ring.total = total

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write everything to a folder, atomically; one that exists is replaced."""
        with self._lock:
            save_buffer(self, folder, self._config(), self._ring)

    @classmethod
    def _of_save(
        cls: type[_Self], path: str | os.PathLike[str], config: dict[str, Any], device: torch.device | str | None
    ) -> _Self:
        for key in ("capacity", "dim", "dtype", "total"):
            if key not in config:
                raise CorruptFileError("load", repr(str(path)), f"{key!r} in its config.json", "none")
        capacity, dim = config["capacity"], config["dim"]
        with open_columns(existing_folder(path) / COLUMNS_NAME, "-", config.get(SAVE_ID)) as file:
            if list(file.shapes.items()) != [(_NAME, (min(config["total"], capacity), dim))]:
                expected = f"{min(config['total'], capacity)} vectors of {dim} numbers"
                raise SchemaError("load", repr(str(path)), expected, str(file.shapes))
            place = device_for(config.get("device"), device)
            made = cls(capacity, dim, place, DTYPES[config["dtype"]][0])
            for first, rows in file.chunks(_NAME):
                made._ring.put_slots(first, {_NAME: rows.unsqueeze(1)})
        made._ring.total = int(config["total"])
        restore_generator(made.generator, config.get("generator", ""))
        return made

    def _recipe(self) -> dict[str, Any]:
        return {"capacity": self.capacity, "dim": self.dim, "device": self.device, "dtype": self.dtype}

    @classmethod
    def _from_recipe(cls, recipe: Mapping[str, Any]) -> Any:
        return cls(**recipe, generator=0)  # the random state comes next

    def _config(self) -> dict[str, Any]:
        sizes = {"capacity": self.capacity, "dim": self.dim, "dtype": dtype_name(self.dtype)}
        return {**sizes, "total": self._ring.total, "_idx": self._ring.cursor, "_is_full": len(self) == self.capacity}
