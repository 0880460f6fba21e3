"""A pretended CUDA device for tests of device code on machines without a GPU.

`PretendCuda` replaces what torch needs to know about `cuda:0`. Its tensors report that device,
refuse `numpy()`, and hold their values in CPU memory, on which every operation runs. The device
counts per operation:

- *waits*: places where the host waits for a real device. These are the operations that
  `torch.cuda.set_sync_debug_mode("error")` refuses (`item`, `nonzero`, boolean masks, blocking
  copies) and explicit waits for events and streams. A strict device raises `WaitError` instead of
  counting.
- *pageable copies*: asynchronous copies from or to memory that is not pinned. The driver stages
  them, so the host may wait although the debug mode does not report it. A strict device refuses
  these copies too.
- *launches*: operations that are not views. A real device needs at least one kernel or copy for
  each.

A *late* device completes an event only after a number of further operations. Until then an
asynchronous copy to the host has not arrived: its target holds garbage. When a copy to the device
completes, the device checks that nobody changed the pinned source in the meantime. Code that reads
or reuses host memory too early fails on a late device.

Operations run in order and at once, so races between streams do not show here. `torch.compile`,
CUDA graphs and memory statistics are not pretended.
"""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)

#: Operations that return a view of their input: no kernel runs.
VIEWS = frozenset({
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "detach", "diagonal", "expand", "lift_fresh",
    "narrow", "permute", "real", "reshape", "resolve_conj", "resolve_neg", "select", "set_", "slice", "split",
    "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view", "view_as",
})  # fmt: skip
#: Operations that allocate or describe memory: no kernel runs.
NO_KERNEL = frozenset({
    "_version", "dim", "empty", "empty_like", "empty_strided", "is_contiguous", "is_pinned", "is_same_size",
    "new_empty", "new_empty_strided", "numel", "record_stream", "resize_", "size", "storage_offset", "stride",
    "sym_numel", "sym_size", "sym_storage_offset", "sym_stride",
})  # fmt: skip
#: Operations for which the host waits, because it needs their result or the size of their result.
WAITS = frozenset({
    "_local_scalar_dense", "_unique2", "argwhere", "bincount", "equal", "histc", "is_nonzero", "masked_select",
    "nonzero", "unique_consecutive", "unique_dim",
})  # fmt: skip
#: Operations in `WAITS` that return a Python value and no tensor.
_RETURN_VALUES = frozenset({"_local_scalar_dense", "equal", "is_nonzero"})
#: Byte that fills the target of an asynchronous copy until the copy completes.
_GARBAGE = 0xA5


class WaitError(RuntimeError):
    """Raised if the host waits for the pretended device although waiting is forbidden."""


@dataclass
class Counts:
    """Numbers of waits, pageable copies and launches since the last `PretendCuda.reset`."""

    waits: Counter[str] = field(default_factory=Counter)
    pageable_copies: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    #: "name at file:line" of each wait and pageable copy.
    places: Counter[str] = field(default_factory=Counter)

    @property
    def num_waits(self) -> int:
        return self.waits.total()

    @property
    def num_launches(self) -> int:
        return self.launches.total()


