"""Restricted pickle: say what a pickle of numpy arrays holds, and where, without running any of it.

One rule: nothing is ever called. A small machine walks the pickle's operations, every global is
looked up in one table of names, and an array becomes a `StoredArray`: dtype, shape and place in
the file. So a hostile file can neither run code nor allocate: a declared size is compared with
the bytes that are there before anything is read, and `MAX_OPERATIONS` bounds stack, memo and
nesting. The table is in `pickled_arrays.py`; what the arrays mean is `trajectory_chunk.py`'s subject.

The operations are those of protocols 0 to 5 (https://github.com/python/cpython/blob/main/Lib/pickletools.py).
"""

from __future__ import annotations

import os
import pickletools
import re
import struct
from collections.abc import Callable
from io import BufferedIOBase
from pathlib import Path
from typing import Any, NoReturn

from storage.errors import ForeignFileError

from .pickled_arrays import (
    GLOBALS,
    Global,
    PickledArray,
    Span,
    corrupt_pickle,
    kind,
    pairs,
    set_state,
    unsafe_pickle,
)

#: A chunk of arrays needs some hundred operations; more is another kind of data, or an attack.
MAX_OPERATIONS = 100_000
MAX_TEXT_BYTES = 1 << 16
MAX_PROTOCOL = 5
_KNOWN = {operation.code: operation for operation in pickletools.opcodes}
_NAME = re.compile(r"[A-Za-z_][\w.<>]*", re.ASCII)


def describe_pickle(file: BufferedIOBase, path: Path) -> dict[str, Any]:
    """Say what a pickled dict holds: arrays as `StoredArray` (also inside one tuple or list), the rest as it is.

    Args:
        file: Open for reading, seekable.
        path: Names it in errors.

    Raises:
        UnsafeFileError: It asks for a global that is not in the table, or for a call beyond arrays.
        CorruptFileError: Truncated, damaged or contradicting itself.
        ForeignFileError: Not a dict, or of a newer pickle protocol.
    """
    machine = _Machine(file, path)
    try:
        content = machine.run()
        if type(content) is not dict:
            raise ForeignFileError("read the pickle", repr(str(path)), "a dict of arrays", kind(content))
        return {name: _described(value) for name, value in content.items()}
    except (IndexError, KeyError, TypeError, ValueError, OverflowError, struct.error) as cause:
        raise corrupt_pickle(path, "an intact pickle", f"{type(cause).__name__}: {cause}"[:200]) from cause


def _described(value: Any) -> Any:
    if isinstance(value, PickledArray):
        if value.stored is None:
            raise ValueError("an array without a state")
        return value.stored
    if type(value) in (tuple, list) and len(value) == 1 and isinstance(value[0], PickledArray):
        return (_described(value[0]),)
    return value


