"""What a stream of the CPU has begun and not finished: messages on their way, and operators that wait for them.

A GPU runs the work of two streams side by side, and each in its own order. A process has one order of execution, and
messages that gloo's threads carry. So a collective that is issued in a stream of its own returns at once and stays in
the stream's lane; an operator issued behind it that reads its result joins the lane, as it would wait in the queue of a
GPU, and its result has a shape and no numbers yet. What waits for the stream, an event or another stream, finishes the
lane up to there, in order. Everything else runs where it is issued.

Operators are seen below autograd, so that graphs are built and taken apart as ever. What needs numbers at once finishes
the lane first, up to what it reads: shapes that depend on data, random numbers, compiled code, what asks for a pointer,
and copies for the host. Kernels of `ops/native` queue as operators do.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from .redirect import Redirects

# Lanes that hold something; their order is that in which they began to.
_open: dict[Lane, None] = {}


class Mark(NamedTuple):
    """A point in a lane."""

    lane: Lane
    issued: int


# What has memory that may be waited for.
Memory = torch.Tensor | torch.UntypedStorage


class _Item(NamedTuple):
    """Work, the tensors that stay alive with it, and the storages that it writes and that it has to do with."""

    number: int
    finish: Callable[[], object]
    held: Sequence[Memory]
    writes: frozenset[int]
    uses: frozenset[int]


class Lane:
    """The unfinished work of one stream, in order.

    Methods that finish raise what a message raises, such as that a peer is gone.
    """

    def __init__(self) -> None:
        self._items: deque[_Item] = deque()
        self._issued = 0
        # By storage, the last item that writes it, and the last that has to do with it.
        self._written: dict[int, int] = {}
        self._used: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._items)

    def mark(self) -> Mark | None:
        """The point behind all that was issued; None if it is finished."""
        return Mark(self, self._issued) if self._items else None

    def put(self, finish: Callable[[], object], reads: Sequence[Memory] = (), writes: Sequence[Memory] = ()) -> None:
        """Keep work, whose tensors stay alive with it; `finish()` returns when it is done."""
        self._issued += 1
        held = (*reads, *writes)
        item = _Item(self._issued, finish, held, frozenset(map(_storage, writes)), frozenset(map(_storage, held)))
        self._items.append(item)
        self._written.update(dict.fromkeys(item.writes, self._issued))
        self._used.update(dict.fromkeys(item.uses, self._issued))
        _open[self] = None

    def follow(self, mark: Mark) -> None:
        """Keep a wait for another lane: what reads its results here queues behind it."""
        items = [each for each in mark.lane._items if each.number <= mark.issued]
        writes = [one for each in items for one in each.held if _storage(one) in each.writes]
        self.put(functools.partial(mark.lane.finish, mark.issued), writes=writes)

    def last(self, memory: Iterable[Memory], *, writing: bool = False) -> int:
        """The number of the last work that is still to write one of them, 0 without any.

        writing: they are to be written, so work that reads one counts too.
        """
        places = self._used if writing else self._written
        return max((places.get(_storage(each), 0) for each in memory), default=0)

    def is_done(self, issued: int) -> bool:
        return not self._items or self._items[0].number > issued

    def finish(self, issued: int | None = None) -> None:
        """Finish what was issued up to there, or all."""
        while self._items and (issued is None or self._items[0].number <= issued):
            item = self._items.popleft()
            try:
                with _below_autograd():
                    item.finish()
            finally:
                for places, storages in ((self._written, item.writes), (self._used, item.uses)):
                    for each in storages:
                        if places.get(each) == item.number:
                            del places[each]
                if not self._items:
                    _open.pop(self, None)


@contextlib.contextmanager
def _below_autograd() -> Iterator[None]:
    """As a mode calls an operator: no graph, no version of a tensor counted twice, no mode, no cast."""
    with (
        _disable_current_modes(),
        torch._C._AutoDispatchBelowADInplaceOrView(),
        torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)),
    ):
        yield


def _storage(memory: Memory) -> int:
    found: int = (memory if isinstance(memory, torch.UntypedStorage) else memory.untyped_storage())._cdata
    return found


def are_open() -> bool:
    """Whether any lane holds something."""
    return bool(_open)


def finish_all() -> None:
    for lane in [*_open]:
        lane.finish()


def finish_for(memory: Sequence[Memory], *, writing: bool = False) -> None:
    """Finish the lanes up to what still writes it, or, before it is written, what uses it."""
    for lane in [*_open]:
        lane.finish(lane.last(memory, writing=writing))


# ---------------------------------------------------------------------------------------------------------------------
# Operators


class Queueing(TorchDispatchMode):
    """While a stream is the current one: operators that read what its lane has not finished join the lane."""

    def __init__(self, lane: Lane) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lane = lane
        # Not while another stream's work is issued inside.
        self.is_current = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        lane = self._lane
        if not lane or func in _WITHOUT_NUMBERS:
            return func(*args, **kwargs)
        given = _tensors_in((*args, *kwargs.values()))
        written = _written(func, args, kwargs)
        last = max(lane.last(given), lane.last(written, writing=True))
        if not last or func.is_view:
            return func(*args, **kwargs)
        if not self.is_current:
            pass
        elif written:
            if _returns_only_written(func):
                lane.put(functools.partial(func, *args, **kwargs), given, written)
                return _returned(func, args, kwargs)
        elif _has_shapes(func):
            results = _empty_results(func, args, kwargs)
            if results is not None:
                lane.put(functools.partial(_fill, results, func, args, kwargs), given, _tensors_in((results,)))
                return results
        lane.finish(last)
        return func(*args, **kwargs)


# They take a tensor for its shape alone.
_aten = torch.ops.aten
_WITHOUT_NUMBERS = frozenset(
    (
        _aten.empty_like.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
        _aten.zeros_like.default,
        _aten.new_zeros.default,
        _aten.ones_like.default,
        _aten.new_ones.default,
        _aten.full_like.default,
        _aten.new_full.default,
    )
)


@functools.cache
def _places_written(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    places = _places_written(func)
    return _tensors_in([args[index] if index < len(args) else kwargs.get(name) for index, name in places])


def _tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """Those of an operator's arguments, of which a list of tensors is one."""
    found: list[torch.Tensor] = []
    for each in values:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            found += [one for one in each if isinstance(one, torch.Tensor)]
    return found


