"""Arrow files, mapped: ranges of rows, by the interface of `ParquetFile`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from storage.errors import CorruptFileError

from ..guards import damage_named, optional


class ArrowFile:
    """One Arrow file; opened for each read.

    Attributes:
        path: The file.
        num_rows: Rows in it.
        types: Column -> its arrow type, in order.

    Raises:
        CorruptFileError: It is damaged.
        UsageError: pyarrow is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._opened() as file:
            self.types: dict[str, Any] = dict(zip(file.schema.names, file.schema.types, strict=True))
            self.num_rows = sum(self._batch(file, number).num_rows for number in range(file.num_record_batches))

    def batches(self, columns: Mapping[str, int | None], start: int, stop: int) -> Iterator[dict[str, Any]]:
        """Give rows `start:stop` of some columns, as they lie in the file: column -> an arrow array."""
        position = 0
        with self._opened() as file:
            for number in range(file.num_record_batches):
                batch = self._batch(file, number)
                first, last = max(start - position, 0), min(stop - position, batch.num_rows)
                if first < last:
                    yield {name: batch.column(name).slice(first, last - first) for name in columns}
                position += batch.num_rows

    def _batch(self, file: Any, number: int) -> Any:
        batch = file.get_batch(number)
        batch.validate()  # its arrays lie within the file
        if batch.nbytes > self.path.stat().st_size:
            got = f"{batch.nbytes} bytes"
            raise CorruptFileError("read", repr(str(self.path)), "an uncompressed file that holds its data", got)
        return batch

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        pyarrow, ipc = (optional(name, "pyarrow", "formats", "Arrow files") for name in ("pyarrow", "pyarrow.ipc"))
        damage = (pyarrow.ArrowException, OSError, ValueError, LookupError, TypeError, NotImplementedError)
        with (
            damage_named("read", repr(str(self.path)), "an intact Arrow file", *damage),
            pyarrow.memory_map(str(self.path)) as mapped,
            ipc.open_file(mapped) as file,
        ):
            yield file
