"""Flags whose translation depends on their value or on other flags: one function for each.

A rule returns what takes the flag's place, or None where it stays as it is.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import NamedTuple

from .command_line import CommandLine, FlagUse, Refusal


class Found(NamedTuple):
    """Outcome of a TranslatedFlag, words in the flag's place, and why."""

    outcome: str
    words: tuple[str, ...]
    why: str


class CommandContext(NamedTuple):
    """The whole command; whether it has a flag that is MindSpeed's alone; the device; whether TE is there."""

    line: CommandLine
    foreign: bool
    device: str
    transformer_engine: bool


Rule = Callable[[FlagUse, CommandLine], "Found | None"]

# Flags that Megatron's parser or ours has too; the rules look for what only MindSpeed means by them.
SHARED_NAMES = frozenset(
    "--rope-scaling-factor --moe-layer-freq --num-layers --moe-router-load-balancing-type --transformer-impl --spec "
    "--moe-token-dispatcher-type --tokenizer-type --no-gradient-accumulation-fusion --muon-nesterov "
    "--coc-fused-kernel --num-layers-per-virtual-pipeline-stage".split()
)

_MLA = ("--multi-latent-attention", "--multi-head-latent-attention")
_NO_YARN = (
    "YaRN without latent attention is not translated. Instead: Megatron's --position-embedding-type yarn (0.18) with "
    "its own flags"
)


def _values(use: FlagUse, line: CommandLine) -> list[str]:
    if not use.values:
        raise Refusal(f"{use.flag} needs a value")
    return [line.resolved(each) for each in use.values]


def _value(use: FlagUse, line: CommandLine) -> str:
    return _values(use, line)[0]


def _left_out(why: str) -> Found:
    return Found("not needed", (), why)


def _has_latent_attention(line: CommandLine) -> bool:
    return any(line.has(flag) for flag in _MLA)


def virtual_stages(line: CommandLine) -> int:
    """Virtual pipeline stages on each rank."""
    stages = line.number("--num-virtual-stages-per-pipeline-rank", 0)
    for flag in ("--num-layers-per-virtual-pipeline-stage", "--num-layers-per-virtual-pipeline-stag"):
        if line.has(flag):
            stages = line.number("--num-layers", 0) // line.number("--pipeline-model-parallel-size", 1)
            stages //= max(1, line.number(flag, 1))
    return max(1, stages)


# Rotary embedding


def yarn_constant(built_in: float) -> Rule:
    """A number that latent attention has built in and that no flag changes."""

    def rule(use: FlagUse, line: CommandLine) -> Found:
        value = _value(use, line)
        if not _has_latent_attention(line):
            raise Refusal(f"{use.flag}: {_NO_YARN}")
        try:
            same = float(value) == built_in
        except ValueError:
            same = False
        if not same:
            raise Refusal(f"{use.flag} {value}: latent attention in Megatron has {built_in:g} built in: leave it out")
        return _left_out(f"{built_in:g} is built into Megatron's latent attention")

    return rule


def rope_scaling_type(use: FlagUse, line: CommandLine) -> Found:
    value = _value(use, line)
    if value == "llama3":
        return Found("translated", ("--use-rope-scaling",), "Megatron's name for it")
    if value != "yarn":
        raise Refusal(f"--rope-scaling-type {value}: has no counterpart in Megatron")
    if not _has_latent_attention(line):
        raise Refusal(f"--rope-scaling-type yarn: {_NO_YARN}")
    return _left_out("YaRN is what latent attention has by default")


def rope_scaling_factor(use: FlagUse, line: CommandLine) -> Found | None:
    if not line.is_foreign("--rope-scaling-type") or line.value("--rope-scaling-type") != "yarn":
        return None
    return Found(
        "translated",
        ("--rotary-scaling-factor", *use.values),
        "the factor of YaRN, as Megatron's flag of that name is not",
    )


# Layers, stages and experts


def _noop_layers(line: CommandLine) -> tuple[int, ...]:
    if not line.is_foreign("--noop-layers"):
        return ()
    text = line.value("--noop-layers").strip("'\"")
    try:
        return tuple(sorted({int(each) for each in text.split(",") if each.strip()}))
    except ValueError:
        raise Refusal(f"--noop-layers takes numbers of layers, parted by commas, not {text!r}") from None


