"""Flags whose translation depends on values of other flags, a function each.

A rule returns None to keep the flag, a reason to drop it, or replacement words and a reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeAlias

from . import layer_rules
from .command_line import CommandLine, FlagUse, Refusal, Skipped

Result: TypeAlias = "str | tuple[str | tuple[str, ...], str] | None"
Rule = Callable[[FlagUse, CommandLine], Result]


def is_equal(one: str, other: str) -> bool:
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other


def _rope_scaling_type(use: FlagUse, line: CommandLine) -> Result:
    value = line.values_of(use)[0]
    if value == "llama3":
        return "--use-rope-scaling", "Megatron's name for it"
    if value != "yarn":
        raise Refusal(f"--rope-scaling-type {value}: has no counterpart in Megatron")
    if not line.has("--multi-latent-attention", "--multi-head-latent-attention"):
        raise Refusal(
            "--rope-scaling-type yarn: YaRN without latent attention is not translated. Instead: "
            "Megatron's --position-embedding-type yarn (0.18) with its own flags"
        )
    return "YaRN is what latent attention has by default"


def _rope_scaling_factor(use: FlagUse, line: CommandLine) -> Result:
    if not line.is_foreign("--rope-scaling-type") or line.value("--rope-scaling-type") != "yarn":
        return None
    return ("--rotary-scaling-factor", *use.values), "the factor of YaRN, as Megatron's flag of that name is not"


def _first_k_dense_replace(use: FlagUse, line: CommandLine) -> Result:
    dense = max(0, line.number(use.flag, -1)) if line.is_foreign(use.flag) else 0
    every = line.number("--moe-layer-freq", 1)
    if not line.has("--num-experts"):
        return "there is nothing to do without --num-experts"
    if not dense and every in (-1, 1):
        return "every layer has experts, which is Megatron's default"
    if every < 1:
        raise Refusal(f"{use.flag} {dense} with --moe-layer-freq {every} does not say which layers have experts")
    noop = layer_rules.noop_layers_of(line)
    kept = [layer for layer in range(line.number("--num-layers", 0)) if layer not in noop]
    pattern = [int(layer >= dense and layer % every == 0) for layer in kept]
    counted = f"([0]*{pattern.count(0)}+[1]*{pattern.count(1)})"
    text = counted if every == 1 else f"[{','.join(map(str, pattern))}]"
    return f"--moe-layer-freq {text}", "which layers have experts"


def _moe_layer_freq(use: FlagUse, line: CommandLine) -> Result:
    if line.is_foreign("--first-k-dense-replace"):
        return "--first-k-dense-replace says which layers have experts"
    return "every layer has experts, which is Megatron's default" if line.values_of(use)[0] == "-1" else None


def _n_shared_experts(use: FlagUse, line: CommandLine) -> Result:
    count, target = line.number(use.flag, 0), "--moe-shared-expert-intermediate-size"
    if count == 0:
        return "0 shared experts are none"
    name = next((each for each in ("--moe-ffn-hidden-size", "--moe-intermediate-size") if line.has(each)), "")
    if not name:
        raise Refusal(f"{use.flag} needs --moe-ffn-hidden-size. Instead: {target}")
    size = count * line.number(name, 0)
    if not line.has(target):
        return f"{target} {size}", "the shared experts are one MLP of their joint width"
    if line.number(target, 0) != size:
        raise Refusal(f"{use.flag} {count} is {target} {size}, and that is given as {line.value(target)}")
    return f"{target} says the same"


def _load_balancing_type(use: FlagUse, line: CommandLine) -> Result:
    given = line.values_of(use)
    if line.is_foreign("--seq-aux") and given != ["seq_aux_loss"]:
        return f"{use.flag} seq_aux_loss", "with --seq-aux the loss is per sequence"
    if given == ["noaux_tc"]:
        return f"{use.flag} none", "without an auxiliary loss: --moe-router-enable-expert-bias balances"
    unknown = {"softmax_topk", "group_limited_greedy", "pai_megatron_aux_loss", "sparsemixer_topk"} & set(given)
    if unknown:
        raise Refusal(
            f"{use.flag} {sorted(unknown)[0]}: a type of MindSpeed-LLM. Instead: "
            "--moe-router-score-function, --moe-router-num-groups and --moe-router-group-topk with aux_loss or none"
        )
    return None


def _transformer_impl(use: FlagUse, line: CommandLine) -> Result:
    if not line.is_mindspeed or line.transformer_engine or line.values_of(use)[0] != "transformer_engine":
        return None
    why = "MindSpeed stands in for Transformer Engine, which is not there; here the local implementation is accelerated"
    return f"{use.flag} local", why


def _coc_fused_kernel(use: FlagUse, line: CommandLine) -> Result:
    if line.is_mindspeed and line.device not in ("", "cuda"):
        why = f"the kernel uses symmetric memory of CUDA; on {line.device} messages go in chunks"
        raise Skipped(f"{use.flag} is left out: {why}")
    return None


def _hf_to_megatron(use: FlagUse, line: CommandLine) -> Result:
    if not line.has("--load"):
        return "without --load there is nothing to convert"
    folder = line.value("--load")
    if os.path.isfile(os.path.join(folder, "latest_checkpointed_iteration.txt")):
        return f"{folder} already holds a checkpoint of Megatron"
    raise Refusal(
        f"--enable-hf2mg-convert: --load {folder} holds no checkpoint of Megatron, and nothing is converted at the "
        "start. Instead: convert it beforehand with Megatron-Bridge or Megatron's tools/checkpoint"
    )


def _muon_nesterov(use: FlagUse, line: CommandLine) -> Result:
    has_it = line.known is None or use.flag in line.known
    return None if has_it else ("--muon-use-nesterov", "its name before Megatron 0.18")


RULES: dict[str, Rule] = {
    **layer_rules.RULES,
    "--rope-scaling-type": _rope_scaling_type,
    "--rope-scaling-factor": _rope_scaling_factor,
    "--first-k-dense-replace": _first_k_dense_replace,
    "--moe-layer-freq": _moe_layer_freq,
    "--n-shared-experts": _n_shared_experts,
    "--moe-router-load-balancing-type": _load_balancing_type,
    "--transformer-impl": _transformer_impl,
    "--coc-fused-kernel": _coc_fused_kernel,
    "--enable-hf2mg-convert": _hf_to_megatron,
    "--muon-nesterov": _muon_nesterov,
}
