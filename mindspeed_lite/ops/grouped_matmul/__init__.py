"""The linear layers of a mixture of experts: one matrix product per expert over the rows that are its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mindspeed_lite.ops.dispatch import Operator
from mindspeed_lite.ops.grouped_matmul import reference
from mindspeed_lite.ops.grouped_matmul.autograd import TakeGradients
from mindspeed_lite.ops.grouped_matmul.groups import Counts

__all__ = [
    "OPERATOR",
    "Case",
    "Counts",
    "TakeGradients",
    "accumulate_weight_gradients",
    "grouped_matmul",
    "weight_gradients",
]

Tensors = Sequence[torch.Tensor]


class Case(NamedTuple):
    """What decides which backend can serve a call."""

    device: str
    dtype: torch.dtype
    experts: int
    widest: int
    """The larger one of N and K."""
    biased: bool
    main_dtype: torch.dtype | None
    """Of the main gradients that are added to; None where none are."""
    contiguous: bool
    """Whether they all are."""


OPERATOR = Operator(
    "grouped_matmul",
    reference.grouped_matmul,
    {
        "cpu": "mindspeed_lite.ops.grouped_matmul.cpu",
        "cuda": "mindspeed_lite.ops.grouped_matmul.cuda",
        "npu": "mindspeed_lite.ops.grouped_matmul.npu",
    },
)


def grouped_matmul(
    x: torch.Tensor,
    weights: Tensors | torch.Tensor,
    counts: Counts,
    biases: Tensors | None = None,
    *,
    transposed: bool = True,
    take_gradients: TakeGradients | None = None,
) -> torch.Tensor:
    """y_e = x_e w_e^T + b_e, or y_e = x_e w_e unless `transposed`, for the rows x_e of every expert e.

    x: [T, K], rows sorted by expert, any strides; weights: E tensors [N, K], as torch.nn.Linear has them, or [K, N]
    unless `transposed`; or one tensor of them all, [E, ...]. Separate ones are not copied together where the device
    can do without. counts: how many rows each expert has, E numbers that add up to T: int64 on x's device (then the
    host neither reads nor checks them), or on the host. biases: E tensors [N] or None. x, weights and biases have one
    dtype. y: [T, N] in that dtype, contiguous, summed in fp32 (float64 for float64) and rounded once.

    For the backward pass x, weights and counts are kept. An expert without rows gets zeros for its gradients.
    `take_gradients` is called there once in place of `weight_gradients`, with the same arguments, and returns what
    autograd is given for each weight: None where the gradient is kept elsewhere. It goes with a sequence of weights
    [N, K].

    Raises ValueError for shapes, dtypes and counts that do not fit.
    """
    matrices = weights.unbind() if isinstance(weights, torch.Tensor) else weights
    width = _check(x, matrices, biases, transposed)
    if take_gradients is not None and not (matrices is weights and transposed):
        raise ValueError("grouped_matmul: take_gradients goes with a sequence of weights [N, K]")
    known = _known(counts, x, len(matrices))
    case = _case(x, len(matrices), width, biased=biases is not None)
    y: torch.Tensor = _module(case, x, width).grouped_matmul(x, weights, known, biases, transposed, take_gradients)
    return y


def weight_gradients(dy: torch.Tensor, x: torch.Tensor, counts: Counts) -> list[torch.Tensor]:
    """dw_e = dy_e^T x_e: the gradients of the weights of y_e = x_e w_e^T.

    dy: [T, N] and x: [T, K] in one dtype, any strides; counts as for `grouped_matmul`. Returns E tensors [N, K] in
    that dtype, summed in fp32 and rounded once, which may be views of one; zeros for an expert without rows. It is a
    step of a backward pass and not differentiable itself.
    """
    _check_pair(dy, x)
    known = _known(counts, x, len(counts))
    case = _case(x, len(counts), dy.shape[1])
    with torch.no_grad():
        return list(_module(case, x, dy.shape[1]).weight_gradients(dy, x, known))


def accumulate_weight_gradients(main_grads: Tensors, dy: torch.Tensor, x: torch.Tensor, counts: Counts) -> None:
    """main_grad_e += dy_e^T x_e in place, for every expert e.

    main_grads: E tensors [N, K], all in fp32 or all in the dtype of x (views of one tensor [E, N, K] are a case that
    devices may be quicker at); dy: [T, N] and x: [T, K] in one dtype, any strides; counts as for `grouped_matmul`.
    Sums are added as `mindspeed_lite.ops.accumulate_wgrad.accumulate_wgrad` adds one. The main gradient of an expert
    without rows stays as it is. Not differentiable.
    """
    _check_pair(dy, x)
    known = _known(counts, x, len(counts))
    shape = (dy.shape[1], x.shape[1])
    if len(main_grads) != len(counts) or any(each.shape != shape for each in main_grads):
        raise ValueError(
            f"grouped_matmul: want {len(counts)} main gradients {list(shape)} for dy {list(dy.shape)} and x "
            f"{list(x.shape)}, not {_shapes(main_grads)}"
        )
    dtype = main_grads[0].dtype
    if dtype not in (x.dtype, torch.float32) or any(each.dtype != dtype for each in main_grads):
        dtypes = ", ".join(sorted({str(each.dtype) for each in main_grads}))
        raise ValueError(f"grouped_matmul: main gradients are {dtypes} and x {x.dtype}: want all in that or float32")
    case = _case(x, len(counts), dy.shape[1], main_grads=main_grads)
    with torch.no_grad():
        _module(case, x, dy.shape[1]).accumulate_weight_gradients(main_grads, dy, x, known)


def _case(
    x: torch.Tensor, experts: int, width: int, *, biased: bool = False, main_grads: Tensors | None = None
) -> Case:
    return Case(
        x.device.type,
        x.dtype,
        experts,
        max(width, x.shape[1]),
        biased,
        None if main_grads is None else main_grads[0].dtype,
        main_grads is None or all(each.is_contiguous() for each in main_grads),
    )


def _module(case: Case, x: torch.Tensor, width: int) -> Any:
    """The module that serves a case: that of the implementation chosen for `grouped_matmul`."""
    # Kernels are not made for nothing to do.
    return reference if x.numel() == 0 or width == 0 else sys.modules[OPERATOR.choose(case).__module__]


def _check(x: torch.Tensor, weights: Tensors, biases: Tensors | None, transposed: bool) -> int:
    """N, or ValueError for what does not fit."""
    first = weights[0].shape if len(weights) else ()
    form = "[N, K]" if transposed else "[K, N]"
    if x.dim() != 2 or len(first) != 2 or first[1 if transposed else 0] != x.shape[1]:
        raise ValueError(f"grouped_matmul: want x [T, K] and weights {form}, not {list(x.shape)} and {list(first)}")
    width = first[0 if transposed else 1]
    for what, tensors, shape in (("weights", weights, first), ("biases", biases or (), (width,))):
        if any(each.shape != shape for each in tensors):
            raise ValueError(f"grouped_matmul: want {what} {list(shape)} for all experts, not {_shapes(tensors)}")
        dtypes = {each.dtype for each in tensors} - {x.dtype}
        if dtypes:
            raise ValueError(
                f"grouped_matmul: {what} are {', '.join(map(str, dtypes))} and x {x.dtype}: want one dtype"
            )
    if biases is not None and len(biases) != len(weights):
        raise ValueError(f"grouped_matmul: {len(biases)} biases for {len(weights)} experts")
    return int(width)


def _check_pair(dy: torch.Tensor, x: torch.Tensor) -> None:
    if dy.dim() != 2 or x.dim() != 2 or dy.shape[0] != x.shape[0] or dy.dtype != x.dtype:
        raise ValueError(
            f"grouped_matmul: want dy [T, N] and x [T, K] in one dtype, not {list(dy.shape)} in {dy.dtype} and "
            f"{list(x.shape)} in {x.dtype}"
        )


def _known(counts: Counts, x: torch.Tensor, experts: int) -> Counts:
    """Counts that fit: a tensor if they are on x's device and that is not the host, else a list."""
    given = list(counts.shape) if isinstance(counts, torch.Tensor) else [len(counts)]
    if given != [experts] or not experts:
        raise ValueError(f"grouped_matmul: counts {given} for {experts} experts, of which there must be some")
    if isinstance(counts, torch.Tensor):
        if counts.dtype != torch.int64 or counts.device not in (x.device, torch.device("cpu")):
            raise ValueError(
                f"grouped_matmul: counts are {counts.dtype} on {counts.device}: want int64 on {x.device} or on cpu"
            )
        if counts.device.type != "cpu" or not _readable(counts):
            return counts
        counts = counts.tolist()
    if any(count < 0 for count in counts) or sum(counts) != x.shape[0]:
        raise ValueError(f"grouped_matmul: counts {list(counts)} do not make up {x.shape[0]} rows")
    return list(counts)


def _readable(counts: torch.Tensor) -> bool:
    """Whether it has values that can be read: a fake one has not."""
    return type(counts) is torch.Tensor and not torch.compiler.is_compiling()


def _shapes(tensors: Tensors) -> str:
    return ", ".join(sorted({str(list(each.shape)) for each in tensors}))
