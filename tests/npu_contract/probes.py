"""Wrong calls of torch_npu made directly: what the wheel notices by itself, and what only our contracts do.

`noticed` is who rejects the call: "schema" (in both modes), "meta" (in both), "host" (its C++ code only), or "nobody",
which is where a contract is the only guard on this side of a device. `contract`: words of the violation, for calls
that reach the dispatcher. What only the values of a list tell is seen in pass `content` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

S, B, N, D = 24, 2, 4, 64


@dataclass(frozen=True)
class Probe:
    """A wrong call: `call(device)` makes it."""

    call: Callable[[str], Any]
    noticed: str
    contract: str = ""
    by_content: bool = False


def _attention(noticed: str, contract: str = "", **wrong: Any) -> Probe:
    """A right call of npu_fusion_attention, apart from `wrong`; tensors among it are given as (shape, dtype)."""

    def call(device: str) -> Any:
        import torch_npu

        given: dict[str, Any] = {
            **dict.fromkeys(("query", "key", "value"), ((S, B, N * D), torch.bfloat16)),
            "head_num": N,
            "input_layout": "SBH",
            "scale": D**-0.5,
            "keep_prob": 1.0,
        }
        given.update(wrong)
        made = {name: _made(value, device) for name, value in given.items() if value is not _LEFT_OUT}
        positional = [made.pop(name) for name in ("query", "key", "value")]
        return torch_npu.npu_fusion_attention(*positional, **made)

    return Probe(call, noticed, contract)


def _norm(noticed: str, contract: str = "", **wrong: Any) -> Probe:
    """The same for npu_rms_norm."""

    def call(device: str) -> Any:
        import torch_npu

        given: dict[str, Any] = {"input": ((6, 2, D), torch.bfloat16), "gamma": ((D,), torch.bfloat16), "epsilon": 1e-5}
        given.update(wrong)
        made = {name: _made(value, device) for name, value in given.items() if value is not _LEFT_OUT}
        positional = [made.pop(name) for name in ("input", "gamma")]
        return torch_npu.npu_rms_norm(*positional, **made)

    return Probe(call, noticed, contract)


def _grouped(noticed: str, contract: str = "", by_content: bool = False, **wrong: Any) -> Probe:
    """The same for npu_grouped_matmul: 24 rows in 3 groups, given as counts."""

    def call(device: str) -> Any:
        import torch_npu

        given: dict[str, Any] = {
            "x": ((24, 8), torch.bfloat16),
            "weight": ((3, 8, 5), torch.bfloat16),
            "group_list": _int64(4, 8, 12),
            "split_item": 2,
            "group_type": 0,
            "group_list_type": 1,
        }
        given.update(wrong)
        made = {name: _made(value, device) for name, value in given.items()}
        return torch_npu.npu_grouped_matmul([made.pop("x")], [made.pop("weight")], **made)

    return Probe(call, noticed, contract, by_content)


def _int64(*values: int) -> Callable[[str], torch.Tensor]:
    return lambda device: torch.tensor(values, dtype=torch.int64).to(device)


class _LeftOut:
    """An argument that is not passed."""


_LEFT_OUT = _LeftOut()


def _made(value: Any, device: str) -> Any:
    if isinstance(value, tuple) and isinstance(value[-1], torch.dtype):
        return torch.zeros(value[0], dtype=value[1], device=device)
    return value(device) if callable(value) else value


_BF16, _FP16, _FP32, _BOOL = torch.bfloat16, torch.float16, torch.float32, torch.bool
_TRIANGLE = ((2048, 2048), _BOOL)
_FULL = [B, N, S, S]
_PACKED = dict.fromkeys(("query", "key", "value"), ((S, N, D), _BF16))

PROBES: Mapping[str, Probe] = {
    "right": _attention("nobody"),
    "unknown keyword": _attention("schema", softmax_scale=0.1),
    "keyword of another version": _attention("schema", pre_tokens=3),
    "head_num as a tensor": _attention("schema", head_num=((1,), torch.int64)),
    "no head_num": _attention("schema", head_num=_LEFT_OUT),
    "lengths as a tensor": _attention(
        "schema", **_PACKED, input_layout="TND", actual_seq_qlen=((2,), torch.int64), actual_seq_kvlen=[10, S]
    ),
    "unknown layout": _attention("host", "input_layout is 'BHSD'", input_layout="BHSD"),
    "unknown mode": _attention("host", "sparse_mode 99", sparse_mode=99),
    "TND without lengths": _attention("host", "actual_seq_qlen is None", **_PACKED, input_layout="TND"),
    "mixed dtypes": _attention("nobody", "want one of", key=((S, B, N * D), _FP16)),
    "head count that does not divide": _attention("nobody", "head_num 5 does not divide", head_num=5),
    "head sizes that differ": _attention("nobody", "heads of size 64", key=((S, B, N * 48), _BF16)),
    "key heads that do not divide": _attention(
        "nobody", "3 key heads do not divide 4", key=((S, B, 3 * D), _BF16), value=((S, B, 3 * D), _BF16)
    ),
    "values larger than keys": _attention("nobody", "larger than key heads", value=((S, B, N * 128), _BF16)),
    "another batch": _attention("nobody", "differ in batch", key=((S, 3, N * D), _BF16)),
    "values shorter than keys": _attention("nobody", "differ in length", value=((S - 1, B, N * D), _BF16)),
    "mask of another length": _attention(
        "nobody", f"want one of {_FULL}", atten_mask=((B, 1, S, 7), _BOOL), sparse_mode=1
    ),
    "mask of one batch": _attention("nobody", f"want one of {_FULL}", atten_mask=((1, N, S, S), _BOOL), sparse_mode=1),
    "full mask in a compressed mode": _attention(
        "nobody", "takes the compressed mask", atten_mask=((S, S), _BOOL), sparse_mode=2
    ),
    "additive mask": _attention("nobody", "want bool or uint8", atten_mask=((S, S), _BF16), sparse_mode=1),
    "mode without a mask": _attention("nobody", "mean nothing without atten_mask", sparse_mode=2),
    "tokens in the causal mode": _attention(
        "nobody", "mean nothing in sparse_mode 2", atten_mask=_TRIANGLE, sparse_mode=2, pre_tockens=5
    ),
    "keep_prob above one": _attention("host", "want the probability to keep", keep_prob=1.5),
    "keep_prob of zero": _attention("host", "want the probability to keep", keep_prob=0.0),
    "scale left out": _attention("nobody", "scale not passed by name", scale=_LEFT_OUT),
    "leading zero": _attention(
        "nobody", "leading zero", **_PACKED, input_layout="TND", actual_seq_qlen=[0, 10, S], actual_seq_kvlen=[0, 10, S]
    ),
    "counts for ends": _attention(
        "nobody", "not cumulative", **_PACKED, input_layout="TND", actual_seq_qlen=[10, 14], actual_seq_kvlen=[10, 14]
    ),
    "right packed": _attention(
        "nobody", **_PACKED, input_layout="TND", actual_seq_qlen=[10, S], actual_seq_kvlen=[10, S]
    ),
    "right norm": _norm("nobody"),
    "epsilon by another name": _norm("schema", eps=1e-5),
    "no gamma": _norm("schema", gamma=None),
    "epsilon left out": _norm("nobody", "epsilon not passed by name", epsilon=_LEFT_OUT),
    "wider gamma": _norm("nobody", "gamma is float32", gamma=((D,), _FP32)),
    "gamma of another size": _norm("nobody", "want the last dimensions", gamma=((D - 1,), _BF16)),
    "nine dimensions": _norm("nobody", "want 2 to 8", input=((1,) * 8 + (D,), _BF16)),
    "float64": _norm("nobody", "want one of", input=((6, D), torch.float64), gamma=((D,), torch.float64)),
    "right grouped matmul": _grouped("nobody"),
    "right ends": _grouped("nobody", group_list=_int64(4, 12, 24), group_list_type=0),
    "ends for counts": _grouped("nobody", "are not counts", by_content=True, group_list=_int64(4, 12, 24)),
    "counts for ends of groups": _grouped("nobody", "not cumulative to 24", by_content=True, group_list_type=0),
    "leading zero of groups": _grouped(
        "nobody", "leading zero", by_content=True, group_list=_int64(0, 12, 24), group_list_type=0
    ),
    "group list of the host": _grouped("nobody", "want int64[3]", group_list=[4, 8, 12]),
    "weights of another K": _grouped("nobody", "do not fit", weight=((3, 7, 5), _BF16)),
    "weights of another dtype": _grouped("nobody", "want one dtype", weight=((3, 8, 5), _FP16)),
    "unknown split_item": _grouped("host", "split_item is 9", split_item=9),
}
