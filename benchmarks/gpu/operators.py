"""The operators that no decision measures, on shapes of models of 7 to 70 billion parameters."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Mapping, Sequence

import torch

from benchmarks.gpu import liger
from benchmarks.gpu.units import Figures, SkippedError, Unit
from mindspeed_lite.bench import timing
from mindspeed_lite.bench.operators.run import equivalent_contenders, one_calls
from mindspeed_lite.ops import discovery, dispatch
from mindspeed_lite.ops.case import COMPILED, OURS, Contender, OwnLayout, Problem

# Beyond a GPU's cache, and no larger than that. What has no time here is left out on CUDA; its unit says why.
SHAPES: Mapping[str, str] = {
    "activation": "8192x28672",
    "rope": "s=4096,b=2,n=32,d=128",
    "bias_dropout_add": "8192x4096",
    "linear_cross_entropy": "8192x4096x128256",
    "linear_log_prob": "8192x4096x128256",
    "moe_router": "32768x256x8,scores=sigmoid,groups=8,group_topk=4,bias=1",
    "permute": "8192x4096x64x8",
    "adamw": "4x67108864",
    "accumulate_wgrad": "8192x4096x14336",
    "masked_softmax": "4x16x2048x2048",
}
_HAS_LIGER = importlib.util.find_spec("liger_kernel") is not None
EFFORT = timing.Effort(sample_seconds=0.02, rounds=(5, 5), warmup=2)
Extra = Callable[[Problem], Sequence[Contender]]


def units(part: str, device: str, tiny: bool) -> list[Unit]:
    """A unit for each operator; one without a CUDA backend says so instead of a time."""

    def measured(name: str, text: str) -> Unit:
        if device == "cuda" and "cuda" not in dispatch.operator(name).backends:
            return Unit(name, _left_out)
        return case_unit(name, text, device, tiny)

    return [measured(name, text) for name, text in SHAPES.items()]


def _left_out() -> Figures:
    raise SkippedError("it has no CUDA backend: its calls run PyTorch's own")


def case_unit(operator: str, text: str, device: str, tiny: bool, extra: Extra = lambda case: ()) -> Unit:
    """The unit of one case in bf16, with contenders besides those that the operator declares."""

    def run() -> Figures:
        declared = discovery.cases(operator)
        shape = declared.correctness[1 if "main" in text else 0] if tiny else text
        case = declared.problem(shape, device, torch.bfloat16)
        contenders = [each for each in case.contenders if each.name != COMPILED]
        peers = liger.contenders(operator, declared.parse(shape)) if device == "cuda" and _HAS_LIGER else []
        return measure_case(case, [*contenders, *peers, *extra(case)])

    return Unit(operator, run)


def measure_case(case: Problem, contenders: Sequence[Contender]) -> Figures:
    """Times of every contender that agrees with ours, forward and forward with backward; and why the others have none.

    Forward builds the graph, so that the difference of the two is the backward pass.
    """
    errors: dict[str, str] = {}
    inputs = case.make()
    functions, gradient = equivalent_contenders(case, contenders, inputs, errors)
    figures: Figures = {
        "case": case.name, "errors": errors, "bytes": {"forward": case.forward.bytes}, "notes": [],
        "flops": {"forward": case.forward.flops}, "times": {},
    }  # fmt: skip
    if case.both is not None:
        figures["bytes"]["both"], figures["flops"]["both"] = case.both.bytes, case.both.flops
    figures["notes"] = [
        f"{name}: {function.note}" for name, function in functions.items() if isinstance(function, OwnLayout)
    ]
    for direction in ("forward", "both") if case.both is not None else ("forward",):
        steps = one_calls(functions, inputs, gradient, errors, backward=direction == "both")
        with torch.set_grad_enabled(case.both is not None):
            timed, failed = timing.time_interleaved(steps, EFFORT, case.device)
        figures["times"][direction] = {
            name: {"device": each.device, "host": each.host, "waits": any(one.waits for one in each.samples)}
            for name, each in timed.items()
        } | {name: {"error": error} for name, error in failed.items()}
    ours = errors.get(OURS) or figures["times"]["forward"].get(OURS, {}).get("error")
    if ours:
        figures["failed"] = f"mindspeed_lite: {ours}"
    del inputs, functions, gradient
    gc.collect()
    if case.device == "cuda":
        torch.cuda.empty_cache()
    return figures
