"""Fake tensors whose values a training may read: small integers are computed, the rest reads as 1 or False."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from mindspeed_lite.ops import rms_norm as ops_rms_norm

aten = torch.ops.aten
# Within it tensors have storage.
with_storage: Any = _disable_current_modes
# Elements up to which values are computed: counts of tokens per expert, shapes, scalars.
_KNOWN = 1 << 14


class StoragelessMode(FakeTensorMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Fake tensors whose unknown values read as 1, or False for bool."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        # Called with each operator, its arguments and result.
        self.observe: Callable[[Any, Any, Any], None] | None = None
        fake_tensor.CONSTANT_NUMEL_LIMIT = _KNOWN

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args and isinstance(args[0], FakeTensor) else None
        if func is aten._local_scalar_dense.default and first is not None:
            return _unknown(first.dtype) if first.constant is None else first.constant.item()
        if func is aten.masked_select.default and (share := _share(args[1])) is not None:
            return args[0].new_empty(round(args[1].numel() * share))
        result = super().dispatch(func, types, args, kwargs)
        if self.observe is not None:
            self.observe(func, args, result)
        if isinstance(result, FakeTensor):
            if func in _FACTORIES and result.numel() <= _KNOWN and not result.dtype.is_floating_point:
                with with_storage():
                    values = func(*args, **{**(kwargs or {}), "device": torch.device("cpu")})
                know(result, values)
            share = _share(first)
            if func in _SCATTERS and first is not None:
                result.true_share = args[2].numel() / first.numel()  # type: ignore[attr-defined]
            elif share is not None and func.overloadpacket in _KEEPING:
                result.true_share = share  # type: ignore[attr-defined]
            elif share is not None and func is aten.sum.dim_IntList and first is not None:
                know(result, _even(round(first.numel() * share), result))
        return result


# Makers of integers, such as indices. Small floating-point tensors may be weights, whose views share storage.
_FACTORIES = {aten.arange.default, aten.arange.start, aten.arange.start_step, aten.zeros.default, aten.ones.default,
              aten.full.default}  # fmt: skip
# Operators on a mask of chosen experts: they make it, or keep the share of its elements that are true.
_SCATTERS = {aten.scatter.value, aten.scatter_.value}
_KEEPING = {
    aten.t, aten.transpose, aten.permute, aten.clone, aten._to_copy, aten.detach, aten.view, aten._unsafe_view,
    aten.alias, aten.slice, aten.unsqueeze, aten.squeeze, aten.split, aten.ne, aten.gt, aten.mul,
}  # fmt: skip


def _share(tensor: Any) -> float | None:
    return getattr(tensor, "true_share", None)


def _even(total: int, like: torch.Tensor) -> torch.Tensor:
    """Integers that add up to `total` and differ by at most one."""
    with with_storage():
        bounds = torch.arange(like.numel() + 1, dtype=torch.int64) * total // max(1, like.numel())
        return bounds.diff().reshape(like.shape).to(like.dtype)


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


def install() -> None:
    tensor_class: Any = torch.Tensor
    own = tensor_class.numpy

    def numpy(self: torch.Tensor, **kwargs: Any) -> Any:
        if isinstance(self, FakeTensor):
            with with_storage():
                values = self.constant
                return own(torch.ones(self.shape, dtype=self.dtype) if values is None else values, **kwargs)
        return own(self, **kwargs)

    tensor_class.numpy = numpy
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


def claim(device: str) -> None:
    """Runs operators that torch composes on the CPU as the one kernel they are on a device."""
    functional: Any = torch.nn.functional

    def dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return torch.native_dropout(x, p, True)[0] if training and p else x

    def rms_norm(x: torch.Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> torch.Tensor:
        return ops_rms_norm.rms_norm(x, x.new_ones(shape) if weight is None else weight, eps or 1e-6)

    if device != "cpu":
        functional.dropout = dropout
    if device == "cuda":
        functional.rms_norm = rms_norm


class _HostLoader:
    """Batches of a data loader with storage, read in this process."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __iter__(self) -> _HostLoader:
        return self

    def __next__(self) -> Any:
        with with_storage():
            return next(self._batches)


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
