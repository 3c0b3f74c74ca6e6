"""Flags whose translation depends on their value or on other flags: one function for each.

A rule returns what takes the flag's place, or None where it stays as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from . import layer_rules
from .command_line import CommandLine, FlagUse, Refusal
from .rule_types import CommandContext, Found, Rule, left_out, value_of, values_of

_MLA = ("--multi-latent-attention", "--multi-head-latent-attention")
_NO_YARN = (
    "YaRN without latent attention is not translated. Instead: Megatron's --position-embedding-type yarn (0.18) with "
    "its own flags"
)


def _has_latent_attention(line: CommandLine) -> bool:
    return any(line.has(flag) for flag in _MLA)


# Rotary embedding


def yarn_constant(built_in: float) -> Rule:
    """A number that latent attention has built in and that no flag changes."""

    def rule(use: FlagUse, line: CommandLine) -> Found:
        value = value_of(use, line)
        if not _has_latent_attention(line):
            raise Refusal(f"{use.flag}: {_NO_YARN}")
        try:
            same = float(value) == built_in
        except ValueError:
            same = False
        if not same:
            raise Refusal(f"{use.flag} {value}: latent attention in Megatron has {built_in:g} built in: leave it out")
        return left_out(f"{built_in:g} is built into Megatron's latent attention")

    return rule


def rope_scaling_type(use: FlagUse, line: CommandLine) -> Found:
    value = value_of(use, line)
    if value == "llama3":
        return Found("translated", ("--use-rope-scaling",), "Megatron's name for it")
    if value != "yarn":
        raise Refusal(f"--rope-scaling-type {value}: has no counterpart in Megatron")
    if not _has_latent_attention(line):
        raise Refusal(f"--rope-scaling-type yarn: {_NO_YARN}")
    return left_out("YaRN is what latent attention has by default")


def rope_scaling_factor(use: FlagUse, line: CommandLine) -> Found | None:
    if not line.is_foreign("--rope-scaling-type") or line.value("--rope-scaling-type") != "yarn":
        return None
    return Found(
        "translated",
        ("--rotary-scaling-factor", *use.values),
        "the factor of YaRN, as Megatron's flag of that name is not",
    )


# Experts


def _first_dense(line: CommandLine) -> int:
    return max(0, line.number("--first-k-dense-replace", -1)) if line.is_foreign("--first-k-dense-replace") else 0


def first_k_dense_replace(use: FlagUse, line: CommandLine) -> Found:
    dense, every = _first_dense(line), 1
    if line.has("--moe-layer-freq"):
        every = line.number("--moe-layer-freq", 1)
    if not line.has("--num-experts"):
        return left_out("there is nothing to do without --num-experts")
    if not dense and every in (-1, 1):
        return left_out("every layer has experts, which is Megatron's default")
    if every < 1:
        raise Refusal(
            f"--first-k-dense-replace {dense} with --moe-layer-freq {every} does not say which layers have experts"
        )
    noop = layer_rules.noop_layers_of(line)
    kept = [layer for layer in range(line.number("--num-layers", 0)) if layer not in noop]
    pattern = [int(layer >= dense and layer % every == 0) for layer in kept]
    counted = f"([0]*{pattern.count(0)}+[1]*{pattern.count(1)})"
    text = counted if every == 1 else f"[{','.join(map(str, pattern))}]"
    return Found("translated", ("--moe-layer-freq", text), "which layers have experts")


def moe_layer_freq(use: FlagUse, line: CommandLine) -> Found | None:
    if line.is_foreign("--first-k-dense-replace"):
        return left_out("--first-k-dense-replace says which layers have experts")
    if value_of(use, line) == "-1":
        return left_out("every layer has experts, which is Megatron's default")
    return None


def n_shared_experts(use: FlagUse, line: CommandLine) -> Found:
    count = line.number("--n-shared-experts", 0)
    if count == 0:
        return left_out("0 shared experts are none")
    name = next((each for each in ("--moe-ffn-hidden-size", "--moe-intermediate-size") if line.has(each)), "")
    if not name:
        raise Refusal(
            "--n-shared-experts needs --moe-ffn-hidden-size beside it. Instead: --moe-shared-expert-intermediate-size"
        )
    size = count * line.number(name, 0)
    target = "--moe-shared-expert-intermediate-size"
    if line.has(target):
        if line.number(target, 0) != size:
            raise Refusal(f"--n-shared-experts {count} is {target} {size}, and that is given as {line.value(target)}")
        return left_out(f"{target} says the same")
    return Found("translated", (target, str(size)), "the shared experts are one MLP of their joint width")


def load_balancing_type(use: FlagUse, line: CommandLine) -> Found | None:
    given = values_of(use, line)
    if line.is_foreign("--seq-aux") and given != ["seq_aux_loss"]:
        return Found("translated", (use.flag, "seq_aux_loss"), "with --seq-aux the loss is per sequence")
    if given == ["noaux_tc"]:
        return Found(
            "translated", (use.flag, "none"), "without an auxiliary loss: --moe-router-enable-expert-bias balances"
        )
    unknown = {"softmax_topk", "group_limited_greedy", "pai_megatron_aux_loss", "sparsemixer_topk"} & set(given)
    if unknown:
        raise Refusal(
            f"{use.flag} {sorted(unknown)[0]}: a type of MindSpeed-LLM. Instead: "
            "--moe-router-score-function, --moe-router-num-groups and --moe-router-group-topk with aux_loss or none"
        )
    return None


def seq_aux(use: FlagUse, line: CommandLine) -> Found:
    if line.has("--moe-router-load-balancing-type"):
        return left_out("--moe-router-load-balancing-type seq_aux_loss says it")
    return Found("translated", ("--moe-router-load-balancing-type", "seq_aux_loss"), "an auxiliary loss per sequence")


def token_dispatcher(use: FlagUse, line: CommandLine) -> Found | None:
    if value_of(use, line) != "alltoall_seq":
        return None
    return Found("translated", (use.flag, "alltoall"), "it has taken its place in Megatron 0.13")


def norm_topk_prob(use: FlagUse, line: CommandLine) -> Found:
    if line.has("--moe-router-pre-softmax") and line.value("--moe-router-score-function", "softmax") == "softmax":
        raise Refusal(
            "--norm-topk-prob beside --moe-router-pre-softmax: Megatron does not divide those scores "
            "by their sum. Instead: leave out --moe-router-pre-softmax"
        )
    return left_out("Megatron divides the chosen scores by their sum by itself")


# Memory and fused operators


def _exchange(*unless: str, words: tuple[str, ...]) -> Rule:
    """Flags of ours for experts' exchange, where no other flag says already how it is done."""

    def rule(use: FlagUse, line: CommandLine) -> Found:
        if "allgather" in line.raw("--moe-token-dispatcher-type"):
            return left_out("it is for --moe-token-dispatcher-type alltoall")
        for flag in unless:
            if line.has(flag) and "disable" not in line.raw(flag):
                return left_out(f"{flag} says already how experts' tokens are exchanged")
        return Found("translated", words, "our flag for it")

    return rule


