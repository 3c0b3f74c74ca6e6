"""Fake tensors whose values a training may read: small integers are computed, the rest reads as 1 or False."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._guards import active_fake_mode
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
# Within it tensors have storage.
with_storage: Any = _disable_current_modes
# Tokens of the first expert over the mean.
expert_load = 1.0
# Called when the host reads values of a tensor.
on_read: list[Callable[[], None]] = []
# Elements up to which values are computed: counts of tokens per expert, shapes, scalars, tokens of a batch.
KNOWN = 1 << 16


class StoragelessMode(FakeTensorMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Fake tensors whose unknown values read as 1, or False for bool."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        # Called with each operator, its arguments and result.
        self.observe: Callable[..., None] | None = None
        # In an operator's shape, which may be found by others.
        self.is_within = False
        fake_tensor.CONSTANT_NUMEL_LIMIT = KNOWN

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.observe is None or self.is_within:
            return self._shaped(func, types, args, kwargs)
        self.is_within = True
        try:
            result = self._shaped(func, types, args, kwargs)
        finally:
            self.is_within = False
        self.observe(func, args, kwargs or {}, result)
        return result

    def _shaped(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        first = args[0] if args and isinstance(args[0], FakeTensor) else None
        if func is aten._local_scalar_dense.default and first is not None:
            return _unknown(first.dtype) if first.constant is None else first.constant.item()
        if func is aten.masked_select.default:
            return args[0].new_empty(_selected(args[1]))
        if func is aten.nonzero.default:
            places = args[0].new_empty((_selected(args[0]), args[0].dim()), dtype=torch.int64)
            if (mask := known(args[0])) is not None:
                with with_storage():
                    know(places, mask.nonzero())
            return places
        if _is_direct(func) and self._have_no_values((*args, *(kwargs or {}).values())):
            with in_kernel_invocation_manager(self):
                found = func(*args, **(kwargs or {}))
            return [*map(self._faked, found)] if isinstance(found, (list, tuple)) else self._faked(found)
        result: Any = super().dispatch(func, types, args, kwargs)
        is_small = isinstance(result, FakeTensor) and result.numel() <= KNOWN
        if func in _FACTORIES and is_small and not result.dtype.is_floating_point:
            with with_storage():
                values = func(*args, **{**(kwargs or {}), "device": torch.device("cpu")})
            know(result, values)
        if func in _SCATTERS:
            keep_share(result, args[2].numel() / args[0].numel())
        elif (share := share_of(first)) is not None:
            self._carry_share(func, args[0], share, result)
        return result

    def _have_no_values(self, args: Iterable[Any]) -> bool:
        """True if all tensors are this mode's, without storage, and nothing is known of their values."""
        for each in args:
            if isinstance(each, (list, tuple)):
                if not self._have_no_values(each):
                    return False
            elif isinstance(each, torch.Tensor) and not (
                isinstance(each, FakeTensor)
                and each.fake_mode is self
                and each.constant is None
                and share_of(each) is None
            ):
                return False
        return True

    def _faked(self, tensor: torch.Tensor) -> FakeTensor:
        return tensor if isinstance(tensor, FakeTensor) else FakeTensor(self, tensor, torch.device("cpu"))

    @staticmethod
    def _carry_share(func: Any, mask: torch.Tensor, share: float, result: Any) -> None:
        if func is aten.sum.dim_IntList:
            # Of a mask [tokens, experts]: each expert's tokens.
            is_by_expert = result.dim() == 1 and mask.dim() == 2 and result.shape[0] == mask.shape[1] != mask.shape[0]
            know(result, _spread(round(mask.numel() * share), result, expert_load if is_by_expert else 1.0))
        for each in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(each, FakeTensor) and (func.is_view or each.numel() == mask.numel()):
                keep_share(each, share)


# Operators, besides those by element, whose shapes torch's own kernels find on any device, ten times as fast as its
# fake tensors.
_DIRECT = {
    aten.view, aten._unsafe_view, aten.slice, aten.as_strided, aten.detach, aten.expand, aten.t, aten.transpose,
    aten.unsqueeze, aten.squeeze, aten.select, aten.permute, aten.split, aten.split_with_sizes, aten.alias,
    aten.mm, aten.bmm, aten.addmm, aten.cat, aten.constant_pad_nd, aten.copy_, aten.zero_, aten.fill_,
}  # fmt: skip


@functools.cache
def _is_direct(func: Any) -> bool:
    is_by_element = torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
    is_known = func.overloadpacket in _DIRECT or (is_by_element and func.namespace == "aten")
    return is_known and torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), "Meta")