@functools.cache
def _returns_only_written(func: Any) -> bool:
    """In-place operators, and those with one result to write."""
    return (
        len(_places_written(func)) == 1
        and len(func._schema.returns) == 1
        and func._schema.returns[0].alias_info is not None
        and _is_plain(func)
    )


def _returned(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    (index, name) = _places_written(func)[0]
    return args[index] if index < len(args) else kwargs[name]


@functools.cache
def _has_shapes(func: Any) -> bool:
    """Whether it returns new tensors alone, and their shapes can be told without numbers."""
    returns = func._schema.returns
    return (
        bool(returns)
        and all(str(each.type) == "Tensor" and each.alias_info is None for each in returns)
        and _is_plain(func)
    )


@functools.cache
def _is_plain(func: Any) -> bool:
    late = {
        torch.Tag.dynamic_output_shape,
        torch.Tag.data_dependent_output,
        torch.Tag.nondeterministic_seeded,
        torch.Tag.inplace_view,  # which changes a shape
    }
    return func.namespace in ("aten", "prims") and not late & set(func.tags)


# What a layer's operators return is asked for in every step; more kinds of calls than this are no model's.
_MOST_CALLS = 4096
_returned_shapes: dict[Any, Any] = {}


def _empty_results(func: Any, args: Any, kwargs: Any) -> Any:
    """Memory for its results; None where their shapes cannot be told."""
    key = (func, torch.get_default_dtype(), _shapes_in(args), _shapes_in(kwargs))
    try:
        found = _returned_shapes.get(key)
    except TypeError:  # a value that has no hash
        return _memory(_infer_shapes(func, args, kwargs))
    if found is None:
        if len(_returned_shapes) >= _MOST_CALLS:
            _returned_shapes.clear()
        found = _returned_shapes[key] = _infer_shapes(func, args, kwargs) or _UNKNOWN
    return None if found is _UNKNOWN else _memory(found)


class _Shape(NamedTuple):
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


_UNKNOWN = object()


def _shape_of(tensor: torch.Tensor) -> _Shape:
    return _Shape(tensor.shape, tensor.stride(), tensor.dtype)


def _shapes_in(value: Any) -> Any:
    """`value` with shapes in the place of tensors; equal where an operator returns the same shapes."""
    if isinstance(value, torch.Tensor):
        return _shape_of(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_shapes_in, value))
    if isinstance(value, dict):
        return tuple((name, _shapes_in(each)) for name, each in value.items())
    # 1, 1.0 and True are equal, and an operator's result may have another dtype.
    return type(value), value


def _memory(shapes: Any) -> Any:
    """A tensor for a shape, a tuple of them for several; None where an operator leaves a result out."""
    if shapes is None:
        return None
    if isinstance(shapes, _Shape):
        return torch.empty_strided(shapes.size, shapes.stride, dtype=shapes.dtype)
    return tuple(map(_memory, shapes))