def recompute_up_projection(use: FlagUse, line: CommandLine) -> Found:
    if line.value("--recompute-granularity") == "full":
        return left_out("full recomputation computes it again anyway")
    if line.has("--recompute-modules"):
        if any("mla_up_proj" in each for each in line.raw("--recompute-modules")):
            return left_out("--recompute-modules says it")
        raise Refusal(f"{use.flag} beside --recompute-modules. Instead: add mla_up_proj to --recompute-modules")
    words = ("--recompute-granularity", "selective", "--recompute-modules", "mla_up_proj")
    return Found("translated", words, "Megatron's flags for it")


def no_gradient_accumulation_fusion(use: FlagUse, line: CommandLine) -> Found | None:
    if not line.is_foreign("--gemm-gradient-accumulation-fusion"):
        return None
    return left_out(
        "--gemm-gradient-accumulation-fusion asks for the fusion, which serves dense layers and experts alike here"
    )


def byvalue_of(table: dict[str, tuple[str, ...]], refused: str) -> Rule:
    """A flag whose values are flags of ours."""

    def rule(use: FlagUse, line: CommandLine) -> Found:
        value = value_of(use, line)
        if value not in table:
            raise Refusal(f"{use.flag} {value}: {refused}")
        words = table[value]
        return Found("translated", words, "our flag for it") if words else left_out(f"{value} asks for nothing")

    return rule


# Windows, tokenizer, the model's specification, checkpoints


def sliding_window(use: FlagUse, line: CommandLine) -> Found:
    return Found("translated", ("--window-size", f"{line.number(use.flag, 0)},0"), "Megatron takes a pair")


def tokenizer_type(use: FlagUse, line: CommandLine) -> Found | None:
    if value_of(use, line) != "PretrainedFromHF":
        return None
    return Found("translated", (use.flag, "HuggingFaceTokenizer"), "Megatron's name for it")


def spec(use: FlagUse, line: CommandLine) -> Found | None:
    if not value_of(use, line).startswith(("mindspeed_llm.", "mindspeed.", "modellink.")):
        return None
    return left_out("Megatron chooses the layers by the model's flags")


