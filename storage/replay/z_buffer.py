"""`ZBuffer`: the last latent vectors, drawn uniformly.

One rule: it is a ring with one field; whatever is added is detached and cast.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..core import arguments
from ..core.fields import DTYPES, Field, Schema, dtype_name
from ..core.records import as_tensor
from ..core.samplers import uniform
from ..errors import SchemaError
from ..saving.columns import Table
from .ring_buffer import RingBuffer

_NAME = "z"


class ZBuffer(RingBuffer):
    """The last `capacity` vectors.

    Args:
        capacity: Vectors that are kept.
        dim: Size of one.
        device: Where they are kept.
        dtype: How they are kept.
        generator: As for `DictBuffer`.
    """

    _ARGUMENTS = ("capacity", "dim", "dtype")
    _WRITER = "add"

    def __init__(
        self,
        capacity: int,
        dim: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        generator: torch.Generator | int | None = None,
    ) -> None:
        self.dim = arguments.whole("create a z buffer", "dim", dim, 1)
        self.dtype = dtype
        super().__init__(capacity=capacity, device=device, generator=generator)
        self._vectors = self._create(Schema([Field(_NAME, (dim,), dtype_name(dtype))]), 1)

    @torch.no_grad()
    def add(self, z: Any) -> None:
        """Append `[n, dim]` of any n; of more than fit the newest are kept."""
        values = (z if isinstance(z, torch.Tensor) else as_tensor(z, "add vectors", "")).detach()
        if values.dim() != 2 or values.shape[1] != self.dim or values.is_complex():
            raise SchemaError("add vectors", "", f"shape [n, {self.dim}]", f"{values.dtype} {list(values.shape)}")
        with self._lock:
            self._order.wait(is_write=True)
            self._vectors.write([values.unsqueeze(1)])
            self._order.record(is_write=True)

    @torch.no_grad()
    def sample(self, num: int, device: torch.device | str | None = None) -> torch.Tensor:
        """Draw `[num, dim]` uniformly with replacement, on `device` or the buffer's own."""
        num = arguments.whole("sample vectors", "num", num, 1)
        with self._lock:
            ring = self._filled("sample vectors")
            self._order.wait(is_write=False)
            found: torch.Tensor = ring.gather(uniform(len(self), num, self.generator), contiguous=True)[_NAME]
            self._order.record(is_write=False)
        return found if device is None else found.to(device)

    def _arguments(self) -> dict[str, Any]:
        return {"capacity": self.capacity, "dim": self.dim, "dtype": dtype_name(self.dtype)}

    @classmethod
    def _from_arguments(cls, arguments: Mapping[str, Any], device: torch.device) -> Any:
        return cls(**{**arguments, "dtype": DTYPES[arguments["dtype"]][0]}, device=device, generator=0)

    def _set_tables(self, numbers: Mapping[str, Any], tables: Mapping[str, Table]) -> None:
        schema = self._vectors.schema
        super()._set_tables(numbers, tables)
        if self._ring is None or self._ring.schema != schema:
            got = "none" if self._ring is None else repr(self._ring.schema)
            raise SchemaError("load vectors", expected=repr(schema), got=got)
        self._vectors = self._ring

    def _of_earlier(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return super()._of_earlier({**state, "columns": {_NAME: state[_NAME].unsqueeze(1)}})
