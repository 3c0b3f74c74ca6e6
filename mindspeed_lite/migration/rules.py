"""Flags whose translation depends on values of other flags, a function each.

A rule returns None to keep the flag, a reason to drop it, or replacement words and a reason.
"""

from __future__ import annotations

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


def _rope_scaling_factor(use: FlagUse, line: CommandLine) -> Result:
    if not line.is_foreign("--rope-scaling-type") or line.value("--rope-scaling-type") != "yarn":
        return None
    return ("--rotary-scaling-factor", *use.values), "the factor of YaRN, as Megatron's flag of that name is not"


def _first_k_dense_replace(use: FlagUse, line: CommandLine) -> Result:
    dense = max(0, line.number(use.flag, -1)) if line.is_foreign(use.flag) else 0
    every = line.number("--moe-layer-freq", 1)
    if not line.has("--num-experts"):
        return "it has no effect without --num-experts"
    every = 1 if every == -1 else every
    if not dense and every == 1:
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
    unknown = {"group_limited_greedy", "pai_megatron_aux_loss"} & set(given)
    if unknown:
        raise Refusal(
            f"{use.flag} {sorted(unknown)[0]}: a type of MindSpeed-LLM. Instead: "
            "--moe-router-score-function, --moe-router-num-groups and --moe-router-group-topk with aux_loss or none"
        )
    return None


def _transformer_impl(use: FlagUse, line: CommandLine) -> Result:
    needs_it = line.is_foreign("--enable-dsa-indexer") or line.is_foreign("--full-attention-interval")
    if line.values_of(use)[0] == "local":
        return "Megatron builds this attention with Transformer Engine only" if needs_it else None
    if needs_it or line.transformer_engine or not line.is_mindspeed:
        return None
    return f"{use.flag} local", "Transformer Engine is not here; mindspeed_lite accelerates the local implementation"


def _sparse_attention(use: FlagUse, line: CommandLine) -> Result:
    defaults = {"n-heads": "64", "head-dim": "128", "topk": "2048", "loss-coeff": "1.0"}
    given = ("--index-n-heads", "--index-head-dim", "--index-topk", "--indexer-loss-coeff")
    missing = [f"--dsa-indexer-{name} {defaults[name]}" for name, flag in zip(defaults, given, strict=True)
               if not line.has(flag)]  # fmt: skip
    why = "DeepSeek sparse attention, with MindSpeed-LLM's defaults; it needs Transformer Engine"
    return " ".join(["--experimental-attention-variant dsa", *missing]), why


def _gated_delta_net(use: FlagUse, line: CommandLine) -> Result:
    words = f"--linear-attention-freq {line.number(use.flag, 0)} --attention-output-gate"
    return f"--experimental-attention-variant gated_delta_net {words}", "it needs Transformer Engine"


def _router_pre_softmax(use: FlagUse, line: CommandLine) -> Result:
    if not line.is_foreign("--norm-topk-prob"):
        return None
    if line.has("--moe-router-num-groups", "--n-group"):
        raise Refusal(f"{use.flag} with --norm-topk-prob and groups of experts. Instead: leave {use.flag} out")
    return "with --norm-topk-prob it is Megatron's softmax after the choice"


def _specification(use: FlagUse, line: CommandLine) -> Result:
    is_mindspeeds = line.values_of(use)[0].startswith(("mindspeed_llm.", "mindspeed.", "modellink."))
    return "Megatron chooses the layers by the model's flags" if is_mindspeeds else None


def _coc_kernel(use: FlagUse, line: CommandLine) -> Result:
    if line.device in ("", "cuda"):
        return "--use-ascend-coc --coc-fused-kernel", "fused communication and matmul"
    return "--use-ascend-coc", f"the fused kernel uses symmetric memory of CUDA; on {line.device} messages go in chunks"


def _coc_fused_kernel(use: FlagUse, line: CommandLine) -> Result:
    if line.device not in ("", "cuda"):
        why = f"the kernel uses symmetric memory of CUDA; on {line.device} messages go in chunks"
        raise Skipped(f"{use.flag} is left out: {why}")
    return None


def _muon_nesterov(use: FlagUse, line: CommandLine) -> Result:
    has_it = line.known is None or use.flag in line.known
    return None if has_it else ("--muon-use-nesterov", "its name before Megatron 0.18")


RULES: dict[str, Rule] = {
    **layer_rules.RULES,
    "--rope-scaling-factor": _rope_scaling_factor,
    "--first-k-dense-replace": _first_k_dense_replace,
    "--moe-layer-freq": _moe_layer_freq,
    "--n-shared-experts": _n_shared_experts,
    "--moe-router-load-balancing-type": _load_balancing_type,
    "--transformer-impl": _transformer_impl,
    "--comm-overlap-type=coc_kernel": _coc_kernel,
    "--coc-fused-kernel": _coc_fused_kernel,
    "--enable-dsa-indexer": _sparse_attention,
    "--full-attention-interval": _gated_delta_net,
    "--moe-router-pre-softmax": _router_pre_softmax,
    "--spec": _specification,
    "--muon-nesterov": _muon_nesterov,
}
