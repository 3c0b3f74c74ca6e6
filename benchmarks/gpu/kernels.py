"""Times operators on shapes of models of 7 to 70 billion parameters: ours, PyTorch's and Liger-Kernel's.

    python -m benchmarks.gpu.kernels --device cuda [--tiny] OPERATOR ...

Prints lines of JSON: the machine, then for each operator when it begins and its rows, which are those of `bench-ops`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
from collections.abc import Mapping, Sequence
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.kernels")
    parser.add_argument("names", nargs="+", choices=[*SHAPES], metavar="OPERATOR")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)

    import torch

    from benchmarks.gpu import liger
    from mindspeed_lite import platform
    from mindspeed_lite.bench import ceiling, environment, output, timing
    from mindspeed_lite.bench.operators.run import Findings, measure
    from mindspeed_lite.ops import discovery, dispatch
    from mindspeed_lite.ops.case import COMPILED

    def tell(**what: Any) -> None:
        print(json.dumps(output.finite(what), allow_nan=False), flush=True)

    platform.activate(options.device)
    reached = dataclasses.asdict(ceiling.measure(options.device, torch.bfloat16))
    tell(machine=environment.describe(platform.choose(options.device)), ceilings=reached)
    has_liger = options.device == "cuda" and importlib.util.find_spec("liger_kernel") is not None
    effort = timing.Effort(sample_seconds=0.02, rounds=(5, 5), warmup=2)
    for name in options.names:
        tell(begins=name)
        declared, text = discovery.cases(name), SHAPES[name]
        shape = declared.correctness[1 if "main" in text else 0] if options.tiny else text
        problem = declared.problem(shape, options.device, torch.bfloat16)
        contenders = [each for each in problem.contenders if each.name != COMPILED]
        contenders += liger.contenders(name, declared.parse(shape)) if has_liger else []
        fallbacks: list[str] = []
        unsubscribe = dispatch.on_fallback(lambda *reason: fallbacks.append(f"fallback: {reason}"))  # noqa: B023
        findings = Findings()
        rows = measure(dataclasses.replace(problem, contenders=tuple(contenders)), effort, reached, findings)
        unsubscribe()
        ours = rows[0]["contenders"][0]["error"]
        tell(rows=rows, notes=[*fallbacks, *(each["text"] for each in findings)], **({"failed": ours} if ours else {}))


if __name__ == "__main__":
    main()