class PretendTensor(torch.Tensor):
    """A tensor on the pretended device.

    In Python, its device is `cuda:0`. In C++, it is a CPU tensor, because torch without CUDA cannot
    create CUDA tensors. Each operation on it calls `PretendCuda.run`.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl
    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> PretendTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=CPU,
        )
        made.values = values
        return made

    def __init__(self, values: torch.Tensor) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return PretendCuda.active().run(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        if not force:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        copied: torch.Tensor = _to(torch.Tensor.to, self, CPU)
        return copied.numpy()

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray[Any, Any]:
        return self.numpy()

    def tolist(self) -> Any:
        PretendCuda.active().wait("tolist")
        return self.values.tolist()

    def record_stream(self, stream: Any) -> None:
        pass

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        return f"PretendTensor({self.values!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return PretendTensor, (self.values,)

    def __deepcopy__(self, memo: Any) -> PretendTensor:
        copied = PretendTensor(self.values.clone())
        memo[id(self)] = copied
        return copied


class _GeneratorType(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, torch._C.Generator)


class PretendGenerator(torch._C.Generator, metaclass=_GeneratorType):
    """A random generator whose device is `cuda:0` or the CPU. It draws the numbers of the CPU."""

    #: Addresses of the generators on the device. An operation may receive another Python object for
    #: the same generator, so the objects cannot be compared.
    on_device: ClassVar[set[int]] = set()

    def __new__(cls, device: Any = "cpu") -> Any:
        made = super().__new__(cls, device="cpu")
        made.place = CUDA if torch.device(device).type == "cuda" else CPU
        if made.place == CUDA:
            cls.on_device.add(made._cdata)
        else:
            cls.on_device.discard(made._cdata)
        return made

    def __init__(self, device: Any = "cpu") -> None:
        pass

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.place  # type: ignore[attr-defined,no-any-return]

    def __reduce__(self) -> Any:
        return _restored_generator, (self.device.type, self.initial_seed(), self.get_state())


def _restored_generator(device: str, seed: int, state: torch.Tensor) -> PretendGenerator:
    generator = PretendGenerator(device)
    generator.manual_seed(seed)
    generator.set_state(state)
    return generator


class PretendEvent:
    """CUDA event of the pretended device, which completes after `lateness` operations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.ticket = 0
        self.ready_at = 0

    def record(self, stream: Any = None) -> None:
        device = PretendCuda.active()
        self.ticket = device.num_copies
        self.ready_at = device.num_operations + device.lateness
        device.counts.launches["event_record"] += 1

    def query(self) -> bool:
        device = PretendCuda.active()
        device.num_operations += 1
        if device.num_operations < self.ready_at:
            return False
        device.complete_copies(self.ticket)
        return True

    def synchronize(self) -> None:
        device = PretendCuda.active()
        device.wait("event.synchronize")
        device.complete_copies(self.ticket)

    def wait(self, stream: Any = None) -> None:
        pass

    def elapsed_time(self, other: PretendEvent) -> float:
        return 1.0


class PretendStream:
    """CUDA stream of the pretended device, which runs the operations of all streams in order."""

    cuda_stream: ClassVar[int] = 0
    device: ClassVar[torch.device] = CUDA

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_event(self, event: PretendEvent) -> None:
        PretendCuda.active().counts.launches["wait_event"] += 1

    def wait_stream(self, stream: Any) -> None:
        PretendCuda.active().counts.launches["wait_stream"] += 1

    def record_event(self, event: PretendEvent | None = None) -> PretendEvent:
        event = event or PretendEvent()
        event.record()
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        device = PretendCuda.active()
        device.wait("stream.synchronize")
        device.num_operations += device.lateness  # All recorded events are complete.
        device.complete_copies()


class _Copy:
    """An asynchronous copy that was started and has not completed."""

    def complete(self) -> None:
        raise NotImplementedError


class _CopyToHost(_Copy):
    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.target = target
        self.source = source.clone()
        if target.is_contiguous() and target.numel():
            target.view(-1).view(torch.uint8).fill_(_GARBAGE)

    def complete(self) -> None:
        self.target.copy_(self.source)


class _CopyFromHost(_Copy):
    def __init__(self, source: torch.Tensor) -> None:
        self.source = source
        self.before = source.clone()

    def complete(self) -> None:
        same = (
            self.source.reshape(-1)
            .view(torch.uint8)
            .equal(self.before.reshape(-1).view(torch.uint8))
        )
        if not same:
            raise AssertionError(
                "pinned memory was changed before its copy to the device had completed"
            )


