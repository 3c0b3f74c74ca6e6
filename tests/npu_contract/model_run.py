"""A whole Megatron GPT on fake NPU tensors: which torch_npu operators run, in which order, forward and backward.

    python -m tests.npu_contract.model_run             compares every configuration with its list in golden/
    python -m tests.npu_contract.model_run --update    writes the lists anew

Every feature that applies is on. How the model comes to run without a device: model_inside.py.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_lite import runtime
from tests.npu_contract.environment import FOLDER, Environment, prepare

GOLDEN = Path(__file__).with_name("golden")
VOCABULARY, SEQUENCE, BATCH, HIDDEN, HEADS, LAYERS = 256, 32, 2, 64, 4, 2
MARK = "model_run: "

_EXPERTS = {
    "moe_router_topk": 2,
    "moe_router_pre_softmax": True,
    "moe_ffn_hidden_size": 128,
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True,
    "moe_permute_fusion": True,
    "moe_router_fusion": True,
}

# Options of `model_inside`, by the name of the golden list.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gqa": {"query_groups": 2},
    "qk_norm": {"query_groups": 2, "qk_layernorm": True},
    "dropout": {"dropout": 0.1},
    "zero_centered": {"config": {"layernorm_zero_centered_gamma": True}},
    "tensor_parallel": {"tp": 2, "query_groups": 2, "qk_layernorm": True},
    "sequence_parallel": {"tp": 2, "sp": True},
    "experts": {"experts": 4, "config": {**_EXPERTS, "moe_router_load_balancing_type": "none"}},
    "experts_padded": {
        "experts": 4,
        "config": {
            **_EXPERTS,
            "moe_expert_capacity_factor": 1.0,
            "moe_pad_expert_input_to_capacity": True,
            "moe_aux_loss_coeff": 1e-2,
        },
    },
    # Attention that makes its scores, with a mask that is given.
    "scores_mask": {"without": ["use_flash_attn"], "mask": True, "config": {"masked_softmax_fusion": True}},
    "recompute": {
        "config": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    },
}


def job(name: str, *, features: Sequence[str] | None = None, reference: Sequence[str] = ()) -> dict[str, Any]:
    """One run: a configuration, the features by name, operators forced on the reference.

    features: None stands for all that apply, but for those that the configuration goes without.
    """
    options = CONFIGURATIONS[name]
    if features is None and "without" in options:
        features = [feature for feature in golden("plain")["applied"] if feature not in options["without"]]
    return {"name": name, "features": features, "reference": list(reference), "options": options}


def run(environment: Environment, jobs: Sequence[Mapping[str, Any]], mode: str = "fake") -> list[dict[str, Any]]:
    """The results of `jobs` in mode fake or host, one process for all of them."""
    code = "import json, sys; from tests.npu_contract import model_inside; model_inside.run(json.loads(sys.argv[1]))"
    done = environment.run(code, mode, json.dumps(jobs))
    lines = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or len(lines) != 1:
        raise RuntimeError(f"the run in mode {mode} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    results: list[dict[str, Any]] = json.loads(lines[0])
    return results


def differences(stored: Mapping[str, Any], seen: Mapping[str, Any]) -> list[str]:
    """What was lost (-) or added (+) between a golden list and a run, in the order of the run."""
    return [
        f"{part} {line}"
        for part in ("forward", "backward")
        for line in difflib.unified_diff(stored[part], seen[part], lineterm="", n=0)
        if not line.startswith(("---", "+++", "@@"))
    ]


# Operators for which the reference serves on an NPU, and why that is right.
ON_REFERENCE = {
    "cross_entropy": "torch_npu's losses know no vocabulary split over ranks, and fall short of the statistics we keep",
    "bias_dropout_add": "CANN's fused form ends in a LayerNorm, and it draws a mask of its own for plain dropout",
    "vocab_embedding": "plain arithmetic in place of an index assignment is all there is to it",
}


def _is_left_off(name: str) -> bool:
    """Whether `auto` may leave a feature off: its declaration says why, it needs a value, or only arguments follow."""
    feature = next((each for each in runtime.catalogue() if each.name == name), None)
    if feature is None:
        return False
    return bool(feature.not_auto) or not feature.options[0].is_switch or not feature.patches


def faults(result: Mapping[str, Any]) -> list[str]:
    """What no golden list may excuse: calls on the reference, unfused operators, gradients that are not there."""
    found = [f"{operator} ran on the reference" for operator in result["on_reference"] if operator not in ON_REFERENCE]
    found += [f"fell back: {text}" for text in result["fallbacks"]]
    found += [f"in place of {operator} ran {', '.join(ran)}" for operator, ran in result["unfused"].items() if ran]
    found += [f"contract: {text}" for text in result["violations"]]
    found += [f"auto leaves {text}" for text in result["left_off"] if not _is_left_off(text.partition(":")[0])]
    return found + [f"gradient of {text}" for text in result["wrong_gradients"]]


def golden(name: str) -> dict[str, Any]:
    """The stored list of a configuration."""
    stored: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    return stored


def write(result: Mapping[str, Any]) -> None:
    """Store a run as its configuration's golden list."""
    GOLDEN.mkdir(exist_ok=True)
    kept = {key: result[key] for key in ("applied", "forward", "backward")}
    (GOLDEN / f"{result['name']}.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--update", action="store_true", help="write the lists in golden/ anew")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where torch_npu and the stubs are kept")
    chosen = parser.parse_args(given)
    failed = False
    for result in run(prepare(chosen.folder), [job(name) for name in CONFIGURATIONS]):
        found = faults(result)
        if chosen.update and not found:
            write(result)
        elif not chosen.update:
            found += differences(golden(result["name"]), result)
        failed = failed or bool(found)
        print(f"{result['name']}: {len(result['forward'])} calls forward, {len(result['backward'])} backward")
        print("".join(f"  {text}\n" for text in found), end="")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