# Makers of integers, such as indices. Small floating-point tensors may be weights, whose views share storage.
_FACTORIES = {aten.arange.default, aten.arange.start, aten.arange.start_step, aten.zeros.default, aten.ones.default,
              aten.full.default}  # fmt: skip
# Operators that make a mask of chosen experts. Of those that follow only the share of true elements is known.
_SCATTERS = {aten.scatter.value, aten.scatter_.value}


def share_of(tensor: Any) -> float | None:
    return getattr(tensor, "true_share", None)


def keep_share(tensor: Any, share: float) -> None:
    tensor.true_share = share


def _selected(mask: torch.Tensor) -> int:
    """How many elements are true; all of an unknown mask."""
    if (values := known(mask)) is not None:
        with with_storage():
            return int(values.count_nonzero())
    share = share_of(mask)
    return mask.numel() if share is None else round(mask.numel() * share)


def _spread(total: int, like: torch.Tensor, load: float) -> torch.Tensor:
    """Integers that add up to `total`; the first is `load` times the mean, others differ by at most one."""
    number = like.numel()
    first = min(total, round(total * load / number)) if load > 1 and number > 1 else 0
    with with_storage():
        bounds = torch.arange(number + (not first), dtype=torch.int64) * (total - first) // max(1, number - bool(first))
        counts = torch.cat([torch.tensor([first] if first else [], dtype=torch.int64), bounds.diff()])
        return counts.reshape(like.shape).to(like.dtype)


def known(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values that can be read, or None."""
    return tensor.constant if isinstance(tensor, FakeTensor) else None


def know(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Give a tensor without storage values that can be read."""
    assert isinstance(tensor, FakeTensor)
    tensor.constant = values
    tensor.fake_mode.fake_tensor_converter.add_constant_storage_mapping(tensor)


def _unknown(dtype: torch.dtype) -> Any:
    if dtype is torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 1


def _read(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, FakeTensor):
        return tensor
    for each in on_read:
        each()
    if tensor.constant is not None:
        return tensor.constant
    return torch.full(tensor.shape, _unknown(tensor.dtype), dtype=tensor.dtype)


def install() -> None:
    tensor_class: Any = torch.Tensor
    own, own_list, own_format = tensor_class.numpy, tensor_class.tolist, tensor_class.__format__

    def numpy(self: torch.Tensor, **kwargs: Any) -> Any:
        with with_storage():
            return own(_read(self), **kwargs)

    def to_list(self: torch.Tensor) -> Any:
        with with_storage():
            return own_list(_read(self))

    def to_text(self: torch.Tensor, form: str) -> Any:
        with with_storage():
            return own_format(_read(self), form)

    tensor_class.numpy, tensor_class.tolist, tensor_class.__format__ = numpy, to_list, to_text
    # FakeTensor's own makes a tensor of every element.
    if "tolist" in vars(FakeTensor):
        del FakeTensor.tolist
    own_tensor = torch.tensor

    def tensor(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return own_tensor(_plain(data), *args, **kwargs)

    torch.tensor = tensor
    torch.nn.Module._apply = _apply  # type: ignore[method-assign]
    _read_on_host()


def _plain(data: Any) -> Any:
    if isinstance(data, (list, tuple)):
        return [_plain(each) for each in data]
    return data.tolist() if isinstance(data, FakeTensor) else data


def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
    """`Module._apply` that keeps parameters: torch's swaps those without storage, which others may hold."""
    for child in self.children() if recurse else ():
        child._apply(fn)
    with torch.no_grad():
        for parameter in self._parameters.values():
            if parameter is not None:
                parameter.data = fn(parameter.data)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


class _HostLoader:
    """Batches of a data loader with storage, read in this process."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __iter__(self) -> _HostLoader:
        return self

    def __next__(self) -> Any:
        with with_storage():
            batch = next(self._batches)
        return tree_map_only(torch.Tensor, _known_integers, batch)


def _known_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Tokens whose values set shapes, such as those of images, as tensors without storage."""
    mode: Any = active_fake_mode()
    if mode is None or tensor.is_floating_point() or tensor.numel() > KNOWN:
        return tensor
    found: torch.Tensor = mode.from_tensor(tensor)
    know(found, tensor)
    return found


def _read_on_host() -> None:
    loader: Any = torch.utils.data.DataLoader
    own_init, own_iter = loader.__init__, loader.__iter__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        here = {"num_workers": 0, "persistent_workers": False, "prefetch_factor": None, "pin_memory": False}
        own_init(self, *args, **{**kwargs, **here})

    def iterate(self: Any) -> Any:
        with with_storage():
            return _HostLoader(own_iter(self))

    loader.__init__, loader.__iter__ = init, iterate
