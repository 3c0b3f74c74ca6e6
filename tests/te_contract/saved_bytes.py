"""Bytes that features save on Transformer Engine's layers and FusedAdam: as a script, counted; `EXPECTED`, by hand."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import mindspeed_lite
from mindspeed_lite.memory import host_mapped_moments, offload, swapped_optimizer_state
from mindspeed_lite.memory.layer_records import ACTIVATION, LAYER, MLP_NORM
from mindspeed_lite.patches import swap_attention, swap_optimizer
from mindspeed_lite.patches._shared import recomputed_layers
from tests.harness import optimizers
from tests.harness.gpt_block import BATCH, FFN, HIDDEN, SEQUENCE, model_of, step
from tests.harness.gpt_block import LAYERS as DEPTH
from tests.harness.lanes import Lanes

HOST = {"transformer_impl": "transformer_engine", "bf16": True, "swiglu": True, "normalization": "RMSNorm"}
EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": FFN, "moe_router_dtype": "fp32",
    "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True,
}  # fmt: skip
LAYERS: dict[str, dict[str, Any]] = {"dense": {}, "experts": EXPERTS, "unfused": {"bias_activation_fusion": False}}
TOKENS, TOP, WIDTH = SEQUENCE * BATCH, 2, 2
HIDDEN_STATES, FFN_STATES, STATISTICS = WIDTH * TOKENS * HIDDEN, WIDTH * TOKENS * FFN, 4 * TOKENS
# Of the layer of experts, which has a norm apart from a linear layer: its output, and its rows' scales.
NORM = HIDDEN_STATES + STATISTICS
# Parameters of `tests.harness.optimizers`; all but a router are bf16.
PARAMETERS, HALVES = 32 * 8 + 24 * 40 + 24 + 6 * 8, 32 * 8 + 24 * 40 + 24
# From what release 2.20.2 saves.
EXPECTED = {
    # Without fusion the gate also keeps both of its factors.
    "recompute_activation_function": {
        "dense": DEPTH * FFN_STATES, "experts": DEPTH * TOP * FFN_STATES, "unfused": DEPTH * 3 * FFN_STATES,
    },
    "recompute_norm": DEPTH * NORM,
    "use_fused_swiglu": DEPTH * 2 * FFN_STATES,
    # Rows and the activation's output, and also its input.
    "moe_zero_memory": [DEPTH * TOP * (HIDDEN_STATES + times * FFN_STATES) for times in (1, 3)],
    "adaptive_memory": {
        "dense": {"nothing": 0, "activation": DEPTH * FFN_STATES, "norm": 0, "layer": DEPTH * HIDDEN_STATES},
        "experts": {
            "nothing": 0, "activation": DEPTH * TOP * FFN_STATES, "norm": DEPTH * NORM,
            "layer": DEPTH * HIDDEN_STATES,
        },
    },
    # Input, scales and output of the norm, and attention's output; not the last layer, nor the first layer's input.
    "swap_attention": (DEPTH - 1) * (3 * HIDDEN_STATES + STATISTICS) - HIDDEN_STATES,
    # A weight is half of its main parameter, which stays as four bytes for each of three.
    "reuse_fp32_param": 2 * HALVES - 3 * 4,
    "quant_states": {"bf16": 2 * 2 * PARAMETERS, "fp8": 2 * 3 * PARAMETERS},
    # Moments and main parameters; four bytes stay.
    "swap_optimizer": 8 * PARAMETERS + 4 * HALVES - 4,
    "virtual_optimizer": 8 * PARAMETERS,
}  # fmt: skip
PARTS = {"nothing": (), "activation": (ACTIVATION,), "norm": (MLP_NORM,), "layer": (LAYER,)}


def enabled(fields: dict[str, Any], flags: dict[str, Any]) -> Any:
    host = {**HOST, **fields, "num_experts": fields.get("num_moe_experts")}
    return mindspeed_lite.enabled(**flags, moe_grouped_gemm=True, host_args=host)


def activations(layers: str, flags: dict[str, Any]) -> int:
    """Bytes that the feature saves of the activations."""
    off, _ = step(model_of(True, **LAYERS[layers]))
    with enabled(LAYERS[layers], flags):
        on, _ = step(model_of(True, **LAYERS[layers]))
    return int(off - on)


def chosen(layers: str) -> dict[str, int]:
    """Bytes that `--adaptive-memory` saves where it recomputes a part of every layer; what a whole layer keeps."""
    found = {}
    with enabled(LAYERS[layers], {"adaptive_memory": True, "memory_budget": 1.0}):
        model = model_of(True, **LAYERS[layers])
        for name, parts in PARTS.items():
            for layer in model.layers:
                part = recomputed_layers._PARTS[layer][0]
                part.run_again(part.can & {*parts})
            found[name] = step(model)[0]
    return {name: size if name == "layer" else found["nothing"] - size for name, size in found.items()}


def moved(layers: str) -> int:
    """Bytes that `--swap-attention` brings back for attention's linear layers in a backward pass."""
    lanes = Lanes()
    with (
        mock.patch.object(swap_attention, "CopyEngine", lambda device: lanes),
        mock.patch.object(swap_attention, "_why_not_here", lambda device: []),
        mock.patch.object(offload, "SMALLEST", 1),
        enabled(
            LAYERS[layers],
            {"swap_attention": True, "swap_modules": "self_attention.linear_qkv,self_attention.linear_proj"},
        ),
    ):
        step(model_of(True, **LAYERS[layers]))
    assert not lanes.faults
    return int(lanes.moved["back"])


def states(flags: dict[str, Any]) -> int:
    """Bytes that the feature takes from the device after a step of FusedAdam; mapped files are none of it."""
    sizes = []
    for given in ({"use_fused_adamw": True}, flags):
        with (
            mock.patch.object(swap_optimizer, "_no_copy_engine", lambda device: []),
            mock.patch.object(swap_optimizer, "CopyEngine", lambda device: Lanes()),
            mock.patch.object(swapped_optimizer_state, "_SMALLEST", 1),
            mock.patch.object(host_mapped_moments, "_SMALLEST", 1),
            enabled({}, given),
        ):
            model, optimizer = optimizers.optimizer_of(**optimizers.KINDS["bf16"])
            inner = optimizers.inner(optimizer)
            assert "transformer_engine" in {each.__module__.partition(".")[0] for each in type(inner).__mro__}
            optimizers.gradients(model, 0)
            optimizer.step()
            mapped = inner.placement.nbytes if "virtual_optimizer" in given else 0
            sizes.append(optimizers.live_bytes(model, optimizer) - mapped)
    return sizes[0] - sizes[1]


def main() -> None:
    model_of()  # Megatron's groups
    activation = {"recompute_activation_function": True}
    found = {
        "recompute_activation_function": {each: activations(each, activation) for each in LAYERS},
        "recompute_norm": activations("experts", {"recompute_norm": True}),
        "use_fused_swiglu": activations("unfused", {"use_fused_swiglu": True}),
        "moe_zero_memory": [activations("experts", {"moe_zero_memory": f"level{level}"}) for level in range(2)],
        "adaptive_memory": {each: chosen(each) for each in ("dense", "experts")},
        "swap_attention": moved("dense"),
        "reuse_fp32_param": states({"reuse_fp32_param": True}),
        "quant_states": {form: states({"quant_states": form}) for form in ("bf16", "fp8")},
        "swap_optimizer": states({"swap_optimizer": True}),
        "virtual_optimizer": states({"virtual_optimizer": ["all"]}),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