class PretendCuda:
    """The pretended device. Use it as a context manager: `with PretendCuda() as device: ...`.

    Threads that start inside of the context use the device as well; processes do not.

    Args:
        is_strict: Raise `WaitError` where the host waits. `torch.cuda.set_sync_debug_mode` sets it
            as well.
        lateness: Number of operations after which an event completes; 0 completes it at once.
    """

    _active: ClassVar[PretendCuda | None] = None

    def __init__(self, is_strict: bool = False, lateness: int = 0) -> None:
        self.is_strict = is_strict
        self.lateness = lateness
        self.counts = Counts()
        self.num_operations = 0
        #: Number of asynchronous copies that were started.
        self.num_copies = 0
        self._pending: dict[int, _Copy] = {}
        self._pinned: set[int] = set()
        self._lock = threading.RLock()
        self._stack = ExitStack()

    @classmethod
    def active(cls) -> PretendCuda:
        """Return the pretended device whose `with` statement is running."""
        assert cls._active is not None, "no pretended device is installed"
        return cls._active

    def __enter__(self) -> PretendCuda:
        assert PretendCuda._active is None, "a pretended device is installed already"
        torch._C._ensureCUDADeviceGuardSet()
        PretendCuda._active = self
        for name, value in _replacements(self).items():
            self._stack.enter_context(mock.patch(name, value))
        self._stack.enter_context(_modes())
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
        PretendCuda._active = None

    def reset(self) -> Counts:
        """Reset the counts, and return the old ones."""
        before = self.counts
        self.counts = Counts()
        return before

    @contextmanager
    def strict(self) -> Iterator[None]:
        """Raise `WaitError` on each wait within the block."""
        before = self.is_strict
        self.is_strict = True
        try:
            yield
        finally:
            self.is_strict = before

    def wait(self, name: str) -> None:
        """Count a wait. On a strict device, raise an error."""
        place = f"{name} at {_caller()}"
        if self.is_strict:
            raise WaitError(f"called a synchronizing CUDA operation: {place}")
        self.counts.waits[name] += 1
        self.counts.places[place] += 1

    def complete_copies(self, ticket: int | None = None) -> None:
        """Complete the first `ticket` asynchronous copies, or all if `ticket` is None."""
        with self._lock:
            last = self.num_copies if ticket is None else ticket
            ready = [number for number in self._pending if number <= last]
            copies = [self._pending.pop(number) for number in ready]
        with _no_modes():
            for copy in copies:
                copy.complete()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, PretendTensor):
            return False
        return tensor.untyped_storage().data_ptr() in self._pinned

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Mark the memory of a CPU tensor as pinned until it is freed. Returns the tensor."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address and address not in self._pinned:
            self._pinned.add(address)
            weakref.finalize(storage, self._pinned.discard, address)
        return tensor

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Execute a torch operation, and count it if it uses the pretended device."""
        name = func._schema.name.split("::")[1]
        target = kwargs.get("device")
        leaves = tree_leaves((args, kwargs))
        is_on_device = any(isinstance(leaf, PretendTensor) for leaf in leaves)
        is_for_device = target is not None and torch.device(target).type == "cuda"
        plain = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        if is_for_device:
            plain["device"] = CPU
        if not is_on_device and not is_for_device:
            result = func(*args, **plain)
            return self.pin(result) if kwargs.get("pin_memory") else result
        self.num_operations += 1
        if name == "_to_copy":
            return self._convert(func, args, kwargs, plain)
        if name in ("copy_", "_foreach_copy_"):
            return self._copy(func, name, args, kwargs)
        self._check_operands(func, name, args, kwargs, leaves)
        if name in WAITS:
            self.wait(name)
            self.complete_copies()
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            self.wait(name)
        if name not in VIEWS and name.rstrip("_") not in VIEWS and name not in NO_KERNEL:
            self.counts.launches[name] += 1
        result = func(*tree_map(_values, args), **tree_map(_values, plain))
        if name in _RETURN_VALUES:
            return result
        written = _written_arguments(func, args, kwargs)
        return tree_map(_on_device, result) if written is None else written

    def _convert(self, func: Any, args: Any, kwargs: Any, plain: Any) -> Any:
        source = args[0]
        target = kwargs.get("device")
        is_from_device = isinstance(source, PretendTensor)
        is_to_device = is_from_device if target is None else torch.device(target).type == "cuda"
        is_async = bool(kwargs.get("non_blocking"))
        result = func(_values(source), **plain)
        if is_from_device and not is_to_device:
            if result is source.values:
                result = result.clone()
            self._arrive_on_host(result, result, is_async, is_pinned=True)
            return result
        if not is_from_device:
            self._leave_host(source, is_async)
        self.counts.launches["_to_copy"] += 1
        return PretendTensor(result)

    def _copy(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        is_async = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
        is_list = name == "_foreach_copy_"
        targets = list(args[0]) if is_list else [args[0]]
        sources = list(args[1]) if is_list else [args[1]]
        self.counts.launches[name] += 1
        for target, source in zip(targets, sources, strict=True):
            if isinstance(source, PretendTensor) and not isinstance(target, PretendTensor):
                self._arrive_on_host(target, source.values, is_async, self.is_pinned(target))
                continue
            if isinstance(target, PretendTensor) and not isinstance(source, PretendTensor):
                self._leave_host(source, is_async)
            _values(target).copy_(_values(source))
        return None if is_list else args[0]

    def _arrive_on_host(
        self, target: torch.Tensor, values: torch.Tensor, is_async: bool, is_pinned: bool
    ) -> None:
        """Copy values to the host: at once or, with `lateness`, when a later event completes."""
        if not is_async:
            self.wait("copy to the host")
            self.complete_copies()
        elif not is_pinned:
            self._note_pageable("copy to pageable memory")
        if is_async and self.lateness:
            with self._lock:
                self.num_copies += 1
                self._pending[self.num_copies] = _CopyToHost(target, values)
        elif target is not values:
            target.copy_(values)

    def _leave_host(self, source: torch.Tensor, is_async: bool) -> None:
        """Count a copy from the host to the device as a wait or as a pageable copy, if it is one.

        On a late device, check later that the pinned source did not change during the copy.
        """
        if not is_async:
            self.wait("copy from the host")
        elif not self.is_pinned(source):
            self._note_pageable("copy from pageable memory")
        elif self.lateness:
            with self._lock:
                self.num_copies += 1
                self._pending[self.num_copies] = _CopyFromHost(source)

    def _note_pageable(self, name: str) -> None:
        """Count a copy from or to pageable memory. On a strict device, raise an error."""
        place = f"{name} at {_caller()}"
        if self.is_strict:
            raise WaitError(f"the host may wait for a pageable copy: {place}")
        self.counts.pageable_copies[name] += 1
        self.counts.places[place] += 1

    def _check_operands(
        self, func: Any, name: str, args: Any, kwargs: Any, leaves: list[Any]
    ) -> None:
        """Raise an error if an operand is on the host, as torch does for a real device.

        Indices may be on the host. Waits for them are counted.
        """
        for leaf in leaves:
            if (
                isinstance(leaf, torch._C.Generator)
                and leaf._cdata not in PretendGenerator.on_device
            ):
                raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            self._count_index_waits(name, args)
            return
        for leaf in leaves:
            if (
                isinstance(leaf, torch.Tensor)
                and not isinstance(leaf, PretendTensor)
                and leaf.dim()
            ):
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but {func} got {tuple(leaf.shape)} on the CPU"
                )

    def _count_index_waits(self, name: str, args: Any) -> None:
        for index in args[1]:
            if index is None:
                continue
            if not isinstance(index, PretendTensor):
                self.wait("index on the host")
            if index.dtype in (torch.bool, torch.uint8):
                is_fill = (
                    name != "index"
                    and args[2].numel() == 1
                    and not isinstance(args[2], PretendTensor)
                )
                if not is_fill:  # Torch fills by a mask without a wait.
                    self.wait("boolean mask")


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return PretendCuda.active().run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Replace torch functions that would reach C++ code before `__torch_dispatch__` is called."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        replacement = _FUNCTIONS.get(func)
        if replacement is None:
            return func(*args, **kwargs)
        return replacement(func, *args, **kwargs)


def _values(value: Any) -> Any:
    return value.values if isinstance(value, PretendTensor) else value


def _on_device(value: Any) -> Any:
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, PretendTensor)
    return PretendTensor(value) if is_plain else value


def _written_arguments(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the arguments that an operation writes, in place or by `out=`; None if it writes none."""
    arguments = {}
    for place, argument in enumerate(func._schema.arguments):
        value = kwargs.get(argument.name, args[place] if place < len(args) else None)
        if argument.alias_info is not None:
            arguments[frozenset(argument.alias_info.before_set)] = value
    written = []
    for result in func._schema.returns:
        if result.alias_info is None or not result.alias_info.is_write:
            return None
        value = arguments[frozenset(result.alias_info.before_set)]
        if isinstance(value, PretendTensor) and value.shape != value.values.shape:
            raise RuntimeError(f"{func} resized its output; give it a tensor of the right shape")
        written.append(value)
    if not written:
        return None
    return written[0] if len(written) == 1 else tuple(written)


