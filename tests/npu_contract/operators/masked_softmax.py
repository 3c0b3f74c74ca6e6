"""`mindspeed_lite.ops.masked_softmax` on npu_scaled_masked_softmax and its backward operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tests.npu_contract.definitions import (
    DTYPES,
    ContractCase,
    Mutation,
    Tensors,
    by_name,
    is_tensor,
)
from tests.npu_contract.recorder import Call, Tensor

UNFUSED = ("aten::_softmax",)


@dataclass(frozen=True)
class MaskedSoftmax(ContractCase):
    """`mindspeed_lite.ops.masked_softmax.masked_softmax`; scale is torch_npu's own default in float16 alone.

    mask: the shape of a mask that hides every third entry.
    """

    name: str
    shape: tuple[int, ...] = (2, 3, 32, 32)
    dtype: str = "bfloat16"
    causal: bool = True
    mask: tuple[int, ...] | None = None
    scale: float = 0.5

    operator = "masked_softmax"
    forward = "npu_scaled_masked_softmax"
    backward = "npu_scaled_masked_softmax_backward"
    saved = {"y": 0}  # noqa: RUF012

    def leaves(self, device: str) -> Tensors:
        dtype = getattr(torch, self.dtype)
        leaves = {"scores": torch.zeros(self.shape, dtype=dtype, device=device).requires_grad_()}
        if self.mask is not None:
            leaves["mask"] = self._mask().to(device)
        return leaves

    def run(self, leaves: Tensors) -> torch.Tensor:
        from mindspeed_lite.ops.masked_softmax import masked_softmax

        return masked_softmax(leaves["scores"], leaves.get("mask"), causal=self.causal, scale=self.scale)

    def arguments(self) -> Mapping[str, Any]:
        first = (1, 1) if self.mask is None else (1, 1, 1, 1, *self.mask)[-4:-2]
        return {
            "x": Tensor(self.dtype, self.shape, ""),
            "mask": Tensor("bool", (*first, *self.shape[2:]), ""),
            "scale": self.scale,
            "fixed_triu_mask": False,
        }

    def result(self) -> Tensor:
        return Tensor(self.dtype, self.shape, "")

    def effect(self, call: Call) -> list[str]:
        """True hides: what the mask must be, from the public operator's documentation."""
        hidden = torch.zeros(self.shape[2:], dtype=torch.bool)
        if self.causal:
            hidden = torch.arange(self.shape[3]) > torch.arange(self.shape[2])[:, None]
        if self.mask is not None:
            hidden = hidden | self._mask()
        # A row in which everything is hidden sees every key.
        hidden = hidden & ~hidden.expand(*hidden.shape[:-1], self.shape[3]).all(-1, keepdim=True)
        given = call.arguments["mask"].content
        right = hidden.expand(self.arguments()["mask"].shape).tolist()
        return [] if given == right else [f"mask hides {given}: want {right}"]

    def _mask(self) -> torch.Tensor:
        assert self.mask is not None
        mask = torch.arange(torch.Size(self.mask).numel()).reshape(self.mask) % 3 == 0
        if mask.dim() > 1:
            mask[..., 5:6, :] |= mask.shape[-2] > 1
        return mask


CASES = (
    MaskedSoftmax("causal"),
    MaskedSoftmax("float16", dtype="float16", scale=1.0),
    MaskedSoftmax("float32", dtype="float32"),
    MaskedSoftmax("nothing hidden", causal=False),
    MaskedSoftmax("more keys", causal=False, shape=(2, 3, 32, 96)),
    *(
        MaskedSoftmax(f"mask {'x'.join(map(str, mask))}", mask=mask, causal=False)
        for mask in ((2, 1, 32, 32), (1, 3, 32, 32), (2, 3, 32, 32), (2, 1, 1, 32), (32, 32), (32,))
    ),
    MaskedSoftmax("mask and causal", mask=(2, 1, 32, 32)),
)


# ---- what is documented ----


def softmax(call: Call) -> Iterator[str]:
    """npu_scaled_masked_softmax(x, mask, scale=, fixed_triu_mask=) -> y"""
    x, mask = call.arguments["x"], call.arguments["mask"]
    yield from by_name(call, "scale", "fixed_triu_mask")
    yield from _inputs(x, mask, call)
    if call.results is not None:
        yield from is_tensor("result 0 (y)", call.results[0], x.dtype, x.shape)


def softmax_backward(call: Call) -> Iterator[str]:
    """npu_scaled_masked_softmax_backward(y_grad, y, mask, scale, fixed_triu_mask) -> dx"""
    y = call.arguments["y"]
    yield from _inputs(y, call.arguments["mask"], call)
    yield from is_tensor("y_grad", call.arguments["y_grad"], y.dtype, y.shape)
    if call.results is not None:
        yield from is_tensor("result 0 (dx)", call.results[0], y.dtype, y.shape)


def _inputs(x: Tensor, mask: object, call: Call) -> Iterator[str]:
    if x.dtype not in DTYPES:
        yield f"x is {x.dtype}: want one of {', '.join(DTYPES)}"
    if x.dim != 4 or any(size % 32 or not 32 <= size <= 4096 for size in x.shape[2:]):
        yield f"x is {x}: want four dimensions, the last two multiples of 32 from 32 to 4096"
        return
    if not isinstance(mask, Tensor) or mask.dtype != "bool":
        yield f"mask is {mask}: want bool"
    elif (
        mask.dim != 4
        or mask.shape[2:] != x.shape[2:]
        or any(size not in (1, wanted) for size, wanted in zip(mask.shape[:2], x.shape[:2], strict=True))
    ):
        yield f"mask is {mask}: want [{x.shape[0]} or 1, {x.shape[1]} or 1, {x.shape[2]}, {x.shape[3]}]"
    if call.arguments["fixed_triu_mask"] is not False:
        yield "fixed_triu_mask is documented as not implemented: want False"


CONTRACTS = {"npu_scaled_masked_softmax": softmax, "npu_scaled_masked_softmax_backward": softmax_backward}

MUTATIONS = {
    "scale left out": Mutation("scale=scale, ", "", "scale is 1: want 0.5"),
    "scale by position": Mutation("hidden, scale=scale", "hidden, scale", "scale not passed by name"),
    "the reserved triangle": Mutation("fixed_triu_mask=False)", "fixed_triu_mask=True)", "want False"),
    "mask left as it was given": Mutation(
        ".expand(-1, -1, queries, keys)", "", "mask is bool[2, 1, 1, 32]: want [2 or 1, 3 or 1, 32, 32]"
    ),
    "a row without keys": Mutation("(hidden & ~empty)", "hidden", "mask hides"),
    "mask of another dtype": Mutation("hidden, scale=scale", "hidden.to(scores.dtype), scale=scale", "want bool"),
    "true sees": Mutation("npu_scaled_masked_softmax(scores, hidden", "npu_scaled_masked_softmax(scores, ~hidden",
                          "mask hides"),
    "a mask for the causal one": Mutation("hidden | _own_mask(", "_own_mask(", "mask is bool[1, 1, 32, 32]: want"),
    "a causal mask kept for one that is not": Mutation(
        "(device, queries, keys, causal)", "(device, queries, keys, True)", "mask hides"
    ),
    "scores without gradient": Mutation("(scores, hidden", "(scores.detach(), hidden", "does not require grad"),
}  # fmt: skip