class _Machine:
    """The state of an unpickler: a stack, marks and a memo, all bounded by `MAX_OPERATIONS`."""

    def __init__(self, file: BufferedIOBase, path: Path) -> None:
        self.file, self.path = file, path
        self.file_bytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.budget = MAX_OPERATIONS

    def run(self) -> Any:
        read, operations = self.file.read, _OPERATIONS
        while (code := read(1)) != b".":
            self.budget -= 1
            if self.budget < 0 or code not in operations:
                self._refuse_operation(code)
            operations[code](self)
        if trailing := self.file_bytes - self.file.tell():
            raise corrupt_pickle(self.path, "nothing behind the end of the pickle", f"{trailing} bytes")
        return self.stack.pop()

    def take(self, count: int) -> bytes:
        data = self.file.read(count)
        if len(data) < count:
            raise corrupt_pickle(self.path, f"{count} more bytes", f"the end of the file at {self.file_bytes}", True)
        return data

    def byte(self) -> int:
        return self.take(1)[0]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self, count: int) -> str:
        if count > MAX_TEXT_BYTES:
            raise corrupt_pickle(self.path, f"a text of at most {MAX_TEXT_BYTES} bytes", f"{count}")
        return self.take(count).decode("utf-8", "surrogatepass")

    def line(self) -> str:
        line = self.file.readline(MAX_TEXT_BYTES)
        if not line.endswith(b"\n"):
            raise corrupt_pickle(self.path, "a line", f"no end of it at {self.file.tell()}", len(line) < MAX_TEXT_BYTES)
        return line[:-1].decode("ascii")

    def skip(self, count: int) -> Span:
        offset = self.file.tell()
        if not 0 <= count <= self.file_bytes - offset:
            raise corrupt_pickle(
                self.path, f"{count} bytes at {offset}", f"{self.file_bytes - offset} up to the end", True
            )
        self.file.seek(count, os.SEEK_CUR)
        return Span(offset, count)

    def pop_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marks.pop()
        return items

    def find(self, module: str, name: str) -> Global:
        """Look a global up in the table; never in the interpreter."""
        full = f"{module}.{name}"
        if not _NAME.fullmatch(full):
            raise corrupt_pickle(self.path, "the name of a global", repr(full[:80]))
        if (module, name) not in GLOBALS:
            raise unsafe_pickle(self.path, f"the global {full[:200]!r}")
        return GLOBALS[module, name]

    def refuse_size(self) -> NoReturn:
        raise unsafe_pickle(self.path, "more", f"at most {MAX_OPERATIONS} operations")

    def _refuse_operation(self, code: bytes) -> NoReturn:
        if self.budget < 0:
            self.refuse_size()
        known = _KNOWN.get(code.decode("latin-1"))
        if known is None:
            at = self.file.tell() - len(code)
            got = repr(code) if code else "the end of the file"
            raise corrupt_pickle(self.path, f"a pickle operation at {at}", got, not code)
        if code == b"i":
            self.find(self.line(), self.line())
        if code == b"P":
            self.line()
        if code in b"oQ\x81\x92":
            self.stack.pop()
        raise unsafe_pickle(self.path, f"the operation {known.name}")


# The operations: how each changes the machine.


def _put(key: Callable[[_Machine], int]) -> Callable[[_Machine], None]:
    def operation(m: _Machine) -> None:
        m.memo[key(m)] = m.stack[-1]

    return operation


def _memoize(m: _Machine) -> None:
    m.memo[len(m.memo)] = m.stack[-1]