def _caller() -> str:
    """Return `file:line` of the innermost caller in this library, or of the test."""
    frames = traceback.extract_stack(sys._getframe(2))
    for frame in reversed(frames):
        name = frame.filename.replace("\\", "/")
        if "/site-packages/" not in name and ("/rollout_data/" in name or "/storage/" in name):
            return f"{'/'.join(name.split('/')[-2:])}:{frame.lineno}"
    return "a test"


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _tensor(func: Any, data: Any, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    if isinstance(data, PretendTensor):
        wanted = dtype or data.dtype
        return _to(torch.Tensor.to, data, device or CUDA, wanted, copy=True)
    if isinstance(data, (list, tuple)) and any(isinstance(part, PretendTensor) for part in data):
        data = [part.item() if isinstance(part, PretendTensor) else part for part in data]
    if not _is_cuda(device):
        return func(data, dtype=dtype, device=device, **options)
    return _to(torch.Tensor.to, func(data, dtype=dtype, **options), CUDA)


def _as_tensor(func: Any, data: Any, dtype: Any = None, device: Any = None) -> Any:
    if isinstance(data, torch.Tensor):
        return _to(torch.Tensor.to, data, device or data.device, dtype or data.dtype)
    return _tensor(func, data, dtype=dtype, device=device)


def _new_tensor(
    func: Any, self: Any, data: Any, *, dtype: Any = None, device: Any = None, **options: Any
) -> Any:
    if not isinstance(self, PretendTensor):
        return func(self, data, dtype=dtype, device=device, **options)
    return _tensor(torch.tensor, data, dtype=dtype or self.dtype, device=device or CUDA)


def _to(func: Any, self: Any, *args: Any, copy: bool = False, **kwargs: Any) -> Any:
    if args and isinstance(args[0], torch.Tensor):
        kwargs = {"device": args[0].device, "dtype": args[0].dtype, **kwargs}
        args = args[1:]
    device, dtype, is_async, _ = torch._C._nn._parse_to(*args, **kwargs)
    if not isinstance(self, PretendTensor) and not _is_cuda(device):
        return func(self, *args, copy=copy, **kwargs)
    wanted = dtype or self.dtype
    place = CUDA if device is None or device.type == "cuda" else CPU
    if self.device == place and self.dtype == wanted and not copy:
        return self
    options = {"dtype": wanted, "device": place, "non_blocking": is_async}
    return PretendCuda.active().run(torch.ops.aten._to_copy.default, (self,), options)


def _cpu(func: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    return _to(torch.Tensor.to, self, CPU)


def _cuda(
    func: Any, self: Any, device: Any = None, non_blocking: bool = False, **kwargs: Any
) -> Any:
    return _to(torch.Tensor.to, self, CUDA, non_blocking=non_blocking)


def _is_pinned(func: Any, self: Any, device: Any = None) -> bool:
    return PretendCuda.active().is_pinned(self)


def _pin_memory(func: Any, self: Any, device: Any = None) -> torch.Tensor:
    device = PretendCuda.active()
    return self if device.is_pinned(self) else device.pin(self.clone())


def _getitem(func: Any, self: Any, index: Any) -> Any:
    if not isinstance(self, PretendTensor):
        return func(self, index)
    view, tensors = _split_index(self, index)
    return torch.ops.aten.index.Tensor(view, tensors) if tensors else view


def _setitem(func: Any, self: Any, index: Any, value: Any) -> None:
    if not isinstance(self, PretendTensor):
        func(self, index, value)
        return
    view, tensors = _split_index(self, index)
    if tensors:
        if not isinstance(value, torch.Tensor):
            if any(
                tensor is not None and tensor.dtype not in (torch.bool, torch.uint8)
                for tensor in tensors
            ):
                # Torch copies the number from pageable memory, so the host waits.
                PretendCuda.active().wait("number written at indices")
            value = torch.tensor(value, dtype=self.dtype)
        elif value.dtype != self.dtype:
            value = _to(torch.Tensor.to, value, value.device, self.dtype)
        torch.ops.aten.index_put_.default(view, tensors, value)
    elif isinstance(value, torch.Tensor):
        while value.dim() > view.dim() and value.shape[0] == 1:
            value = value[0]
        view.copy_(value)
    else:
        view.fill_(value)


def _split_index(tensor: PretendTensor, index: Any) -> tuple[Any, list[Any]]:
    """Apply the integers, slices and new axes of an index to a tensor.

    Returns the view, and for each axis of the view the index tensor or None.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    items = [
        torch.as_tensor(item) if isinstance(item, (list, np.ndarray)) else item for item in items
    ]
    ellipses = [place for place, item in enumerate(items) if item is Ellipsis]
    if ellipses:
        num_free = tensor.dim() - sum(_num_axes(item) for item in items)
        items[ellipses[0] : ellipses[0] + 1] = [slice(None)] * num_free
    view: Any = tensor
    axis = 0
    tensors: list[Any] = []
    for item in items:
        if item is None:
            view = view.unsqueeze(axis)
            axis += 1
        elif isinstance(item, slice):
            if item != slice(None):
                stop = sys.maxsize if item.stop is None else item.stop
                view = torch.ops.aten.slice.Tensor(view, axis, item.start, stop, item.step or 1)
            axis += 1
        elif isinstance(item, torch.Tensor) and (item.dim() or isinstance(item, PretendTensor)):
            tensors += [None] * (axis - len(tensors)) + [item]
            tensors += [None] * (_num_axes(item) - 1)
            axis += _num_axes(item)
            if _num_axes(item) > 1:
                del tensors[len(tensors) - _num_axes(item) + 1 :]
        else:
            view = view.select(axis, int(item))
    return view, tensors


def _num_axes(item: Any) -> int:
    """Return how many axes of a tensor one item of an index uses."""
    if item is None or item is Ellipsis:
        return 0
    is_mask = isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8)
    return item.dim() if is_mask else 1


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.tensor: _tensor,
    torch.as_tensor: _as_tensor,
    torch.Tensor.new_tensor: _new_tensor,
    torch.Tensor.to: _to,
    torch.Tensor.cpu: _cpu,
    torch.Tensor.cuda: _cuda,
    torch.Tensor.is_pinned: _is_pinned,
    torch.Tensor.pin_memory: _pin_memory,
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.__setitem__: _setitem,
}


@contextmanager
def _modes() -> Iterator[None]:
    with _Functions(), _Dispatch():
        yield


@contextmanager
def _no_modes() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
        yield


def _replacements(device: PretendCuda) -> dict[str, Any]:
    """Return the replacements of torch and thread functions, by dotted name."""
    stream = PretendStream()
    real_run = threading.Thread.run

    def run_thread(thread: threading.Thread) -> None:
        with _modes():
            real_run(thread)

    def set_sync_debug_mode(mode: int | str) -> None:
        device.is_strict = mode in ("error", 2)

    def synchronize(place: Any = None) -> None:
        device.wait("synchronize")
        device.num_operations += device.lateness  # All recorded events are complete.
        device.complete_copies()

    @contextmanager
    def use_stream(stream: Any) -> Iterator[None]:
        yield

    return {
        "threading.Thread.run": run_thread,
        "torch.Generator": PretendGenerator,
        "torch.cuda.Event": PretendEvent,
        "torch.cuda.Stream": PretendStream,
        "torch.cuda._lazy_init": lambda: None,
        "torch.cuda._sleep": lambda cycles: None,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.current_stream": lambda place=None: stream,
        "torch.cuda.default_stream": lambda place=None: stream,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.get_device_name": lambda place=None: "pretended device",
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.set_sync_debug_mode": set_sync_debug_mode,
        "torch.cuda.stream": use_stream,
        "torch.cuda.synchronize": synchronize,
    }
