"""examples/pretrain_gpt.py as a row of `tools.pairs` has it: some weights frozen, adapters, weights by name.

PAIRED in the environment is JSON: `frozen` and `lora` name what is, `by_name` lets weights follow from their names,
`reversed` sums products from the other end, and `arguments` is a file that Megatron's arguments are pickled to.
Stand-ins of the harness take the place of a device's streams and operators.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import runpy
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mindspeed_lite.bench.rounding_baseline import ReversedReductionOrder
from tests.harness import core_loop, simulated
from tests.harness.script_trainings import SCRIPT

# Whether a parameter of that name is frozen; layers have their number in the whole model.
FROZEN: dict[str, Callable[[str], bool]] = {
    "embedding": lambda name: name.startswith("embedding."),
    "first_layer": lambda name: name.startswith(("embedding.", "decoder.layers.0.")),
    "all_but_norms": lambda name: "norm" not in name,
    "all_but_fc2": lambda name: "linear_fc2" not in name,
    "all_but_output": lambda name: not name.startswith("output_layer."),
}
# The linear layers that have an adapter; experts have none.
LORA = {"qkv": ("linear_qkv",), "all": ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")}


class Adapter(torch.nn.Module):
    """A linear layer with a product of two small matrices beside it, as Megatron-Bridge wraps one."""

    def __init__(self, to_wrap: Any, name: str) -> None:
        super().__init__()
        self.to_wrap = to_wrap
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        weight = to_wrap.weight
        for key, shape in (("down", (4, weight.shape[1])), ("up", (weight.shape[0], 4))):
            drawn = torch.randn(shape, generator=generator) * 0.02
            self.register_parameter(key, torch.nn.Parameter(drawn.to(weight.dtype)))

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output, bias = self.to_wrap(x, *args, **kwargs)
        linear = torch.nn.functional.linear
        return output + linear(linear(x, self.down), self.up), bias


def _global_name(model: Any, name: str) -> str:
    """A module's or parameter's name with its layer's number in the whole model: alike wherever the layer is placed."""
    within = re.match(r"(decoder\.layers\.)(\d+)(.*)", name)
    return f"{within[1]}{model.decoder.layers[int(within[2])].layer_number - 1}{within[3]}" if within else name


def _add_adapters(model: Any, kinds: tuple[str, ...]) -> None:
    for name, layer in list(model.named_modules()):
        owner, _, own = name.rpartition(".")
        if own in kinds and ".experts." not in name and getattr(layer, "weight", None) is not None:
            setattr(model.get_submodule(owner), own, Adapter(layer, _global_name(model, name)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith((".down", ".up")))


def _prepare(model: Any, row: dict[str, Any]) -> Any:
    if row.get("by_name"):
        experts, ranks = model.config.num_moe_experts or 0, model.config.expert_model_parallel_size
        core_loop._weigh_by_name([model], experts // ranks)
    if row.get("lora"):
        _add_adapters(model, LORA[row["lora"]])
    if row.get("frozen"):
        for name, parameter in model.named_parameters():
            if FROZEN[row["frozen"]](_global_name(model, name)):
                parameter.requires_grad_(False)
    return model


def _keep_arguments(path: Path) -> None:
    """What of Megatron's arguments can be pickled."""
    from megatron.training import get_args

    kept = {}
    for name, value in vars(get_args()).items():
        with contextlib.suppress(Exception):
            pickle.dumps(value)
            kept[name] = value
    path.write_bytes(pickle.dumps(kept))


def main() -> None:
    row = json.loads(os.environ["PAIRED"])
    simulated.swap_optimizer()
    simulated.swap_attention()
    simulated.moe_wgrad_side_stream()
    simulated.alltoall_mc2()
    sys.argv[0] = SCRIPT
    script = runpy.run_path(SCRIPT)["main"].__globals__
    provider = script["model_provider"]
    script["model_provider"] = lambda *args, **kwargs: _prepare(provider(*args, **kwargs), row)
    with ReversedReductionOrder() if row.get("reversed") else contextlib.nullcontext():
        script["main"]()
    if row.get("arguments") and os.environ["RANK"] == "0":
        _keep_arguments(Path(row["arguments"]))


if __name__ == "__main__":
    main()
