"""Pending work of an emulated CPU stream: collectives in flight, and operators that depend on them.

A collective that is issued in a side stream returns at once and stays in the stream's lane. An operator issued after it
that reads its result joins the lane: its result has a shape and no values yet. Whatever waits for the stream (an event,
another stream) finishes the lane up to that point, in order. Everything else runs where it is issued.

Operators are seen below autograd. What needs values at once finishes the lane up to what it reads: shapes that depend
on data, random numbers, compiled code, addresses, and copies to the host.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

# Lanes with pending work, oldest first.
_open: dict[Lane, None] = {}
# Items that run now, innermost last.
_finishing: list[_Item] = []


class Mark(NamedTuple):
    """Position in a lane."""

    lane: Lane
    issued: int


Memory = torch.Tensor | torch.UntypedStorage


class _Item(NamedTuple):
    """Work with the tensors it keeps alive, the storages it writes and all storages it uses."""

    number: int
    finish: Callable[[], object]
    held: Sequence[Memory]
    writes: frozenset[int]
    uses: frozenset[int]


class Lane:
    """Pending work of one stream, in order. Methods that finish it raise what a collective raises."""

    def __init__(self) -> None:
        self._items: deque[_Item] = deque()
        self._issued = 0
        # By storage: the last item that writes it, and the last that uses it.
        self._written: dict[int, int] = {}
        self._used: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._items)

    def mark(self) -> Mark | None:
        """Position after all issued work; None if nothing is pending."""
        return Mark(self, self._issued) if self._items else None

    def put(self, finish: Callable[[], object], reads: Sequence[Memory] = (), writes: Sequence[Memory] = ()) -> None:
        """Append work; `finish()` completes it. Its tensors stay alive until then."""
        self._issued += 1
        held = (*reads, *writes)
        item = _Item(self._issued, finish, held, frozenset(map(storage_id, writes)), frozenset(map(storage_id, held)))
        self._items.append(item)
        self._written.update(dict.fromkeys(item.writes, self._issued))
        self._used.update(dict.fromkeys(item.uses, self._issued))
        _open[self] = None

    def follow(self, mark: Mark) -> None:
        """Append a wait for another lane, which writes what that lane is still to write."""
        items = [each for each in mark.lane._items if each.number <= mark.issued]
        writes = [one for each in items for one in each.held if storage_id(one) in each.writes]
        self.put(functools.partial(mark.lane.finish, mark.issued), writes=writes)

    def last(self, memory: Iterable[Memory], *, writing: bool = False) -> int:
        """Number of the last pending work that writes one of them; 0 without any.

        writing: count work that reads them too, since they are about to be written.
        """
        places = self._used if writing else self._written
        return max((places.get(storage_id(each), 0) for each in memory), default=0)

    def is_done(self, issued: int) -> bool:
        return not self._items or self._items[0].number > issued

    def finish(self, issued: int | None = None) -> None:
        """Finish work up to this number, or all."""
        while self._items and (issued is None or self._items[0].number <= issued):
            item = self._items.popleft()
            try:
                _finishing.append(item)
                with _below_autograd():
                    item.finish()
            finally:
                _finishing.pop()
                for places, storages in ((self._written, item.writes), (self._used, item.uses)):
                    for each in storages:
                        if places.get(each) == item.number:
                            del places[each]
                if not self._items:
                    _open.pop(self, None)


@contextlib.contextmanager
def _below_autograd() -> Iterator[None]:
    """Run as inside a dispatch mode: without autograd, version counters, modes or autocast."""
    with (
        _disable_current_modes(),
        torch._C._AutoDispatchBelowADInplaceOrView(),
        torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)),
    ):
        yield


def storage_id(memory: Memory) -> int:
    found: int = (memory if isinstance(memory, torch.UntypedStorage) else memory.untyped_storage())._cdata
    return found


def are_open() -> bool:
    """Whether a lane has pending work that an access may have to wait for; not while pending work itself runs."""
    return bool(_open) and not _finishing


def pending() -> list[Lane]:
    """Lanes with pending work, oldest first."""
    return [*_open]


def finish_all() -> None:
    for lane in pending():
        lane.finish()


def finish_for(memory: Sequence[Memory], *, writing: bool = False) -> None:
    """Finish lanes up to what writes this memory; with `writing`, up to what uses it."""
    for lane in pending():
        lane.finish(lane.last(memory, writing=writing))


# ---------------------------------------------------------------------------------------------------------------------
# Operators


class Queueing(TorchDispatchMode):
    """Dispatch mode of the current stream: operators that read pending results join the lane."""

    def __init__(self, lane: Lane) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lane = lane
        # False while another stream is entered inside.
        self.is_current = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        lane = self._lane
        if not lane or func in _SHAPE_ONLY:
            return func(*args, **kwargs)
        given = tensors_in((*args, *kwargs.values()))
        writes = written(func, args, kwargs)
        last = max(lane.last(given), lane.last(writes, writing=True))
        if not last or func.is_view:
            return func(*args, **kwargs)
        if not self.is_current:
            pass
        elif writes:
            if returns_only_written(func):
                lane.put(functools.partial(func, *args, **kwargs), given, writes)
                return returned(func, args, kwargs)
        elif has_shapes(func):
            results = empty_results(func, args, kwargs)
            if results is not None:
                lane.put(functools.partial(_fill, results, func, args, kwargs), given, tensors_in((results,)))
                return results
        lane.finish(last)
        return func(*args, **kwargs)


# They read a tensor's shape alone.
_aten = torch.ops.aten
_SHAPE_ONLY = frozenset(
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


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    places = _places_written(func)
    return tensors_in([args[index] if index < len(args) else kwargs.get(name) for index, name in places])


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """Tensors among an operator's arguments, one level of lists included."""
    found: list[torch.Tensor] = []
    for each in values:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            found += [one for one in each if isinstance(one, torch.Tensor)]
    return found


@functools.cache
def returns_only_written(func: Any) -> bool:
    """In-place operators, and those with one result to write."""
    return (
        len(_places_written(func)) == 1
        and len(func._schema.returns) == 1
        and func._schema.returns[0].alias_info is not None
        and _is_plain(func)
    )


def returned(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    (index, name) = _places_written(func)[0]
    return args[index] if index < len(args) else kwargs[name]


@functools.cache
def has_shapes(func: Any) -> bool:
    """Whether it returns only new tensors, whose shapes do not depend on values."""
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


# Bound of the cache of result shapes.
_MOST_CALLS = 4096
_returned_shapes: dict[Any, Any] = {}


def empty_results(func: Any, args: Any, kwargs: Any) -> Any:
    """Uninitialised results; None if their shapes are unknown."""
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
    """Cache key: `value` with tensors replaced by their shapes."""
    if isinstance(value, torch.Tensor):
        return _shape_of(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_shapes_in, value))
    if isinstance(value, dict):
        return tuple((name, _shapes_in(each)) for name, each in value.items())
    # 1, 1.0 and True compare equal but may give another dtype.
    return type(value), value


def _memory(shapes: Any) -> Any:
    """An uninitialised tensor for each shape; None for a result that is left out."""
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
        # No meta kernel, or bad inputs: the caller runs the operator at once, which raises the error.
        return None
    if isinstance(found, torch.Tensor):
        return _shape_of(found)
    # A gradient that is not requested is None.
    return tuple(None if each is None else _shape_of(each) for each in found)


def _fill(results: Any, func: Any, args: Any, kwargs: Any) -> None:
    for result, found in zip(tree_leaves(results), tree_leaves(func(*args, **kwargs)), strict=True):
        if result is not None:
            result.copy_(found)
