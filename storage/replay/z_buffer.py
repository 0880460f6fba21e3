"""`ZBuffer`: the last latent vectors, drawn uniformly.

One rule: it is a ring with one field; whatever is added is detached and cast.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch

from ..core import arguments
from ..core.devices import StreamOrder
from ..core.fields import DTYPES, Field, Schema, dtype_name
from ..core.records import as_tensor
from ..core.samplers import generator_on, uniform
from ..errors import BufferEmptyError, SchemaError
from ..ring.ring import RingStore
from ..saving.buffer_store import BufferStore, rows_written
from ..saving.columns import Table
from ..saving.folder import ROWS
from ..saving.store import State

_NAME = "z"


class ZBuffer(BufferStore):
    """The last `capacity` vectors.

    Args:
        capacity: Vectors that are kept.
        dim: Size of one.
        device: Where they are kept.
        dtype: How they are kept.
        generator: As for `DictBuffer`.
    """

    _REQUIRED = ("capacity", "dim", "dtype", "total")

    def __init__(
        self,
        capacity: int,
        dim: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        generator: torch.Generator | int | None = None,
    ) -> None:
        self.capacity = arguments.whole("create a z buffer", "capacity", capacity, 1)
        self.dim = arguments.whole("create a z buffer", "dim", dim, 1)
        self.dtype = dtype
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
        num = arguments.whole("sample vectors", "num", num, 1)
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

    @classmethod
    def _from_arguments(cls, arguments: Mapping[str, Any], device: torch.device) -> Any:
        dtype = DTYPES[arguments["dtype"]][0]
        return cls(arguments["capacity"], arguments["dim"], device, dtype, generator=0)

    @classmethod
    def _of_flat(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return {name: config[name] for name in ("capacity", "dim", "dtype")}

    def _get_state(self) -> State:
        self._order.wait(is_write=False)
        arguments = {"capacity": self.capacity, "dim": self.dim, "dtype": dtype_name(self.dtype)}
        numbers = {"total": self._ring.total, "_idx": self._ring.cursor, "_is_full": len(self) == self.capacity}
        rows = self._ring.slots_view(_NAME)[: len(self), 0]
        return State(arguments, numbers, {f"{ROWS}/{_NAME}": rows})

    def _set_tables(self, numbers: Mapping[str, Any], tables: Mapping[str, Table]) -> None:
        table = tables[ROWS]
        total = rows_written(numbers, table.num_rows, self.capacity, 1)
        if table.schema(1) != self._ring.schema:
            raise SchemaError("load vectors", expected=repr(self._ring.schema), got=repr(table.schema(1)))
        ring = RingStore(self.capacity, 1, self._ring.schema, self.device, num_guards=0)
        for first, part in table.rows():
            ring.put_slots(first, {_NAME: part[_NAME].unsqueeze(1)})
        ring.total, self._ring = total, ring

    def _of_earlier(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return super()._of_earlier({**state, "columns": {_NAME: state[_NAME]}})
