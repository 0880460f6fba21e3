"""Reader of pickles of numpy arrays that runs no code.

`pickletools` reads the operations of a pickle (protocols 0 to 5), and a small machine executes
them. Only globals in the table of `pickled_arrays.py` are allowed. An array becomes a
`StoredArray`: dtype, shape and position in the file. A hostile file can neither run code nor
allocate memory. Declared sizes are compared with the bytes of the file. `MAX_OPERATIONS` limits
stack, memo and nesting.

`pickle.Unpickler` with replaced globals has none of these limits, and reads every array instead of
its position. With Python 3.11, a file of 9 bytes with the memo index 2**27 took 2 GB, and a dict of
15,000 integers with equal hashes took 15 s.
"""

from __future__ import annotations

import os
import pickletools
import re
import struct
from collections.abc import Callable
from io import BufferedIOBase
from pathlib import Path
from typing import Any, cast

from storage.errors import ForeignFileError, UnsafeFileError

from .pickled_arrays import (
    GLOBALS,
    ByteSpan,
    Global,
    PickledArray,
    corrupt_pickle,
    kind,
    pairs,
    set_state,
    truncated_pickle,
    unsafe_pickle,
)

#: Maximum number of operations in a pickle. A chunk of arrays needs a few hundred.
MAX_OPERATIONS = 100_000
#: Maximum bytes of a text, and of a line with a number or name.
MAX_TEXT_BYTES, MAX_LINE_BYTES = 1 << 16, 1 << 10
MAX_PROTOCOL = 5
_NAME = re.compile(r"[A-Za-z_][\w.<>]*", re.ASCII)
#: Exceptions that damaged pickles cause.
_DAMAGE = (IndexError, KeyError, TypeError, ValueError, OverflowError, AttributeError, struct.error)


def describe_pickle(file: BufferedIOBase, path: Path) -> dict[str, Any]:
    """Read a pickled dict without running code. Arrays are described, not read.

    Each array is returned as a `StoredArray`. A tuple or list with one array is returned as a tuple
    with a `StoredArray`, because the older writer stored some arrays in this way by mistake.

    Args:
        file: A seekable file, open for reading.
        path: Path of the file, for errors.

    Raises:
        UnsafeFileError: The pickle names a global that is not in the table, or makes calls that
            arrays do not need.
        CorruptFileError: The pickle is truncated or damaged, or contradicts itself.
        ForeignFileError: The pickle is not a dict, or has a newer protocol.
    """
    try:
        content = _Machine(file, path).run()
        if type(content) is not dict:
            raise ForeignFileError(
                f"{str(path)!r} contains a pickled {kind(content)}, expected a dict of arrays."
            )
        return {name: _described(value) for name, value in content.items()}
    except _DAMAGE as cause:
        raise corrupt_pickle(path, f"{type(cause).__name__}: {cause}"[:200]) from cause


def _described(value: Any) -> Any:
    if isinstance(value, PickledArray):
        if value.stored is None:
            raise ValueError("an array has no data")
        return value.stored
    if type(value) in (tuple, list) and len(value) == 1 and isinstance(value[0], PickledArray):
        return (_described(value[0]),)
    return value


class _Machine:
    """Interpreter that executes the operations of a pickle on a stack and a memo.

    At most `MAX_OPERATIONS` operations are executed, which also limits the size of stack and memo.
    `pickletools` reads the arguments of operations from this object, by `read` and `readline`.

    Attributes:
        stack: Values above the last mark.
        marks: Values of the stack below each mark.
        memo: Maps memo indices to values.
        budget: Number of operations that may still be executed.
    """

    def __init__(self, file: BufferedIOBase, path: Path) -> None:
        self.file = file
        self.path = path
        self.position = 0
        self.file_bytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.budget = MAX_OPERATIONS

    def run(self) -> Any:
        name = ""
        reader = cast(Any, self)
        while name != "STOP":
            self.spend(1)
            code = self.read(1)
            operation = _OPERATIONS.get(code)
            if operation is None:
                problem = f"byte {self.position - 1} is {code!r}, which is no pickle operation"
                raise corrupt_pickle(self.path, problem)
            name = operation.name
            argument: Any = None
            if name in _BYTES:
                argument = self.skip(int.from_bytes(self.read(_BYTES[name]), "little"))
            elif operation.arg is not None:
                argument = operation.arg.reader(reader)
            if name in _PUSHED:
                # The handler may replace the stack, so `self.stack` is looked up after the call.
                pushed = _PUSHED[name](self, argument)
                self.stack.append(pushed)
            elif name in _CHANGES:
                _CHANGES[name](self, argument)
            else:
                if name == "INST":
                    self.find(argument)
                raise unsafe_pickle(self.path, f"the operation {name}")
        if trailing := self.file_bytes - self.position:
            problem = f"{trailing} bytes follow the end of the pickle"
            raise corrupt_pickle(self.path, problem)
        return self.stack.pop()

    def spend(self, count: int) -> None:
        self.budget -= count
        if self.budget < 0:
            raise UnsafeFileError(
                f"{str(self.path)!r} has more than {MAX_OPERATIONS} pickle operations, which is "
                "not allowed. Check where the file comes from."
            )

    def read(self, count: int) -> bytes:
        if count > MAX_TEXT_BYTES:
            problem = f"a text has {count} bytes, more than {MAX_TEXT_BYTES}"
            raise corrupt_pickle(self.path, problem)
        data = self.file.read(count)
        self.position += len(data)
        if len(data) < count:
            raise truncated_pickle(self.path, f"the pickle ends early at byte {self.file_bytes}")
        return data

    def readline(self) -> bytes:
        line = self.file.readline(MAX_LINE_BYTES)
        self.position += len(line)
        if not line.endswith(b"\n"):
            problem = f"a line has no end at byte {self.position}"
            is_truncated = self.position == self.file_bytes
            error = truncated_pickle if is_truncated else corrupt_pickle
            raise error(self.path, problem)
        return line

    def check(self, count: int) -> None:
        """Raise `CorruptFileError` if fewer than `count` bytes follow in the file."""
        left = self.file_bytes - self.position
        if not 0 <= count <= left:
            problem = f"an array has {left} of {count} bytes"
            raise truncated_pickle(self.path, problem)

    def skip(self, count: int) -> ByteSpan:
        self.check(count)
        self.position = self.file.seek(count, os.SEEK_CUR)
        return ByteSpan(self.position - count, count)

    def pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError("stack underflow")
        items, self.stack[-count:] = self.stack[-count:], []
        return items

    def pop_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def find(self, module_and_name: str) -> Global:
        """Return the global that a pickle names, or raise an error if it is not allowed.

        The name consists of module and name, such as "numpy dtype" for `numpy.dtype`.
        """
        module, _, name = module_and_name.partition(" ")
        full = f"{module}.{name}"
        if not _NAME.fullmatch(full):
            raise corrupt_pickle(self.path, f"{full[:80]!r} is not a valid name of a global")
        if (module, name) not in GLOBALS:
            raise unsafe_pickle(self.path, f"the global {full[:200]!r}")
        return GLOBALS[module, name]