def _push(value: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    def operation(m: _Machine) -> None:
        pushed = value(m)  # first, because it may exchange the stack
        m.stack.append(pushed)

    return operation


def _tuple_of(count: int) -> Callable[[_Machine], None]:
    def operation(m: _Machine) -> None:
        if len(m.stack) < count:
            raise IndexError("stack underflow")
        m.stack[-count:] = [tuple(m.stack[-count:])]

    return operation


def _mark(m: _Machine) -> None:
    m.marks.append(m.stack)
    m.stack = []


def _extend(m: _Machine, items: list[Any]) -> None:
    target = m.stack[-1]
    if type(target) is not list:
        raise TypeError(f"items for {kind(target)}")
    target.extend(items)


def _set_items(m: _Machine, items: list[Any]) -> None:
    target = m.stack[-1]
    if type(target) is not dict:
        raise TypeError(f"keys for {kind(target)}")
    target.update(pairs(list(zip(items[::2], items[1::2], strict=True))))


def _dict_of_mark(m: _Machine) -> dict[str, Any]:
    items = m.pop_mark()
    return pairs(list(zip(items[::2], items[1::2], strict=True)))


def _set_item(m: _Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    _set_items(m, [key, value])


def _stack_global(m: _Machine) -> Global:
    name, module = m.stack.pop(), m.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise TypeError("a global is named by two texts")
    return m.find(module, name)


def _integer_line(m: _Machine) -> int | bool:
    text = m.line()
    if len(text) > 32:
        raise ValueError("an integer of more than 32 digits")
    return bool(int(text)) if text in ("00", "01") else int(text.rstrip("L"))


def _long(m: _Machine, count: int) -> int:
    if not 0 <= count <= 16:
        raise ValueError(f"an integer of {count} bytes")
    return int.from_bytes(m.take(count), "little", signed=True)


def _protocol(m: _Machine) -> None:
    version = m.byte()
    if version > MAX_PROTOCOL:
        raise ForeignFileError("read the pickle", repr(str(m.path)), f"a protocol up to {MAX_PROTOCOL}", str(version))


def _reduce(m: _Machine) -> None:
    arguments, function = m.stack.pop(), m.stack.pop()
    if not isinstance(function, Global) or type(arguments) is not tuple:
        raise unsafe_pickle(m.path, f"a call of {kind(function)}")
    m.budget -= sum(len(argument) for argument in arguments if type(argument) in (list, tuple, dict))
    if m.budget < 0:
        m.refuse_size()
    m.stack.append(function.call(m.path, arguments))


def _build(m: _Machine) -> None:
    state = m.stack.pop()
    set_state(m.path, m.stack[-1], state)


def _frame(m: _Machine) -> None:
    """Check that a frame fits into the file; its content follows."""
    m.file.seek(m.skip(m.number("<Q")).offset)


_OPERATIONS: dict[bytes, Callable[[_Machine], None]] = {
    b"\x80": _protocol,
    b"\x95": _frame,
    b"(": _mark,
    b"N": _push(lambda m: None),
    b"\x88": _push(lambda m: True),
    b"\x89": _push(lambda m: False),
    b"I": _push(_integer_line),
    b"L": _push(_integer_line),
    b"K": _push(lambda m: m.byte()),
    b"M": _push(lambda m: m.number("<H")),
    b"J": _push(lambda m: m.number("<i")),
    b"\x8a": _push(lambda m: _long(m, m.byte())),
    b"\x8b": _push(lambda m: _long(m, m.number("<i"))),
    b"F": _push(lambda m: float(m.line())),
    b"G": _push(lambda m: m.number(">d")),
    b"V": _push(lambda m: m.line()),
    b"S": _push(lambda m: m.line().strip("'\"")),
    b"X": _push(lambda m: m.text(m.number("<I"))),
    b"\x8c": _push(lambda m: m.text(m.byte())),
    b"\x8d": _push(lambda m: m.text(m.number("<Q"))),
    b"U": _push(lambda m: m.skip(m.byte())),
    b"T": _push(lambda m: m.skip(m.number("<i"))),
    b"C": _push(lambda m: m.skip(m.byte())),
    b"B": _push(lambda m: m.skip(m.number("<I"))),
    b"\x8e": _push(lambda m: m.skip(m.number("<Q"))),
    b"\x96": _push(lambda m: m.skip(m.number("<Q"))),
    b"]": _push(lambda m: []),
    b"l": _push(lambda m: m.pop_mark()),
    b"a": lambda m: _extend(m, [m.stack.pop()]),
    b"e": lambda m: _extend(m, m.pop_mark()),
    b")": _push(lambda m: ()),
    b"t": _push(lambda m: tuple(m.pop_mark())),
    b"\x85": _tuple_of(1),
    b"\x86": _tuple_of(2),
    b"\x87": _tuple_of(3),
    b"}": _push(lambda m: {}),
    b"d": _push(_dict_of_mark),
    b"s": _set_item,
    b"u": lambda m: _set_items(m, m.pop_mark()),
    b"p": _put(lambda m: int(_integer_line(m))),
    b"q": _put(lambda m: m.byte()),
    b"r": _put(lambda m: m.number("<I")),
    b"\x94": _memoize,
    b"g": _push(lambda m: m.memo[_integer_line(m)]),
    b"h": _push(lambda m: m.memo[m.byte()]),
    b"j": _push(lambda m: m.memo[m.number("<I")]),
    b"c": _push(lambda m: m.find(m.line(), m.line())),
    b"\x93": _push(_stack_global),
    b"R": _reduce,
    b"b": _build,
}
