"""Forward passes in which a row's bits do not depend on the other rows or on their number.

PyTorch's CPU kernels break this in three ways. A matmul chooses its kernel by the number of rows. A sigmoid computes
the last elements of a thread's share by another formula. A sum with one result is split over the threads.
Within `scope` the functions of this module run instead: each tile of a matmul has `ROWS` rows, padded with zeros, so
that one kernel computes every row; sigmoids are made of exponentials, whose bits do not depend on the place; a sum with
one result becomes a sum with two.

A scope covers forward passes only. Gradients of weights add up rows by definition.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from mindspeed_lite.ops.rows import precision
from mindspeed_lite.ops.traced import is_traced

__all__ = ["CANN", "ROWS", "TORCH", "is_required", "require", "scope"]

# Reasons why a backend's rows depend on their batch.
CANN = "CANN chooses the tiling of a kernel by the number of rows"
TORCH = "PyTorch chooses its kernels on a device by the number of rows"

# Rows per tile: fewer read the weight more often, more are padding where tokens are few.
ROWS = 64
# torch's GRAIN_SIZE: smaller sums are not split over threads.
_SPLIT = 1 << 15
_ALIGNMENT = 64

_requests: list[object] = []
_thread = threading.local()


def is_required() -> bool:
    return bool(_requests)


def require() -> Callable[[], None]:
    """Turns on every `scope`, and restricts backends (`dispatch.require_batch_invariance`); returns the undo."""
    request = object()
    _requests.append(request)
    return lambda: _requests.remove(request) if request in _requests else None


@contextlib.contextmanager
def scope() -> Iterator[None]:
    """Runs PyTorch's functions on CPU tensors batch-invariantly in this thread, if required."""
    if not _requests or getattr(_thread, "is_inside", False):
        yield
        return
    _thread.is_inside = True
    try:
        with _Mode(), _uncompiled():
            yield
    finally:
        _thread.is_inside = False


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Runs compiled functions uncompiled: beyond dynamo's limit of recompilations they would change their rounding."""
    if not torch.compiler.is_compiling():
        with contextlib.suppress(RuntimeError):  # within a compiled function
            stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
            return stance
    raise RuntimeError("--batch-invariant runs models uncompiled: remove torch.compile or the flag")


def scoped(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with scope():
            return function(*args, **kwargs)

    return run


class _Mode(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        run = _FUNCTIONS.get(func)
        if run is None or not _is_served((*args, *kwargs.values())):
            return func(*args, **kwargs)
        return run(*args, **kwargs)


def _is_served(given: Sequence[Any]) -> bool:
    tensors = [each for each in given if isinstance(each, Tensor)]
    return bool(tensors) and all(each.device.type == "cpu" and not is_traced(each) for each in tensors)


# Matmuls


def matmul(input: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    if input.dim() == 1:
        return _stored(matmul(input[None], other).squeeze(-2), out)
    if other.dim() == 1:
        return _stored(matmul(input, other[:, None]).squeeze(-1), out)
    return _stored(_product(input, other), out)


def _mm(input: Tensor, mat2: Tensor, *, out: Tensor | None = None) -> Tensor:
    return _stored(_product(input, mat2), out)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = matmul(input, weight.t())
    return y if bias is None else y + bias


def _addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None
) -> Tensor:
    y = _product(mat1, mat2, alpha)
    return _stored(y if beta == 0 else y + beta * input, out)


def _baddbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None
) -> Tensor:
    return _addmm(input, batch1, batch2, beta=beta, alpha=alpha, out=out)


def _stored(y: Tensor, out: Tensor | None) -> Tensor:
    return y if out is None else out.copy_(y)


def _product(a: Tensor, b: Tensor, alpha: float = 1) -> Tensor:
    """alpha * a @ b for a [..., M, K] and b [K, N] or [..., K, N]."""
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        y: Tensor = _Product.apply(a, b, alpha)  # type: ignore[no-untyped-call]
        return y
    return _multiply(a, b, alpha)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, alpha: float) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.alpha = alpha
        return _multiply(a, b, alpha)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        a, b = ctx.saved_tensors
        dy = dy if ctx.alpha == 1 else dy * ctx.alpha
        da = torch.matmul(dy, b.mT).sum_to_size(a.shape) if ctx.needs_input_grad[0] else None
        db = None
        if ctx.needs_input_grad[1]:
            left, right = (a.flatten(0, -2), dy.flatten(0, -2)) if b.dim() == 2 else (a, dy)
            db = torch.matmul(left.mT, right).sum_to_size(b.shape)
        return da, db, None