def _dict_of(items: list[Any]) -> dict[str, Any]:
    return pairs(list(zip(items[::2], items[1::2], strict=True)))


def _extend(m: _Machine, items: Any) -> None:
    target = m.stack[-1]
    if type(target) is not type(items):
        raise TypeError(f"items are added to {kind(target)}")
    if isinstance(items, dict):
        target.update(items)
    else:
        target.extend(items)


def _mark(m: _Machine, _: None) -> None:
    m.marks.append(m.stack)
    m.stack = []


def _put(m: _Machine, key: int | None) -> None:
    m.memo[len(m.memo) if key is None else key] = m.stack[-1]


def _stack_global(m: _Machine, _: None) -> Global:
    module, name = m.pop(2)
    if type(name) is not str or type(module) is not str:
        raise TypeError("the name of a global is no text")
    return m.find(f"{module} {name}")


def _protocol(m: _Machine, version: int) -> None:
    if version > MAX_PROTOCOL:
        raise ForeignFileError(
            f"{str(m.path)!r} has pickle protocol {version}. Protocols up to {MAX_PROTOCOL} are "
            "supported."
        )


def _reduce(m: _Machine, _: None) -> Any:
    function, arguments = m.pop(2)
    if not isinstance(function, Global) or type(arguments) is not tuple:
        raise unsafe_pickle(m.path, f"a call of {kind(function)}")
    m.spend(sum(len(argument) for argument in arguments if type(argument) in (list, tuple, dict)))
    return function.call(m.path, arguments)


_Handler = Callable[[_Machine, Any], Any]
_OPERATIONS = {operation.code.encode("latin-1"): operation for operation in pickletools.opcodes}
#: Maps operations that push bytes to the size of the length field that follows the operation.
_BYTES = {
    "SHORT_BINSTRING": 1,
    "BINSTRING": 4,
    "SHORT_BINBYTES": 1,
    "BINBYTES": 4,
    "BINBYTES8": 8,
    "BYTEARRAY8": 8,
}
#: Operations that push a number or text.
_VALUES = """INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT
    STRING UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8"""
#: Maps operations that push a value to functions that compute the value from the argument.
_PUSHED: dict[str, _Handler] = {
    "NONE": lambda m, _: None,
    "NEWTRUE": lambda m, _: True,
    "NEWFALSE": lambda m, _: False,
    "EMPTY_LIST": lambda m, _: [],
    "LIST": lambda m, _: m.pop_mark(),
    "EMPTY_TUPLE": lambda m, _: (),
    "TUPLE": lambda m, _: tuple(m.pop_mark()),
    "TUPLE1": lambda m, _: tuple(m.pop(1)),
    "TUPLE2": lambda m, _: tuple(m.pop(2)),
    "TUPLE3": lambda m, _: tuple(m.pop(3)),
    "EMPTY_DICT": lambda m, _: {},
    "DICT": lambda m, _: _dict_of(m.pop_mark()),
    "GLOBAL": _Machine.find,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _reduce,
    **dict.fromkeys([*_BYTES, *_VALUES.split()], lambda m, value: value),
    **dict.fromkeys(["GET", "BINGET", "LONG_BINGET"], lambda m, key: m.memo[key]),
}
#: Maps other operations to functions that change the stack, the memo or a value on the stack.
_CHANGES: dict[str, _Handler] = {
    "PROTO": _protocol,
    "FRAME": lambda m, num_bytes: m.check(num_bytes),
    "STOP": lambda m, _: None,
    "MARK": _mark,
    "APPEND": lambda m, _: _extend(m, m.pop(1)),
    "APPENDS": lambda m, _: _extend(m, m.pop_mark()),
    "SETITEM": lambda m, _: _extend(m, _dict_of(m.pop(2))),
    "SETITEMS": lambda m, _: _extend(m, _dict_of(m.pop_mark())),
    "BUILD": lambda m, _: set_state(m.path, m.pop(1)[0], m.stack[-1]),
    **dict.fromkeys(["PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"], _put),
}
