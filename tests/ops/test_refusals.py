"""What each backend refuses, by name, and what is next to it and taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mindspeed_lite.ops import (
    accumulate_wgrad,
    activation,
    adamw,
    bias_dropout_add,
    grouped_matmul,
    masked_softmax,
    moe_router,
    norm,
    permute,
    rope,
)
from mindspeed_lite.ops.dispatch import operator
from mindspeed_lite.ops.moe_router.reference import PRE_SOFTMAX, SIGMOID, SOFTMAX, SQRTSOFTPLUS, Form, Groups

pytest.importorskip("triton")

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

CASES: dict[str, Any] = {
    "accumulate_wgrad": accumulate_wgrad.Case("any", BF16, FP32, True),
    "activation": activation.Case("any", BF16, "swiglu", None, None, False),
    "adamw": adamw.Case("any", FP32, BF16, None, True, True),
    "bias_dropout_add": bias_dropout_add.Case("any", BF16, FP32),
    "grouped_matmul": grouped_matmul.Case("any", BF16, 64, 4096, False, True),
    "masked_softmax": masked_softmax.Case("any", BF16, True, True),
    "moe_router": moe_router.Case("any", BF16, 64, Form(SIGMOID, 2)),
    "permute": permute.Case("any", FP32, FP32, True, False),
    "rms_norm": norm.Case("any", BF16, BF16, False, False),
    "rope": rope.Case("any", BF16, "half", 8, 1, 2, False, False),
}

# Operator, backend, changes of the case, words of the only reason; none if it is taken.
ROWS: list[tuple[str, str, dict[str, Any], str]] = [
    ("accumulate_wgrad", "cuda", {}, ""),
    ("accumulate_wgrad", "cuda", {"dtype": FP32}, ""),
    ("accumulate_wgrad", "cuda", {"main_dtype": FP16}, "cuBLAS takes 16-bit inputs into float32"),
    ("accumulate_wgrad", "npu", {"dtype": FP64, "main_dtype": FP32}, "takes float16 and bfloat16"),
    ("accumulate_wgrad", "npu", {"main_dtype": FP64}, "accumulates in float32"),
    ("accumulate_wgrad", "npu", {"contiguous": False}, "not contiguous"),
    ("activation", "cuda", {"weights_dtype": FP64}, "would round to float32"),
    ("activation", "npu", {"kind": "quick_geglu"}, "torch_npu has an operator for"),
    ("activation", "npu", {"kind": "squared_relu"}, "torch_npu has an operator for"),
    ("activation", "npu", {"has_clamp_or_offset": True}, "limit or an offset"),
    ("activation", "npu", {"dtype": FP64}, "float64"),
    ("adamw", "cpu", {"grad_dtype": FP16}, "gradients in torch.float16"),
    ("adamw", "cuda", {"grad_dtype": FP64}, "gradients in torch.float64"),
    ("adamw", "cuda", {"out_dtype": torch.int32}, "copies in torch.int32"),
    ("adamw", "cuda", {"contiguous": False}, "not contiguous"),
    ("adamw", "npu", {"decoupled": False}, "L2 regularisation"),
    ("bias_dropout_add", "cpu", {"dtype": FP16}, "float16"),
    ("bias_dropout_add", "cpu", {"bias_dtype": FP64}, "float64"),
    ("grouped_matmul", "cuda", {"contiguous": False}, "a main gradient is not contiguous"),
    ("grouped_matmul", "npu", {"biased": True}, ""),
    ("grouped_matmul", "npu", {"experts": 1024, "dtype": FP32}, ""),
    ("grouped_matmul", "npu", {"biased": True, "experts": 1, "dtype": FP32}, ""),
    ("grouped_matmul", "npu", {"experts": 1025}, "1025 experts"),
    ("grouped_matmul", "npu", {"widest": 65536}, "a dimension of 65536"),
    ("grouped_matmul", "npu", {"biased": True, "experts": 129}, "biases of 129 experts"),
    ("grouped_matmul", "npu", {"biased": True, "dtype": FP32}, "biases of 64 experts in torch.float32"),
    ("masked_softmax", "npu", {}, ""),
    ("masked_softmax", "npu", {"is_tiled": False}, "32, 64, 96"),
    ("masked_softmax", "npu", {"dtype": FP16}, "overflow"),
    ("masked_softmax", "npu", {"dtype": FP16, "is_scaled": False}, ""),
    ("masked_softmax", "npu", {"dtype": FP64}, "float64"),
    ("moe_router", "cpu", {"form": Form(SIGMOID, 6, Groups(4, 2, 3))}, "3 best"),
    ("moe_router", "cuda", {"experts": 20000}, "20000 experts"),
    ("moe_router", "npu", {}, ""),
    ("moe_router", "npu", {"form": Form(SOFTMAX, 2)}, "softmax of the chosen logits"),
    ("moe_router", "npu", {"form": Form(SQRTSOFTPLUS, 2)}, "sqrtsoftplus"),
    ("moe_router", "npu", {"form": Form(PRE_SOFTMAX, 2, Groups(4, 2, 1))}, "has no groups"),
    ("moe_router", "npu", {"form": Form(PRE_SOFTMAX, 1025), "experts": 2080}, "1024"),
    ("moe_router", "npu", {"form": Form(SIGMOID, 1)}, "one expert for a token"),
    ("moe_router", "npu", {"form": Form(SIGMOID, 6, Groups(4, 2, 3))}, "3 best"),
    ("moe_router", "npu", {"form": Form(SIGMOID, 2, Groups(32, 2, 1))}, "32 groups of 2 experts"),
    ("moe_router", "npu", {"experts": 2080}, "2048"),
    ("permute", "npu", {}, ""),
    ("permute", "npu", {"uniform": False}, "topk"),
    ("permute", "npu", {"probs_dtype": FP64}, "probs in torch.float64"),
    ("permute", "npu", {"large": True}, "512"),
    ("rms_norm", "cuda", {"dtype": FP64}, "one dtype"),
    ("rms_norm", "cuda", {"weight_dtype": FP32, "zero_centered": True}, ""),
    ("rms_norm", "npu", {"weight_dtype": FP32}, "one dtype"),
    ("rope", "cpu", {"learned": True}, "want a gradient"),
    ("rope", "npu", {"width": 2, "heads": 999}, ""),
    ("rope", "npu", {"width": 894}, ""),
    ("rope", "npu", {"width": 896}, "896"),
    ("rope", "npu", {"width": 0}, "at least 2"),
    ("rope", "npu", {"heads": 1000}, "1000 of each"),
    ("rope", "npu", {"pairs": "interleaved", "batch": 40, "heads": 30}, "40 x 30"),
    ("rope", "npu", {"pairs": "interleaved", "batch": 3, "batch_angles": True}, "one for all"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "backend", "changes", "words"), ROWS)
@pytest.mark.usefixtures("npu_twin")
def test_a_case_is_taken_or_refused_by_name(name: str, backend: str, changes: dict[str, Any], words: str) -> None:
    if backend == "cpu" and operator(name).unusable("cpu"):
        pytest.skip("no kernels of our own here")
    reasons = operator(name)._reasons(backend, CASES[name]._replace(**changes))
    assert len(reasons) == bool(words) and all(words in each for each in reasons), reasons


@pytest.mark.usefixtures("npu_twin")
def test_dtypes_of_every_backend() -> None:
    for name, case in CASES.items():
        for backend in operator(name).backends:
            if "DTYPES" in vars(operator(name)._module(backend)):
                reasons = operator(name)._reasons(backend, case._replace(dtype=torch.int32))
                assert f"dtype torch.int32: the {backend} backend takes " in reasons[0]