def _multiply(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    batch = a.shape[:-2] if b.dim() == 2 else torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    y = a.new_empty(*batch, a.shape[-2], b.shape[-1])
    if b.dim() == 2:
        _in_tiles(a.reshape(-1, a.shape[-1]), b, alpha, y.view(-1, b.shape[1]))
        return y
    left, right = (t.expand(*batch, *t.shape[-2:]).reshape(-1, *t.shape[-2:]) for t in (a, b))
    for rows, columns, found in zip(left, right, y.view(-1, *y.shape[-2:]), strict=True):
        _in_tiles(rows, columns, alpha, found)
    return y


def _in_tiles(rows: Tensor, columns: Tensor, alpha: float, out: Tensor) -> None:
    """out = alpha * rows @ columns, all 2-D, in matmuls of one shape and alignment."""
    rows = rows.contiguous()
    if rows.data_ptr() % _ALIGNMENT:
        rows = rows.clone()
    for start in range(0, len(rows), ROWS):
        tile = rows[start : start + ROWS]
        count = len(tile)
        if count < ROWS:
            tile = F.pad(tile, (0, 0, 0, ROWS - count))
        if alpha == 1:
            found = torch.mm(tile, columns)
        else:
            found = torch.addmm(tile.new_empty(1), tile, columns, beta=0, alpha=alpha)
        out[start : start + count] = found[:count]


# Elementwise functions


def _sigmoid(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    wide = input.to(precision(input.dtype))
    return _stored((1 / (1 + torch.exp(-wide))).to(input.dtype), out)


def _silu(input: Tensor, inplace: bool = False) -> Tensor:
    wide = input.to(precision(input.dtype))
    return _stored((wide / (1 + torch.exp(-wide))).to(input.dtype), input if inplace else None)


def _gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "none":
        return F.gelu(input)
    x = input.to(precision(input.dtype))
    t = torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))
    return (0.5 * x * (1 + t)).to(input.dtype)


def _softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    x = input.to(precision(input.dtype)) * beta
    return (torch.where(x > threshold, x, torch.log1p(torch.exp(x.clamp(max=threshold)))) / beta).to(input.dtype)


# Sums


def _reduction(reduce: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`reduce(input, dim, ...)`; a sum with one result is made of two equal rows."""

    def run(input: Tensor, *args: Any, out: Tensor | None = None, **kwargs: Any) -> Tensor:
        dim = args[0] if args else kwargs.get("dim")
        if input.numel() < _SPLIT or not isinstance(dim, int) or input.numel() != input.shape[dim]:
            return _stored(reduce(input, *args, **kwargs), out)
        kwargs["dim"] = dim if dim < 0 else dim - input.dim()
        return _stored(reduce(torch.stack([input, input]), *args[1:], **kwargs)[0], out)

    return run


def _unserved(name: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"--batch-invariant: {name} has no form whose rows are independent of their batch: remove the flag or what "
            "calls it"
        )

    return run


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.matmul: matmul,
    Tensor.matmul: matmul,
    Tensor.__matmul__: matmul,
    torch.mm: _mm,
    Tensor.mm: _mm,
    torch.bmm: _mm,
    Tensor.bmm: _mm,
    F.linear: _linear,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    torch.baddbmm: _baddbmm,
    Tensor.baddbmm: _baddbmm,
    torch.sigmoid: _sigmoid,
    Tensor.sigmoid: _sigmoid,
    F.silu: _silu,
    F.gelu: _gelu,
    F.softplus: _softplus,
    **{each: _reduction(each) for each in (torch.sum, torch.mean, torch.logsumexp)},
    **{each: _reduction(each) for each in (Tensor.sum, Tensor.mean, Tensor.logsumexp)},
    **{
        each: _unserved(f"torch.{each.__name__}")
        for each in (torch.einsum, torch.tensordot, torch.mv, torch.dot, F.scaled_dot_product_attention, F.conv1d)
    },
}
