"""Say what a pickle of numpy arrays holds, and where, without running any of it.

One rule: nothing is called. A small machine walks the operations of the pickle, looks every global up in the table of
`pickled_arrays.py`, and describes an array as a `StoredArray`: dtype, shape and place in the file. So a hostile file
can neither run code nor allocate: a declared size is compared with the bytes that are there before anything is read,
and `MAX_OPERATIONS` bounds stack, memo and nesting.

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
        while (code := self.file.read(1)) != b".":
            self.spend(1)
            if code not in _OPERATIONS:
                self._refuse_operation(code)
            _OPERATIONS[code](self)
        if trailing := self.file_bytes - self.file.tell():
            raise corrupt_pickle(self.path, "nothing behind the end of the pickle", f"{trailing} bytes")
        return self.stack.pop()

    def spend(self, count: int) -> None:
        self.budget -= count
        if self.budget < 0:
            raise unsafe_pickle(self.path, "more", f"at most {MAX_OPERATIONS} operations")

    def take(self, count: int) -> bytes:
        data = self.file.read(count)
        if len(data) < count:
            raise corrupt_pickle(self.path, f"{count} more bytes", f"the end of the file at {self.file_bytes}", True)
        return data

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
        left = self.file_bytes - offset
        if not 0 <= count <= left:
            raise corrupt_pickle(self.path, f"{count} bytes at {offset}", f"{left} up to the end", True)
        self.file.seek(count, os.SEEK_CUR)
        return Span(offset, count)

    def pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError("stack underflow")
        items, self.stack[-count:] = self.stack[-count:], []
        return items

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

    def _refuse_operation(self, code: bytes) -> NoReturn:
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
_Operation = Callable[[_Machine], None]


def _put(key: Callable[[_Machine], int]) -> _Operation:
    def operation(m: _Machine) -> None:
        m.memo[key(m)] = m.stack[-1]

    return operation


def _push(value: Callable[[_Machine], Any]) -> _Operation:
    def operation(m: _Machine) -> None:
        pushed = value(m)  # first, because it may exchange the stack
        m.stack.append(pushed)

    return operation


def _with_number(form: str, use: Callable[[_Machine, Any], Any]) -> Callable[[_Machine], Any]:
    return lambda m: use(m, m.number(form))


def _mark(m: _Machine) -> None:
    m.marks.append(m.stack)
    m.stack = []


def _extend(m: _Machine, items: list[Any]) -> None:
    target = m.stack[-1]
    if type(target) is not list:
        raise TypeError(f"items for {kind(target)}")
    target.extend(items)


def _dict_of(items: list[Any]) -> dict[str, Any]:
    return pairs(list(zip(items[::2], items[1::2], strict=True)))


def _set_items(m: _Machine, items: list[Any]) -> None:
    target = m.stack[-1]
    if type(target) is not dict:
        raise TypeError(f"keys for {kind(target)}")
    target.update(_dict_of(items))


def _stack_global(m: _Machine) -> Global:
    module, name = m.pop(2)
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
    version = m.number("<B")
    if version > MAX_PROTOCOL:
        raise ForeignFileError("read the pickle", repr(str(m.path)), f"a protocol up to {MAX_PROTOCOL}", str(version))


def _reduce(m: _Machine) -> Any:
    function, arguments = m.pop(2)
    if not isinstance(function, Global) or type(arguments) is not tuple:
        raise unsafe_pickle(m.path, f"a call of {kind(function)}")
    m.spend(sum(len(argument) for argument in arguments if type(argument) in (list, tuple, dict)))
    return function.call(m.path, arguments)


def _frame(m: _Machine) -> None:
    """Check that a frame fits into the file; its content follows."""
    m.file.seek(m.skip(m.number("<Q")).offset)


#: Code -> how the number behind it is written, for operations that push it, a text or bytes of that length.
_NUMBERS = {b"K": "<B", b"M": "<H", b"J": "<i", b"G": ">d"}
_TEXTS = {b"\x8c": "<B", b"X": "<I", b"\x8d": "<Q"}
_BYTES = {b"U": "<B", b"T": "<i", b"C": "<B", b"B": "<I", b"\x8e": "<Q", b"\x96": "<Q"}
#: Code -> what it pushes.
_VALUES: dict[bytes, Callable[[_Machine], Any]] = {
    b"N": lambda m: None,
    b"\x88": lambda m: True,
    b"\x89": lambda m: False,
    b"I": _integer_line,
    b"L": _integer_line,
    b"\x8a": lambda m: _long(m, m.number("<B")),
    b"\x8b": lambda m: _long(m, m.number("<i")),
    b"F": lambda m: float(m.line()),
    b"V": lambda m: m.line(),
    b"S": lambda m: m.line().strip("'\""),
    b"]": lambda m: [],
    b"l": lambda m: m.pop_mark(),
    b")": lambda m: (),
    b"t": lambda m: tuple(m.pop_mark()),
    b"\x85": lambda m: tuple(m.pop(1)),
    b"\x86": lambda m: tuple(m.pop(2)),
    b"\x87": lambda m: tuple(m.pop(3)),
    b"}": lambda m: {},
    b"d": lambda m: _dict_of(m.pop_mark()),
    b"g": lambda m: m.memo[_integer_line(m)],
    b"h": lambda m: m.memo[m.number("<B")],
    b"j": lambda m: m.memo[m.number("<I")],
    b"c": lambda m: m.find(m.line(), m.line()),
    b"\x93": _stack_global,
    b"R": _reduce,
    **{code: _with_number(form, lambda m, number: number) for code, form in _NUMBERS.items()},
    **{code: _with_number(form, _Machine.text) for code, form in _TEXTS.items()},
    **{code: _with_number(form, _Machine.skip) for code, form in _BYTES.items()},
}
_OPERATIONS: dict[bytes, _Operation] = {
    b"\x80": _protocol,
    b"\x95": _frame,
    b"(": _mark,
    b"a": lambda m: _extend(m, m.pop(1)),
    b"e": lambda m: _extend(m, m.pop_mark()),
    b"s": lambda m: _set_items(m, m.pop(2)),
    b"u": lambda m: _set_items(m, m.pop_mark()),
    b"p": _put(_integer_line),
    b"q": _put(lambda m: m.number("<B")),
    b"r": _put(lambda m: m.number("<I")),
    b"\x94": _put(lambda m: len(m.memo)),
    b"b": lambda m: set_state(m.path, m.pop(1)[0], m.stack[-1]),
    **{code: _push(value) for code, value in _VALUES.items()},
}
