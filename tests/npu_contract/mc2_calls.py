"""Run with the wheel: passes of both linear layers through `parallel.mc2`, and what is wrong with each call, as JSON.

One process stands for rank 1 of four; torch_npu's operators answer from their meta kernels, collectives move nothing.
The contracts are written from the operators' documentation; to try them, each mutation breaks
`mc2.py` in one place.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mindspeed_lite.parallel import mc2
from mindspeed_lite.parallel.tp_linear import AUTOGRAD_WGRAD, TPCommConfig, column_linear, fixed_chunks, row_linear
from tests.npu_contract.recorder import Call, Recorder, Tensor

RANKS, ROWS, HIDDEN, INNER = 4, 6, 320, 288
NAME = "communicator-7"
DTYPES = ("float16", "bfloat16")

# Text in mc2.py -> what stands there instead, and words of what must be said.
MUTATIONS = {
    "a transposed input": (
        "all_gather_base_mm(x, w",
        "all_gather_base_mm(x.t().contiguous().t(), w",
        "is not contiguous",
    ),
    "no name": ("name, group.size(), reduce_op", '"", group.size(), reduce_op', "communicator"),
}


def wrong(call: Call, gathered: bool) -> Iterator[str]:
    """Everything in a call that the documentation does not allow, or that the layer did not mean."""
    a = call.arguments
    x, w = a["input"], a["x2"]
    if not isinstance(x, Tensor) or not isinstance(w, Tensor) or x.dim != 2 or w.dim != 2:
        yield f"{x} times {w}: want two dimensions each"
        return
    if x.dtype not in DTYPES or w.dtype != x.dtype:
        yield f"{x.dtype} times {w.dtype}: want one of {DTYPES}"
    if x.shape[1] != w.shape[0] or not 256 <= x.shape[1] < 65535:
        yield f"{x} times {w} do not fit, or sum over less than 256 or more than 65534"
    if not x.contiguous:
        yield f"input {x} is not contiguous"
    if a["hcom"] != NAME:
        yield f"communicator {a['hcom']!r}: want {NAME!r}"
    if a["world_size"] != RANKS:
        yield f"{a['world_size']} ranks: want {RANKS}"
    if a["bias"] is not None or a["comm_turn"] != 0:
        yield "a bias or a granularity, which the operator does not take"
    # How a call was spelled is seen in the forward pass only.
    named = ("gather_output", "reduce_op") if call.named is None else call.named
    if call.operator == "npu_all_gather_base_mm":
        if a["gather_index"] != 0:
            yield "gather_index 1 would gather the weight"
        if "gather_output" not in named:
            yield "gather_output not passed by name"
        if a["gather_output"] != gathered:
            yield "the layer wants what was gathered" if gathered else "what was gathered, which nobody wants"
    else:
        if x.shape[0] % RANKS:
            yield f"{x.shape[0]} rows do not divide by {RANKS}"
        if "reduce_op" not in named:
            yield "reduce_op not passed by name"
        if a["reduce_op"] != "sum":
            yield f"reduce_op is {a['reduce_op']}"


def problems(module: Any) -> list[str]:
    """What is wrong with the calls of both layers, forward and backward, through `module`."""
    module.communicator = lambda group, device: NAME
    said: list[str] = []
    fused = module.MC2(said.append)
    found: list[str] = []
    group = dist.group.WORLD
    assert group is not None
    comm = TPCommConfig(group, True, fixed_chunks(1), AUTOGRAD_WGRAD, fused)
    wide = torch.zeros(ROWS, 1, HIDDEN, dtype=torch.bfloat16).requires_grad_()
    narrow = torch.zeros(RANKS * ROWS, 1, INNER, dtype=torch.bfloat16).requires_grad_()
    up = torch.zeros(INNER, HIDDEN, dtype=torch.bfloat16).requires_grad_()
    down = torch.zeros(HIDDEN, INNER, dtype=torch.bfloat16).requires_grad_()
    runs = {
        "column": (lambda: column_linear(wide, up, None, comm), ROWS * RANKS, INNER),
        "row": (lambda: row_linear(narrow, down, comm), ROWS, HIDDEN),
    }
    wanted = {
        "column": [("npu_all_gather_base_mm", False), ("npu_mm_reduce_scatter_base", False)],
        "row": [("npu_mm_reduce_scatter_base", False), ("npu_all_gather_base_mm", True)],
    }
    for name, (run, rows, width) in runs.items():
        try:
            with Recorder(on_meta=True) as recorder:
                y = run()
                # As the layer before it leaves it: a gradient in another order of its dimensions.
                y.backward(torch.zeros(width, 1, rows, dtype=torch.bfloat16).permute(2, 1, 0))
            if tuple(y.shape) != (rows, 1, width):
                found.append(f"{name}: the output is {tuple(y.shape)}")
        except Exception as error:
            found.append(f"{name}: {type(error).__name__}: {error}")
        calls = recorder.calls
        if [call.operator for call in calls] != [operator for operator, _ in wanted[name]]:
            found.append(f"{name} called {[call.operator for call in calls]}")
        for call, (_, gathered) in zip(calls, wanted[name], strict=False):
            found += [f"{name}, {call.operator}: {text}" for text in wrong(call, gathered)]
    return found + said


def mutated(original: types.ModuleType, old: str, new: str) -> Any:
    """A module of the original's text with `old`, which stands there once, replaced."""
    path = str(original.__file__)
    text = Path(path).read_text()
    if text.count(old) != 1:
        raise ValueError(f"{old!r} stands {text.count(old)} times in {path}: change the mutation with it")
    module = types.ModuleType(original.__name__)
    module.__package__ = original.__package__
    exec(compile(text.replace(old, new), path, "exec"), module.__dict__)
    return module


def main() -> None:
    dist.init_process_group("fake", rank=1, world_size=RANKS, store=FakeStore())
    result = {"right": problems(mc2)}
    for name, (old, new, _) in MUTATIONS.items():
        result[name] = problems(mutated(mc2, old, new))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