def _infer_shapes(func: Any, args: Any, kwargs: Any) -> Any:
    def without_values(given: Any) -> Any:
        if isinstance(given, torch.device):
            return torch.device("meta")
        return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta")

    kinds = torch.Tensor, torch.device
    try:
        found = func(*tree_map_only(kinds, without_values, args), **tree_map_only(kinds, without_values, kwargs))
    except (NotImplementedError, RuntimeError):
        # No meta kernel, or inputs that it refuses. The caller runs the operator at once, which raises what is wrong.
        return None
    if isinstance(found, torch.Tensor):
        return _shape_of(found)
    # A gradient that is not asked for is None.
    return tuple(None if each is None else _shape_of(each) for each in found)


def _fill(results: Any, func: Any, args: Any, kwargs: Any) -> None:
    for result, found in zip(tree_leaves(results), tree_leaves(func(*args, **kwargs)), strict=True):
        if result is not None:
            result.copy_(found)


# ---------------------------------------------------------------------------------------------------------------------
# What a lane is not asked about


def collective(original: Callable[..., Any], lane_now: Callable[[], Lane | None]) -> Callable[..., Any]:
    """A collective that stays in the lane where it is issued, unless its caller waits for it."""

    @functools.wraps(original)
    def issue(*args: Any, **kwargs: Any) -> Any:
        lane = lane_now()
        if lane is None and not _open:
            return original(*args, **kwargs)
        # By what is passed, since a foreign wrapper may have no signature: the first tensor is written, and `async_op`
        # is the one flag, the last of the parameters.
        named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        written = next(named[each] for each in (0, "output_tensor", "output", "tensor") if each in named)
        read = [each for each in named.values() if isinstance(each, torch.Tensor) and each is not written]
        finish_for(read)
        finish_for((written,), writing=True)
        is_coalesced = bool(torch.distributed.distributed_c10d._world.pg_coalesce_state)
        # What is coalesced is issued, and waited for, by its context manager.
        if lane is None or is_coalesced or kwargs.get("async_op") or any(each is True for each in args):
            return original(*args, **kwargs)
        work = original(*(each for each in args if each is not False), **{**kwargs, "async_op": True})
        if work is not None:
            lane.put(work.wait, read, (written,))
            _watch_compiled_code()
        return None

    return issue


def install(redirects: Redirects, lane_now: Callable[[], Lane | None]) -> None:
    """What reads or moves memory past the dispatcher asks the lanes first; what is unfinished ends with the layer.

    lane_now: the lane that operators join which are issued now.
    """
    tensor, storage = torch.Tensor, torch.UntypedStorage

    def asking(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def read(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _open:
                finish_for((self,))
                now = lane_now()
                if now is not None:
                    # It may be written, in the order of the stream.
                    now.finish(now.last((self,), writing=True))
            return original(self, *args, **kwargs)

        return read

    # On a GPU `cpu` returns when the numbers are there.
    for name in ("data_ptr", "numpy", "tolist", "cpu", "__dlpack__"):
        redirects.set(tensor, name, asking(getattr(tensor, name)))
    redirects.set(storage, "data_ptr", asking(storage.data_ptr))

    own_resize = storage.resize_

    @functools.wraps(own_resize)
    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        for lane in [*_open]:
            last = lane.last((self,), writing=True)
            if last and not size:
                # A GPU frees it in the order of the stream that was told of it (`record_stream`).
                lane.put(functools.partial(own_resize, self, size), writes=(self,))
                return self
            lane.finish(last)
        return own_resize(self, size)

    redirects.set(storage, "resize_", resize_)
    redirects.on_undo(finish_all)
    redirects.on_undo(_leave_compiled_code)


_compiled: list[tuple[Any, Callable[..., Any]]] = []


def _watch_compiled_code() -> None:
    """Inductor's kernels read memory unseen; its module is loaded with the first compiled function."""
    module = sys.modules.get("torch._inductor.output_code")
    if _compiled or module is None:
        return
    graph = module.CompiledFxGraph
    original = graph.__call__

    @functools.wraps(original)
    def call(self: Any, inputs: Sequence[Any]) -> Any:
        if _open:
            finish_for([each for each in inputs if isinstance(each, torch.Tensor)], writing=True)
        return original(self, inputs)

    graph.__call__ = call
    _compiled.append((graph, original))


def _leave_compiled_code() -> None:
    while _compiled:
        graph, original = _compiled.pop()
        graph.__call__ = original