def num_layers(use: FlagUse, line: CommandLine) -> Found | None:
    noop = _noop_layers(line)
    if not noop:
        return None
    layers = line.number("--num-layers", 0)
    if noop[0] < 0 or noop[-1] >= layers:
        raise Refusal(f"--noop-layers {','.join(map(str, noop))}: --num-layers {layers} has layers 0 to {layers - 1}")
    return Found("translated", ("--num-layers", str(layers - len(noop))), f"without {len(noop)} empty layers")


def noop_layers(use: FlagUse, line: CommandLine) -> Found:
    noop, layers = _noop_layers(line), line.number("--num-layers", 0)
    if noop and line.has("--num-virtual-stages-per-pipeline-rank"):
        raise Refusal(
            "--noop-layers beside --num-virtual-stages-per-pipeline-rank. Instead: "
            "--pipeline-model-parallel-layout in the place of both"
        )
    stages = line.number("--pipeline-model-parallel-size", 1) * virtual_stages(line)
    if stages == 1 or not noop:
        return _left_out("layers are counted without the empty ones, and one stage needs no layout")
    if layers % stages:
        raise Refusal(f"--noop-layers: {layers} layers cannot be divided by {stages} pipeline stages")
    each = layers // stages
    counts = [sum(layer not in noop for layer in range(first, first + each)) for first in range(0, layers, each)]
    why = "the same layers on the same stages; layer numbers in checkpoints of MindSpeed count the empty ones"
    return Found("translated", ("--pipeline-model-parallel-layout", _layout(counts, line)), why)


def layers_of_stages(use: FlagUse, line: CommandLine) -> Found:
    """MindSpeed's table has a row for each pipeline rank, and in it the layers of each of its virtual stages."""
    if line.number("--pipeline-model-parallel-size", 1) == 1:
        return _left_out("one stage needs no layout")
    text = _value(use, line).strip("'\"")
    wanted = Refusal(
        f"--pipeline-num-transformer-layers takes a table [[1,2],[2,1]], a row for each rank, not {text!r}"
    )
    try:
        # What is no whole number stays text.
        rows = json.loads(_repeated(text), parse_float=str, parse_constant=str)
        table = [row if isinstance(row, list) else [row] for row in rows]
    except (ValueError, TypeError):
        raise wanted from None
    if not table or any(type(each) is not int for row in table for each in row):
        raise wanted
    if any(len(row) != len(table[0]) or min(row, default=-1) < 0 for row in table):
        raise wanted
    stages, layers = line.number("--pipeline-model-parallel-size", 1), line.number("--num-layers", 0)
    if len(table) != stages:
        raise Refusal(f"--pipeline-num-transformer-layers has {len(table)} rows for {stages} pipeline ranks")
    if sum(map(sum, table)) != layers:
        raise Refusal(f"--pipeline-num-transformer-layers has {sum(map(sum, table))} layers, and --num-layers {layers}")
    for other in ("--noop-layers", "--num-virtual-stages-per-pipeline-rank"):
        if line.has(other):
            raise Refusal(f"--pipeline-num-transformer-layers beside {other}. Instead: leave {other} out")
    counts = [row[chunk] for chunk in range(len(table[0])) for row in table]
    return Found("translated", ("--pipeline-model-parallel-layout", _layout(counts, line)), "layers of each stage")


def _repeated(text: str) -> str:
    """MindSpeed's table with each number or row that stands before *N written N times."""
    for each in (r"\d+", r"\[[\d\s,]*\]"):
        text = re.sub(rf"({each})\s*\*\s*(\d{{1,3}})(?!\d)", lambda found: ",".join([found[1]] * int(found[2])), text)
    return text


def layers_of_virtual_stage(use: FlagUse, line: CommandLine) -> Found | None:
    if line.is_foreign("--pipeline-num-transformer-layers"):
        return _left_out("the layout in the place of --pipeline-num-transformer-layers says it")
    if _noop_layers(line):
        return _left_out("the layout in the place of --noop-layers says it, and Megatron takes one of the two")
    if use.flag in SHARED_NAMES:
        return None
    _value(use, line)
    return Found("translated", ("--num-layers-per-virtual-pipeline-stage", *use.values), "the whole name")


