"""Times operators on shapes of models of 7 to 70 billion parameters: ours, PyTorch's and Liger-Kernel's."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Beyond a GPU's cache, and no larger than that.
SHAPES: Mapping[str, str] = {
    "rms_norm": "16384x4096",
    "layer_norm": "16384x4096",
    "cross_entropy": "4096x128256",
    "attention": "s=4096,b=1,n=32,g=8,d=128",
    "grouped_matmul": "32768x2048x1536x64",
    "vocab_embedding": "8192x4096x128256,main=1",
    "activation": "8192x28672",
    "rope": "s=4096,b=2,n=32,d=128",
    "moe_router": "32768x256x8,scores=sigmoid,groups=8,group_topk=4,bias=1",
    "permute": "8192x4096x64x8",
    "adamw": "4x67108864",
    "accumulate_wgrad": "8192x4096x14336",
    "linear_cross_entropy": "8192x4096x128256",
    "linear_log_prob": "8192x4096x128256",
}
# Their calls run PyTorch's own on CUDA.
WITHOUT_KERNEL = ("bias_dropout_add", "masked_softmax")


def measured(names: Sequence[str], device: str, tiny: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the machine under "", then each operator: nothing before it is timed, then rows as `bench-ops` has them."""
    import torch

    from benchmarks.gpu import liger
    from mindspeed_lite import platform
    from mindspeed_lite.bench import ceiling, environment, timing
    from mindspeed_lite.bench.operators.run import Findings, measure
    from mindspeed_lite.ops import discovery, dispatch
    from mindspeed_lite.ops.case import COMPILED

    platform.activate(device)
    reached = dataclasses.asdict(ceiling.measure(device, torch.bfloat16))
    yield "", {"machine": environment.describe(platform.choose(device)), "ceilings": reached}
    has_liger = device == "cuda" and importlib.util.find_spec("liger_kernel") is not None
    effort = timing.Effort(sample_seconds=0.02, rounds=(5, 5), warmup=2)
    for name in names:
        yield name, {}
        declared, text = discovery.cases(name), SHAPES[name]
        shape = declared.correctness[1 if "main" in text else 0] if tiny else text
        problem = declared.problem(shape, device, torch.bfloat16)
        contenders = [each for each in problem.contenders if each.name != COMPILED]
        contenders += liger.contenders(name, declared.parse(shape)) if has_liger else []
        notes: list[str] = []
        unsubscribe = dispatch.on_fallback(lambda *reason: notes.append(f"fallback: {reason}"))  # noqa: B023
        findings = Findings()
        rows = measure(dataclasses.replace(problem, contenders=tuple(contenders)), effort, reached, findings)
        unsubscribe()
        ours = rows[0]["contenders"][0]["error"]
        notes += [each["text"] for each in findings]
        yield name, {"rows": rows, "notes": notes, **({"failed": ours} if ours else {})}
