"""Run with the wheel: passes of both products through `parallel.expert.alltoall_mc2`, and what is wrong with each call.

One process stands for rank 1 of eight; torch_npu's operators answer from their meta kernels, collectives move nothing.
The contracts are written from the operators' documentation; to try them, each mutation breaks
`alltoall_mc2.py` in one place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mindspeed_lite.ops.grouped_matmul import weight_gradients
from mindspeed_lite.parallel.expert import alltoall_mc2
from tests.npu_contract.mc2_calls import DTYPES, NAME, mutated
from tests.npu_contract.recorder import Call, Recorder, Tensor

RANKS, EXPERTS, HIDDEN, INNER = 8, 2, 320, 288
# What the documentation of the wheel allows.
RANKS_ALLOWED = (8, 16, 32, 64)
# Rows for each expert of the group, and from each rank for each expert here: all numbers differ.
SENT = [250 + place for place in range(RANKS * EXPERTS)]
RECEIVED = [240 + 7 * place for place in range(RANKS * EXPERTS)]
ARRIVE, LEAVE = "npu_alltoallv_gmm", "npu_gmm_alltoallv"

# Text in alltoall_mc2.py -> what stands there instead, and words of what must be said.
MUTATIONS = {
    "counts the wrong way round": ("name, ranks, sent, received", "name, ranks, received, sent", "send_counts"),
    "a message that is too small": ("x.element_size() < LEAST_BYTES", "x.element_size() < 0", "MiB is served"),
}


def wrong(call: Call) -> Iterator[str]:
    """Everything in a call that the documentation does not allow, or that the exchange did not mean."""
    a = call.arguments
    x, w = a["gmm_x"], a["gmm_weight"]
    if not isinstance(x, Tensor) or not isinstance(w, Tensor) or x.dim != 2 or w.dim != 3:
        yield f"{x} and {w}: want two and three dimensions"
        return
    if x.dtype not in DTYPES or w.dtype != x.dtype:
        yield f"{x.dtype} times {w.dtype}: want one of {DTYPES}"
    if x.shape[1] != w.shape[2 if a["trans_gmm_weight"] else 1]:
        yield f"{x} times {w} do not fit"
    # Of what is sent and what is received, before the product or after it.
    if min(sum(SENT), sum(RECEIVED), x.shape[0]) * min(w.shape[1:]) * 2 < 2 << 20:
        yield f"{x} is less than 2 MiB"
    if max(sum(SENT), sum(RECEIVED), x.shape[0]) * max(w.shape[1:]) * 2 > 100 << 20:
        yield f"{x} is more than 100 MiB"
    for each in (x, w):
        if not each.contiguous:
            yield f"{each} is not contiguous"
    if a["hcom"] != NAME:
        yield f"communicator {a['hcom']!r}: want {NAME!r}"
    if a["ep_world_size"] != RANKS or RANKS not in RANKS_ALLOWED:
        yield f"{a['ep_world_size']} ranks: want {RANKS}"
    sent, received = (SENT, RECEIVED) if call.operator == ARRIVE else (RECEIVED, SENT)
    for name, want in (("send_counts", sent), ("recv_counts", received)):
        if [*a[name]] != want or not all(type(each) is int for each in a[name]):
            yield f"{name} {a[name]}: want {want}"
    if x.shape[0] != sum(a["send_counts"]):
        yield f"{x} has not the rows of send_counts"
    for name in ("send_counts_tensor", "recv_counts_tensor", "mm_x", "mm_weight"):
        if a[name] is not None:
            yield f"{name}, which is not asked for"
    if call.operator == ARRIVE and not a["permute_out_flag"]:
        yield "the gradient of the weights wants the rows that have arrived"


def _exchange(module: Any, sent: list[int], received: list[int], log: Callable[[str], None]) -> Any:
    assert dist.group.WORLD is not None
    counts = module.ExpertCounts(sent, received)
    rows = module.RowsOfRank.of_group(counts, dist.group.WORLD, torch.device("cpu"))
    return module.AlltoAllMC2(dist.group.WORLD, counts, rows, log)


def problems(module: Any) -> list[str]:
    """What is wrong with the calls of both products, forward and backward, through `module`."""
    module.communicator = lambda group, device: NAME
    found: list[str] = []
    logged: list[str] = []
    wanted = {"dispatch_linear": [ARRIVE, LEAVE], "linear_combine": [LEAVE, ARRIVE]}
    for name, operators in wanted.items():
        arrives = name == "dispatch_linear"
        rows, out = (sum(SENT), sum(RECEIVED)) if arrives else (sum(RECEIVED), sum(SENT))
        exchange = _exchange(module, SENT, RECEIVED, logged.append)
        # As the layer before it leaves it: another order of its dimensions.
        x = torch.zeros(HIDDEN, rows, dtype=torch.bfloat16).t().requires_grad_()
        weights = [torch.zeros(INNER, HIDDEN, dtype=torch.bfloat16).requires_grad_() for _ in range(EXPERTS)]
        try:
            with Recorder(on_meta=True) as recorder:
                y = getattr(exchange, name)(x, weights, weight_gradients)
                y.backward(torch.zeros(INNER, out, dtype=torch.bfloat16).t())
            if tuple(y.shape) != (out, INNER) or x.grad is None or x.grad.shape != x.shape:
                found.append(f"{name}: the output is {tuple(y.shape)}")
            if any(weight.grad is None for weight in weights):
                found.append(f"{name}: a weight has no gradient")
        except Exception as error:
            found.append(f"{name}: {type(error).__name__}: {error}")
        calls = recorder.calls
        if [call.operator for call in calls] != operators:
            found.append(f"{name} called {[call.operator for call in calls]}")
        found += [f"{name}, {call.operator}: {text}" for call in calls for text in wrong(call)]
    found += logged
    few, many = [2] * len(SENT), [11000] * len(SENT)
    # A rank's own rows may be enough where another one's are not.
    for sent, received, dtype, what in (
        (SENT, few, torch.bfloat16, "less than 2 MiB"),
        (many, SENT, torch.bfloat16, "more than 100 MiB"),
        (SENT, RECEIVED, torch.float32, "float32"),
    ):
        weights = [torch.empty(INNER, HIDDEN, dtype=dtype, device="meta")] * EXPERTS
        x = torch.empty(sum(sent), HIDDEN, dtype=dtype, device="meta")
        logged.clear()
        if _exchange(module, sent, received, logged.append)._is_served(x, weights, True):
            found.append(f"{what} is served")
        elif not any(what in text for text in logged):
            found.append(f"{what} is not served, with {logged}")
    return found


def main() -> None:
    dist.init_process_group("fake", rank=1, world_size=RANKS, store=FakeStore())
    import torch_npu  # type: ignore[import-not-found, import-untyped, unused-ignore]

    result: dict[str, list[str]] = {"right": problems(alltoall_mc2)}
    for name, (old, new, _) in MUTATIONS.items():
        result[name] = problems(mutated(alltoall_mc2, old, new))
    # What --moe-bmm-mc2 would need.
    result["exchanges"] = [name for name in dir(torch_npu) if "alltoall" in name or "all_to_all" in name]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
