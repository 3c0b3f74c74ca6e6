"""Linear layers of MoE experts: one matmul per expert over its own rows."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed_lite.ops import batch_invariant
from mindspeed_lite.ops.batch_invariant import CANN, TORCH
from mindspeed_lite.ops.dispatch import Operator
from mindspeed_lite.ops.grouped_matmul import reference
from mindspeed_lite.ops.grouped_matmul.autograd import Counts, TakeGradients, on_device, on_host, run

__all__ = [
    "OPERATOR",
    "Case",
    "Counts",
    "TakeGradients",
    "accumulate_weight_gradients",
    "grouped_matmul",
    "weight_gradients",
]

Tensors = Sequence[Tensor]
# Loops over a hundred experts cost tens of microseconds in Python, and a tenth in C.
_SHAPE_OF, _DTYPE_OF = operator.attrgetter("shape"), operator.attrgetter("dtype")


class Case(NamedTuple):
    """Backend selection key; widest: the larger of N and K. contiguous: of all main gradients."""

    device: str
    dtype: torch.dtype
    experts: int
    widest: int
    biased: bool
    contiguous: bool


OPERATOR = Operator(
    "grouped_matmul",
    reference.grouped_matmul,
    batch_dependence={"reference": TORCH, "cpu": "", "cuda": "", "npu": CANN},
)


def grouped_matmul(
    x: Tensor, weights: Tensors, counts: Counts, biases: Tensors | None = None, *, transposed: bool = True,
    take_gradients: TakeGradients | None = None,
) -> Tensor:  # fmt: skip
    """y_e = x_e w_e^T + b_e, or y_e = x_e w_e unless `transposed`, for the rows x_e of every expert e.

    x: [T, K], sorted by expert. weights: E tensors [N, K] (as torch.nn.Linear), or [K, N] unless `transposed`. counts:
    rows per expert, with sum T; on the host, or int64 on x's device (not read by the host). biases: E tensors [N].
    y: [T, N], contiguous, summed in fp32 (float64 for float64), rounded once. Raises ValueError.

    Saves x, weights and counts. An expert without rows gets zero gradients. `take_gradients` replaces
    `weight_gradients` in backward; it returns None for gradients stored elsewhere and needs weights [N, K].
    """
    width = _check(x, weights, biases, transposed)
    if take_gradients is not None and not transposed:
        raise ValueError("grouped_matmul: take_gradients goes with weights [N, K]")
    backend, known = _backend(x, width, counts, len(weights), biased=biases is not None)
    if backend is reference and torch.compiler.is_compiling() and take_gradients is None:
        return reference.grouped_matmul(x, weights, known, biases, transposed)
    with batch_invariant.scope():
        return run(backend, x, weights, known, biases, transposed, take_gradients)


def weight_gradients(dy: Tensor, x: Tensor, counts: Counts) -> list[Tensor]:
    """dw_e = dy_e^T x_e: the gradients of the weights of y_e = x_e w_e^T.

    dy: [T, N] and x: [T, K] in one dtype. Returns E tensors [N, K] in that dtype, possibly views of one, summed in fp32
    and rounded once. Not differentiable.
    """
    _check_pair(dy, x)
    backend, counts = _backend(x, dy.shape[1], counts, len(counts))
    with torch.no_grad():
        return list(backend.weight_gradients(dy, x, counts))


def accumulate_weight_gradients(main_grads: Tensors, dy: Tensor, x: Tensor, counts: Counts) -> None:
    """main_grad_e += dy_e^T x_e in place, for every expert e.

    main_grads: E tensors [N, K], all fp32 or all in x's dtype; dy: [T, N] and x: [T, K] in one dtype. Rounding as in
    `ops.accumulate_wgrad`. Not differentiable.
    """
    _check_pair(dy, x)
    shape = (dy.shape[1], x.shape[1])
    is_contiguous = all(map(Tensor.is_contiguous, main_grads))
    backend, counts = _backend(x, dy.shape[1], counts, len(counts), contiguous=is_contiguous)
    if len(main_grads) != len(counts) or {*map(_SHAPE_OF, main_grads)} != {shape}:
        raise ValueError(
            f"grouped_matmul: want {len(counts)} main gradients {list(shape)} for dy {list(dy.shape)} and x "
            f"{list(x.shape)}, not {_shapes(main_grads)}"
        )
    dtype = main_grads[0].dtype
    if dtype not in (x.dtype, torch.float32) or {*map(_DTYPE_OF, main_grads)} != {dtype}:
        dtypes = ", ".join(sorted({str(each.dtype) for each in main_grads}))
        raise ValueError(f"grouped_matmul: main gradients are {dtypes} and x {x.dtype}: want all in that or float32")
    with torch.no_grad():
        backend.accumulate_weight_gradients(main_grads, dy, x, counts)


def _backend(
    x: Tensor, width: int, counts: Counts, experts: int, *, biased: bool = False, contiguous: bool = True
) -> tuple[Any, Any]:
    """Backend module of a call, and the counts on the device that it reads them from."""
    known = _known(counts, x, experts)
    case = Case(x.device.type, x.dtype, experts, max(width, x.shape[1]), biased, contiguous)
    module = OPERATOR.module(case, x) if x.numel() and width else reference
    return module, on_host(known, x.shape[0]) if module.COUNTS_ON_HOST else on_device(known, x.device)


def _check(x: Tensor, weights: Tensors, biases: Tensors | None, transposed: bool) -> int:
    """Returns N."""
    first = weights[0].shape if len(weights) else ()
    form = "[N, K]" if transposed else "[K, N]"
    if x.dim() != 2 or len(first) != 2 or first[1 if transposed else 0] != x.shape[1]:
        raise ValueError(f"grouped_matmul: want x [T, K] and weights {form}, not {list(x.shape)} and {list(first)}")
    width = first[0 if transposed else 1]
    for what, tensors, shape in (("weights", weights, first), ("biases", biases or (), (width,))):
        if {*map(_SHAPE_OF, tensors)} - {shape}:
            raise ValueError(f"grouped_matmul: want {what} {list(shape)} for all experts, not {_shapes(tensors)}")
        dtypes = {*map(_DTYPE_OF, tensors)} - {x.dtype}
        if dtypes:
            raise ValueError(
                f"grouped_matmul: {what} are {', '.join(map(str, dtypes))} and x {x.dtype}: want one dtype"
            )
    if biases is not None and len(biases) != len(weights):
        raise ValueError(f"grouped_matmul: {len(biases)} biases for {len(weights)} experts")
    return int(width)


def _check_pair(dy: Tensor, x: Tensor) -> None:
    if dy.dim() != 2 or x.dim() != 2 or dy.shape[0] != x.shape[0] or dy.dtype != x.dtype:
        raise ValueError(
            f"grouped_matmul: want dy [T, N] and x [T, K] in one dtype, not {list(dy.shape)} in {dy.dtype} and "
            f"{list(x.shape)} in {x.dtype}"
        )


def _known(counts: Counts, x: Tensor, experts: int) -> Counts:
    """Checked counts: a tensor if on a device, else a list."""
    given = list(counts.shape) if isinstance(counts, Tensor) else [len(counts)]
    if given != [experts] or not experts:
        raise ValueError(f"grouped_matmul: counts {given} for {experts} experts, of which there must be some")
    if isinstance(counts, Tensor):
        if counts.dtype != torch.int64 or counts.device not in (x.device, torch.device("cpu")):
            raise ValueError(
                f"grouped_matmul: counts are {counts.dtype} on {counts.device}: want int64 on {x.device} or on cpu"
            )
        if counts.device.type != "cpu" or not _readable(counts):
            return counts
        counts = counts.tolist()
    if min(counts) < 0 or sum(counts) != x.shape[0]:
        raise ValueError(f"grouped_matmul: counts {list(counts)} do not make up {x.shape[0]} rows")
    return list(counts)


def _readable(counts: Tensor) -> bool:
    return type(counts) is Tensor and not torch.compiler.is_compiling()


def _shapes(tensors: Tensors) -> str:
    return ", ".join(sorted({str(list(each.shape)) for each in tensors}))
