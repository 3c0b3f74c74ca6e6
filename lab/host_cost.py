"""Host time of operators on CUDA with launches stubbed: `python -m lab.host_cost` prints it as JSON.

CUDA backends run on small CPU tensors. Triton binds their arguments to kernels that do nothing. PyTorch's side is the
operator's reference, whose kernels take little more than their dispatch at this size. Changes this process for good.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from mindspeed_lite.ops import discovery
from mindspeed_lite.ops.case import Draw

SHAPES = {
    "rms_norm": "16x64",
    "layer_norm": "16x64",
    "rope": "s=8,b=1,n=2,d=16",
    "activation": "16x64",
    "cross_entropy": "16x64",
    "moe_router": "16x16x2,pre=1",
    "permute": "16x16x8x2",
    "grouped_matmul": "16x16x16x8",
    "grouped_matmul of 128": "256x16x16x128",
}
# Operators of a layer, and how often.
LAYERS = {
    "dense layer": {"rms_norm": 2, "rope": 2, "activation": 1},
    "expert layer": {"rms_norm": 2, "rope": 2, "moe_router": 1, "permute": 1, "grouped_matmul": 2, "activation": 1},
}
ROUNDS, CALLS = 30, 5


def install() -> None:
    """Make Triton launch nothing, and operators run CUDA's backends."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    def nothing(*_: Any) -> None: ...

    kernel = SimpleNamespace(launch_metadata=nothing, run=nothing, function=None, packed_metadata=None)

    def compile_nothing(self: Any, key: Any, signature: Any, device: Any, *_: Any, **__: Any) -> Any:
        return self.device_caches[device][0].setdefault(key, kernel)

    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
        )
    )
    JITFunction._do_compile = compile_nothing
    for name in {each.split()[0] for each in SHAPES}:
        operator: Any = importlib.import_module(discovery.package(name)).OPERATOR
        module = operator._module("cuda")
        operator._backend = lambda case, tensors, module=module: module


class Inputs(torch.autograd.Function):
    """Autograd of a function of many weights that computes nothing: the least that `grouped_matmul` can take."""

    @staticmethod
    def forward(ctx: Any, x: Any, *weights: Any) -> Any:
        ctx.save_for_backward(x, *weights)
        return x.new_empty(x.shape[0], weights[0].shape[0])

    @staticmethod
    def backward(ctx: Any, *dy: Any) -> Any:
        x, *weights = ctx.saved_tensors
        return x.new_empty(x.shape), *x.new_empty(len(weights), *weights[0].shape).unbind()


def seconds(function: Callable[..., Any], inputs: Any) -> float:
    """Host time of a call with its backward pass, if it has one."""
    start = time.perf_counter()
    for _ in range(CALLS):
        out = function(*inputs)
        if out.requires_grad:
            torch.autograd.backward(out, out.detach())
    return (time.perf_counter() - start) / CALLS


def measure() -> dict[str, dict[str, float]]:
    """By operator and layer: microseconds of ours and of PyTorch's, and their ratio; of the fastest rounds.

    autograd: of a function with as many inputs that computes nothing.
    """
    # Nothing fills gradients: a processor adds denormal values a hundred times slower than others.
    torch.set_flush_denormal(True)
    found: dict[str, dict[str, float]] = {}
    for name, text in SHAPES.items():
        shape = discovery.cases(name.split()[0]).parse(text)
        inputs = shape.make(Draw("cpu", torch.bfloat16))
        functions = {"ours": shape.ours, "torch": shape.reference}
        if name.startswith("grouped_matmul"):
            functions["autograd"] = Inputs.apply
        rounds = [[seconds(function, inputs) for function in functions.values()] for _ in range(ROUNDS)]
        found[name] = {who: 1e6 * min(each) for who, each in zip(functions, zip(*rounds, strict=True), strict=True)}
    for layer, counts in LAYERS.items():
        found[layer] = {
            who: sum(count * found[name][who] for name, count in counts.items()) for who in ("ours", "torch")
        }
    return {name: {**times, "ratio": times["ours"] / times["torch"]} for name, times in found.items()}


if __name__ == "__main__":
    install()
    print(json.dumps({name: {key: round(value, 2) for key, value in row.items()} for name, row in measure().items()}))