def _layout(counts: list[int], line: CommandLine) -> str:
    """Layers of each stage -> Megatron's layout string."""
    predictors = line.number("--mtp-num-layers", 0)
    parts = [f"t*{count}" if count else "" for count in counts]
    parts[0] = "E" + parts[0]
    parts[-1] += f"{',' if parts[-1] and predictors else ''}{'m' * predictors}L"
    return "|".join(parts)


def num_layer_list(use: FlagUse, line: CommandLine) -> Found:
    text = _value(use, line).strip("'\"")
    try:
        counts = [int(each) for each in text.split(",")]
    except ValueError:
        raise Refusal(f"--num-layer-list takes numbers parted by commas, not {text!r}") from None
    stages = line.number("--pipeline-model-parallel-size", 1)
    if len(counts) != stages:
        raise Refusal(f"--num-layer-list {text} has {len(counts)} entries for {stages} pipeline stages")
    return Found("translated", ("--pipeline-model-parallel-layout", _layout(counts, line)), "layers of each stage")


def _first_dense(line: CommandLine) -> int:
    return max(0, line.number("--first-k-dense-replace", -1)) if line.is_foreign("--first-k-dense-replace") else 0


def first_k_dense_replace(use: FlagUse, line: CommandLine) -> Found:
    dense, every = _first_dense(line), 1
    if line.has("--moe-layer-freq"):
        every = line.number("--moe-layer-freq", 1)
    if not line.has("--num-experts"):
        return _left_out("there is nothing to do without --num-experts")
    if not dense and every in (-1, 1):
        return _left_out("every layer has experts, which is Megatron's default")
    if every < 1:
        raise Refusal(
            f"--first-k-dense-replace {dense} with --moe-layer-freq {every} does not say which layers have experts"
        )
    noop = _noop_layers(line)
    kept = [layer for layer in range(line.number("--num-layers", 0)) if layer not in noop]
    pattern = [int(layer >= dense and layer % every == 0) for layer in kept]
    counted = f"([0]*{pattern.count(0)}+[1]*{pattern.count(1)})"
    text = counted if every == 1 else f"[{','.join(map(str, pattern))}]"
    return Found("translated", ("--moe-layer-freq", text), "which layers have experts")


def moe_layer_freq(use: FlagUse, line: CommandLine) -> Found | None:
    if line.is_foreign("--first-k-dense-replace"):
        return _left_out("--first-k-dense-replace says which layers have experts")
    if _value(use, line) == "-1":
        return _left_out("every layer has experts, which is Megatron's default")
    return None


def n_shared_experts(use: FlagUse, line: CommandLine) -> Found:
    count = line.number("--n-shared-experts", 0)
    if count == 0:
        return _left_out("0 shared experts are none")
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
        return _left_out(f"{target} says the same")
    return Found("translated", (target, str(size)), "the shared experts are one MLP of their joint width")


def load_balancing_type(use: FlagUse, line: CommandLine) -> Found | None:
    given = _values(use, line)
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
        return _left_out("--moe-router-load-balancing-type seq_aux_loss says it")
    return Found("translated", ("--moe-router-load-balancing-type", "seq_aux_loss"), "an auxiliary loss per sequence")


def token_dispatcher(use: FlagUse, line: CommandLine) -> Found | None:
    if _value(use, line) != "alltoall_seq":
        return None
    return Found("translated", (use.flag, "alltoall"), "it has taken its place in Megatron 0.13")


def norm_topk_prob(use: FlagUse, line: CommandLine) -> Found:
    if line.has("--moe-router-pre-softmax") and line.value("--moe-router-score-function", "softmax") == "softmax":
        raise Refusal(
            "--norm-topk-prob beside --moe-router-pre-softmax: Megatron does not divide those scores "
            "by their sum. Instead: leave out --moe-router-pre-softmax"
        )
    return _left_out("Megatron divides the chosen scores by their sum by itself")


# Memory and fused operators


def _exchange(*unless: str, words: tuple[str, ...]) -> Rule:
    """Flags of ours for experts' exchange, where no other flag says already how it is done."""

    def rule(use: FlagUse, line: CommandLine) -> Found:
        if "allgather" in line.raw("--moe-token-dispatcher-type"):
            return _left_out("it is for --moe-token-dispatcher-type alltoall")
        for flag in unless:
            if line.has(flag) and "disable" not in line.raw(flag):
                return _left_out(f"{flag} says already how experts' tokens are exchanged")
        return Found("translated", words, "our flag for it")

    return rule


