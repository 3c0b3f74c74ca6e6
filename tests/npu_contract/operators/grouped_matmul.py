"""npu_grouped_matmul: its contract waits here for the first operator of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from tests.npu_contract.definitions import Probe, by_name, cumulative_ends, prober
from tests.npu_contract.recorder import Call, Tensor


def group_list(name: str, values: Sequence[int], kind: int, total: int) -> Iterator[str]:
    """Rows of each group, int64 on the device: ends (kind 0) or counts (kind 1) that make up `total` rows."""
    if kind == 0:
        yield from cumulative_ends(name, list(values), total)
    elif kind == 1:
        if any(value < 0 for value in values) or sum(values) != total:
            yield f"{name} {list(values)} are not counts: they add up to {sum(values)}, not to {total} rows"
    else:
        yield f"group_list_type is {kind}: 0 for cumulative ends, 1 for counts"


def grouped_matmul(call: Call) -> Iterator[str]:
    """npu_grouped_matmul([x], [weight], group_list=, split_item=, group_type=, group_list_type=) -> [out]

    x [M, K] and weight [E, K, N] with group_type 0 (rows in groups), one tensor in each list.
    """
    a = call.arguments
    yield from by_name(call, "group_list", "split_item", "group_type", "group_list_type")
    if len(a["x"]) != 1 or len(a["weight"]) != 1 or a["group_type"] != 0 or a["x"][0].dim != 2:
        yield "only group_type 0 with one x [M, K] and one weight [E, K, N] has a contract yet"
        return
    (x,), (weight,), groups = a["x"], a["weight"], a["group_list"]
    if x.dtype != weight.dtype:
        yield f"x {x} and weight {weight}: want one dtype"
    if weight.dim != 3 or weight.shape[1] != x.shape[1]:
        yield f"x {x} and weight {weight} do not fit: want [M, K] and [E, K, N]"
    if not isinstance(groups, Tensor) or groups.dtype != "int64" or groups.shape != weight.shape[:1]:
        yield f"group_list is {groups}: want int64{list(weight.shape[:1])}, one entry per group"
    elif groups.content is not None:
        yield from group_list("group_list", groups.content, a["group_list_type"], x.shape[0])
    if a["split_item"] not in (2, 3):
        yield f"split_item is {a['split_item']}: 2 or 3 for one tensor out"


CONTRACTS = {"npu_grouped_matmul": grouped_matmul}


def int64(*values: int) -> Callable[[str], torch.Tensor]:
    return lambda device: torch.tensor(values, dtype=torch.int64).to(device)


# 24 rows in 3 groups, given as counts.
_probe = prober(
    "npu_grouped_matmul",
    x=[((24, 8), torch.bfloat16)],
    weight=[((3, 8, 5), torch.bfloat16)],
    by_name={"group_list": int64(4, 8, 12), "split_item": 2, "group_type": 0, "group_list_type": 1},
)

PROBES: Mapping[str, Probe] = {
    "right": _probe("nobody"),
    "right ends": _probe("nobody", group_list=int64(4, 12, 24), group_list_type=0),
    "ends for counts": _probe("nobody", "are not counts", by_content=True, group_list=int64(4, 12, 24)),
    "counts for ends of groups": _probe("nobody", "not cumulative to 24", by_content=True, group_list_type=0),
    "leading zero of groups": _probe(
        "nobody", "leading zero", by_content=True, group_list=int64(0, 12, 24), group_list_type=0
    ),
    "group list of the host": _probe("nobody", "want int64[3]", group_list=[4, 8, 12]),
    "weights of another K": _probe("nobody", "do not fit", weight=[((3, 7, 5), torch.bfloat16)]),
    "weights of another dtype": _probe("nobody", "want one dtype", weight=[((3, 8, 5), torch.float16)]),
    "unknown split_item": _probe("host", "split_item is 9", split_item=9),
}