def transformer_impl(use: FlagUse, context: CommandContext) -> Found | None:
    """In a MindSpeed command, where MindSpeed stands in for Transformer Engine."""
    if not context.foreign or context.transformer_engine or value_of(use, context.line) != "transformer_engine":
        return None
    why = (
        "Transformer Engine is not there; MindSpeed stands in for it, and here the local implementation is accelerated"
    )
    return Found("translated", (use.flag, "local"), why)


def coc_fused_kernel(use: FlagUse, context: CommandContext) -> Found | None:
    """In a MindSpeed command, whose kernel is the NPU's."""
    if not context.foreign or context.device in ("", "cuda"):
        return None
    return Found("skipped", (), f"the kernel uses symmetric memory of CUDA; on {context.device} messages go in chunks")


def hf_to_megatron(use: FlagUse, line: CommandLine) -> Found:
    if not line.has("--load"):
        return left_out("without --load there is nothing to convert")
    folder = line.value("--load")
    if os.path.isfile(os.path.join(folder, "latest_checkpointed_iteration.txt")):
        return left_out(f"{folder} already holds a checkpoint of Megatron")
    raise Refusal(
        f"--enable-hf2mg-convert: --load {folder} holds no checkpoint of Megatron, and nothing is converted at the "
        "start. Instead: convert it beforehand with Megatron-Bridge or Megatron's tools/checkpoint"
    )


def muon_nesterov(use: FlagUse, line: CommandLine) -> Found | None:
    if line.known is None or use.flag in line.known:
        return None
    return Found("translated", ("--muon-use-nesterov",), "its name before Megatron 0.18")


BY_CONTEXT: dict[str, Callable[[FlagUse, CommandContext], Found | None]] = {
    "--transformer-impl": transformer_impl,
    "--coc-fused-kernel": coc_fused_kernel,
}
_COC = ("--use-ascend-coc",)
_OVERLAP = ("--moe-alltoall-overlap-comm",)
RULES: dict[str, Rule] = {
    "--beta-fast": yarn_constant(32),
    "--beta-slow": yarn_constant(1),
    "--rope-scaling-beta-fast": yarn_constant(32),
    "--rope-scaling-beta-slow": yarn_constant(1),
    "--rope-scaling-original-max-position-embeddings": yarn_constant(4096),
    "--original-max-position-embeddings": yarn_constant(4096),
    "--rope-scaling-type": rope_scaling_type,
    "--rope-scaling-factor": rope_scaling_factor,
    "--num-layers": layer_rules.num_layers,
    "--noop-layers": layer_rules.noop_layers,
    "--num-layer-list": layer_rules.num_layer_list,
    "--pipeline-num-transformer-layers": layer_rules.layers_of_stages,
    "--num-layers-per-virtual-pipeline-stage": layer_rules.layers_of_virtual_stage,
    "--num-layers-per-virtual-pipeline-stag": layer_rules.layers_of_virtual_stage,
    "--first-k-dense-replace": first_k_dense_replace,
    "--moe-layer-freq": moe_layer_freq,
    "--n-shared-experts": n_shared_experts,
    "--moe-router-load-balancing-type": load_balancing_type,
    "--seq-aux": seq_aux,
    "--moe-token-dispatcher-type": token_dispatcher,
    "--norm-topk-prob": norm_topk_prob,
    "--moe-zerc": _exchange(*_OVERLAP, "--moe-zero-memory", words=("--moe-hierarchical-alltoallv",)),
    "--moe-permutation-async-comm": _exchange(
        *_OVERLAP,
        "--moe-fb-overlap",
        "--overlap-moe-expert-parallel-comm",
        "--moe-hierarchical-alltoallv",
        "--moe-zerc",
        words=_OVERLAP,
    ),
    "--recompute-mla-up-proj": recompute_up_projection,
    "--mla-zero-memory": recompute_up_projection,
    "--no-gradient-accumulation-fusion": no_gradient_accumulation_fusion,
    "--comm-overlap-type": byvalue_of(
        {"default": (), "coc": _COC, "coc_kernel": (*_COC, "--coc-fused-kernel"), "mc2": ("--use-ascend-mc2",)},
        "is none of default, coc, coc_kernel and mc2",
    ),
    "--optimizer-selection": byvalue_of(
        {"fused_adamw": ("--use-fused-adamw",), "fused_torch_adamw": ("--use-fused-adamw",)},
        "an averaged copy of the weights is not kept here. Instead: fused_adamw, which is --use-fused-adamw",
    ),
    "--loss-compute-mode": byvalue_of(
        {"default": (), "chunk": ("--use-fused-linear-cross-entropy",)}, "is neither default nor chunk"
    ),
    "--sliding-window": sliding_window,
    "--tokenizer-type": tokenizer_type,
    "--spec": spec,
    "--enable-hf2mg-convert": hf_to_megatron,
    "--muon-nesterov": muon_nesterov,
}