def recompute_up_projection(use: FlagUse, line: CommandLine) -> Found:
    if line.value("--recompute-granularity") == "full":
        return _left_out("full recomputation computes it again anyway")
    if line.has("--recompute-modules"):
        if any("mla_up_proj" in each for each in line.raw("--recompute-modules")):
            return _left_out("--recompute-modules says it")
        raise Refusal(f"{use.flag} beside --recompute-modules. Instead: add mla_up_proj to --recompute-modules")
    words = ("--recompute-granularity", "selective", "--recompute-modules", "mla_up_proj")
    return Found("translated", words, "Megatron's flags for it")


def no_gradient_accumulation_fusion(use: FlagUse, line: CommandLine) -> Found | None:
    if not line.is_foreign("--gemm-gradient-accumulation-fusion"):
        return None
    return _left_out(
        "--gemm-gradient-accumulation-fusion asks for the fusion, which serves dense layers and experts alike here"
    )


def by_value(table: dict[str, tuple[str, ...]], refused: str) -> Rule:
    """A flag whose values are flags of ours."""

    def rule(use: FlagUse, line: CommandLine) -> Found:
        value = _value(use, line)
        if value not in table:
            raise Refusal(f"{use.flag} {value}: {refused}")
        words = table[value]
        return Found("translated", words, "our flag for it") if words else _left_out(f"{value} asks for nothing")

    return rule


# Windows, tokenizer, the model's specification, checkpoints


def sliding_window(use: FlagUse, line: CommandLine) -> Found:
    return Found("translated", ("--window-size", f"{line.number(use.flag, 0)},0"), "Megatron takes a pair")


def tokenizer_type(use: FlagUse, line: CommandLine) -> Found | None:
    if _value(use, line) != "PretrainedFromHF":
        return None
    return Found("translated", (use.flag, "HuggingFaceTokenizer"), "Megatron's name for it")


def spec(use: FlagUse, line: CommandLine) -> Found | None:
    if not _value(use, line).startswith(("mindspeed_llm.", "mindspeed.", "modellink.")):
        return None
    return _left_out("Megatron chooses the layers by the model's flags")


def transformer_impl(use: FlagUse, context: CommandContext) -> Found | None:
    """In a MindSpeed command, where MindSpeed stands in for Transformer Engine."""
    if not context.foreign or context.transformer_engine or _value(use, context.line) != "transformer_engine":
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
        return _left_out("without --load there is nothing to convert")
    folder = line.value("--load")
    if os.path.isfile(os.path.join(folder, "latest_checkpointed_iteration.txt")):
        return _left_out(f"{folder} already holds a checkpoint of Megatron")
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
    "--num-layers": num_layers,
    "--noop-layers": noop_layers,
    "--num-layer-list": num_layer_list,
    "--pipeline-num-transformer-layers": layers_of_stages,
    "--num-layers-per-virtual-pipeline-stage": layers_of_virtual_stage,
    "--num-layers-per-virtual-pipeline-stag": layers_of_virtual_stage,
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
    "--comm-overlap-type": by_value(
        {"default": (), "coc": _COC, "coc_kernel": (*_COC, "--coc-fused-kernel"), "mc2": ("--use-ascend-mc2",)},
        "is none of default, coc, coc_kernel and mc2",
    ),
    "--optimizer-selection": by_value(
        {"fused_adamw": ("--use-fused-adamw",), "fused_torch_adamw": ("--use-fused-adamw",)},
        "an averaged copy of the weights is not kept here. Instead: fused_adamw, which is --use-fused-adamw",
    ),
    "--loss-compute-mode": by_value(
        {"default": (), "chunk": ("--use-fused-linear-cross-entropy",)}, "is neither default nor chunk"
    ),
    "--sliding-window": sliding_window,
    "--tokenizer-type": tokenizer_type,
    "--spec": spec,
    "--enable-hf2mg-convert": hf_to_megatron,
    "--muon-nesterov": muon_nesterov,
}
