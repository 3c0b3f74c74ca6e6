"""Parses a training command line into a TrainingConfig, without Megatron.

Uses Megatron's defaults. Flags of layers that have no field are a trace's alone; others are ignored.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence

from . import context, flags, layer_flags, layout, swapped
from .training import ArgumentError, TrainingConfig, pattern

_SWITCHES = {**flags.ON, **flags.GATED, **flags.TIMED}
# Vocabulary size by tokenizer type.
VOCABULARIES = {
    "GPT2BPETokenizer": 50257,
    "BertWordPieceLowerCase": 30522,
    "BertWordPieceCase": 28996,
}


def read(words: Sequence[str], world_size: int = 1, device: str = "cuda", vocabulary: int = 0) -> TrainingConfig:
    """Parse and check a command; vocabulary: unpadded size, if left to a tokenizer."""
    return check(describe(words, world_size, device, vocabulary))


def describe(words: Sequence[str], world_size: int = 1, device: str = "cuda", vocabulary: int = 0) -> TrainingConfig:
    """Parse a command without checks."""
    given = _parse(words)
    if missing := [f"--{name.replace('_', '-')}" for name in flags.REQUIRED if name not in given]:
        hint = "; arguments inside a shell script are not seen" if any(w.endswith(".sh") for w in words) else ""
        verb, them = ("is", "it") if len(missing) == 1 else ("are", "them")
        raise ArgumentError(
            f"{', '.join(missing)} {verb} not in the command, and nothing can be predicted without {them}: add "
            f"{them}{hint}"
        )
    types: Mapping[str, str] = {field.name: "" for field in dataclasses.fields(TrainingConfig)}
    rest = {name: value for name, value in given.items() if name in types}
    training = TrainingConfig(**rest, world_size=world_size, device=device)  # type: ignore[arg-type]
    return _completed(training, given, vocabulary)


def _completed(training: TrainingConfig, given: Mapping[str, object], vocabulary: int) -> TrainingConfig:
    if training.num_experts:
        _check_pattern("--moe-layer-freq", training.moe_layer_freq, training)
    if training.window_attn_skip_freq:
        _check_pattern("--window-attn-skip-freq", training.window_attn_skip_freq, training)
    changed: dict[str, object] = {}
    hidden = training.hidden_size
    if not training.ffn_hidden_size:
        changed["ffn_hidden_size"] = int(4 * hidden * 2 / 3 / 64) * 64 if training.swiglu else 4 * hidden
    ffn = changed.get("ffn_hidden_size", training.ffn_hidden_size)
    if training.num_experts and not training.moe_ffn_hidden_size:
        changed["moe_ffn_hidden_size"] = ffn
    if not training.kv_channels:
        if hidden % training.num_attention_heads:
            raise ArgumentError(
                f"--hidden-size {hidden} cannot be divided by --num-attention-heads {training.num_attention_heads}: "
                "change one of them, or add --kv-channels"
            )
        changed["kv_channels"] = hidden // training.num_attention_heads
    if training.recompute_activations and not training.recompute_granularity:
        changed["recompute_granularity"] = "selective"
    if training.apply_query_key_layer_scaling:
        changed["attention_softmax_in_fp32"] = True
    granularity = changed.get("recompute_granularity", training.recompute_granularity)
    if granularity == "selective" and not training.recompute_modules:
        changed["recompute_modules"] = ("core_attn",)
    if training.moe_fb_overlap:
        changed["overlap_moe_expert_parallel_comm"] = True
    if training.flash:
        # The feature sets this.
        changed["create_attention_mask_in_dataloader"] = False
    per_stage = training.num_layers_per_virtual_pipeline_stage
    if per_stage:
        if training.num_layers % (training.pp * per_stage):
            raise ArgumentError(
                f"--num-layers-per-virtual-pipeline-stage {per_stage} does not divide the layers of each stage "
                f"(--num-layers {training.num_layers}, {training.pp} stages): change one of them"
            )
        changed["num_virtual_stages_per_pipeline_rank"] = training.num_layers // training.pp // per_stage
    if training.multi_latent_attention and not training.rope_type:
        changed["rope_type"] = "yarn"
    if training.pipeline_model_parallel_layout:
        changed["num_virtual_stages_per_pipeline_rank"] = layout.read(training)
    changed["padded_vocab_size"] = _vocabulary(training, given, vocabulary)
    return training.replace(**changed)


def _vocabulary(training: TrainingConfig, given: Mapping[str, object], vocabulary: int) -> int:
    if not vocabulary and given.get("padded_vocab_size"):
        return int(str(given["padded_vocab_size"]))
    words = vocabulary or int(str(given.get("vocab_size") or 0))
    words = words or VOCABULARIES.get(str(given.get("tokenizer_type", "GPT2BPETokenizer")), 0)
    if not words:
        raise ArgumentError(
            f"--tokenizer-type {given['tokenizer_type']} does not say how large the vocabulary is: add --vocabulary N "
            "before the `--`"
        )
    multiple = int(str(given.get("make_vocab_size_divisible_by", 128))) * training.tp
    return math.ceil(words / multiple) * multiple


def check(training: TrainingConfig) -> TrainingConfig:
    """Apply layout-dependent values; raises ArgumentError for invalid or unsupported layouts."""
    model_ranks = training.tp * training.pp * training.cp
    if training.world_size % model_ranks:
        raise ArgumentError(
            f"{training.world_size} ranks cannot be divided by --tensor-model-parallel-size {training.tp} times "
            f"--pipeline-model-parallel-size {training.pp}"
            f"{f' times --context-parallel-size {training.cp}' if training.cp > 1 else ''}: start as many ranks as a "
            f"multiple of {model_ranks}, or say how many with --world-size"
        )
    if training.num_experts and training.world_size % (training.ep * training.etp * training.pp):
        raise ArgumentError(
            f"{training.world_size} ranks cannot be divided by --expert-model-parallel-size "
            f"{training.expert_model_parallel_size} times the other parallel sizes of experts "
            f"({training.ep * training.etp * training.pp} in all): change one of them or --world-size"
        )
    if training.num_experts % training.ep:
        raise ArgumentError(
            f"--num-experts {training.num_experts} cannot be divided by --expert-model-parallel-size {training.ep}: "
            "change one of them"
        )
    for name in ("num_attention_heads", "ffn_hidden_size"):
        if getattr(training, name) % training.tp:
            raise ArgumentError(
                f"--{name.replace('_', '-')} {getattr(training, name)} cannot be divided by "
                f"--tensor-model-parallel-size {training.tp}: change one of them"
            )
    if not training.global_batch_size:
        training = training.replace(global_batch_size=training.micro_batch_size * training.dp)
    if training.global_batch_size % (training.micro_batch_size * training.dp):
        raise ArgumentError(
            f"--global-batch-size {training.global_batch_size} cannot be divided by --micro-batch-size "
            f"{training.micro_batch_size} times {training.dp} data-parallel ranks: change one of them"
        )
    if training.microbatches > flags.MOST_MICRO_BATCHES:
        raise ArgumentError(
            f"--global-batch-size {training.global_batch_size} is {training.microbatches:,} micro-batches a step: more "
            f"than {flags.MOST_MICRO_BATCHES:,} are not predicted: give a smaller one"
        )
    if training.sequence_parallel and training.tp == 1:
        training = training.replace(sequence_parallel=False)  # as in Megatron
    if training.multi_latent_attention and not training.flash:
        raise ArgumentError(
            "--multi-latent-attention: Megatron's own local attention does not take its head sizes: add "
            "--use-flash-attn"
        )
    context.check(training)
    if training.num_experts and training.moe_router_topk > training.num_experts:
        raise ArgumentError(
            f"--moe-router-topk {training.moe_router_topk} of --num-experts {training.num_experts}: give fewer"
        )
    for coefficient in training.moe_aux_loss_coeff:
        _number("--moe-aux-loss-coeff", coefficient, float)
    if training.moe_pad_expert_input_to_capacity and training.moe_expert_capacity_factor is None:
        raise ArgumentError("--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor: add it")
    if training.group_query_attention and training.num_attention_heads % training.num_query_groups:
        raise ArgumentError(
            f"--num-attention-heads {training.num_attention_heads} cannot be divided by --num-query-groups "
            f"{training.num_query_groups}: change one of them"
        )
    by_hand = (training.decoder_first_pipeline_num_layers or 0) + (training.decoder_last_pipeline_num_layers or 0)
    if by_hand > training.num_layers:
        raise ArgumentError(
            f"--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers are {by_hand} of --num-layers "
            f"{training.num_layers}: give fewer"
        )
    for name, choices in flags.CHOICES.items():
        if getattr(training, name) not in ("", *choices):
            flag = f"--{name.replace('_', '-')}"
            raise ArgumentError(f"{flag} {getattr(training, name)}: it is one of {', '.join(choices)}")
    if training.optimizer != "adam":
        raise ArgumentError(f"--optimizer {training.optimizer} is not predicted: adam is")
    if training.use_precision_aware_optimizer and not training.use_distributed_optimizer:
        raise ArgumentError("--use-precision-aware-optimizer needs --use-distributed-optimizer, as in Megatron: add it")
    for name in ("reuse_fp32_param", "quant_states", "virtual_optimizer", "swap_optimizer"):
        if getattr(training, name) and training.use_precision_aware_optimizer:
            flag = f"--{name.replace('_', '-')}"
            raise ArgumentError(f"{flag} does not apply with --use-precision-aware-optimizer: drop one of them")
    for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        if getattr(training, name) != "fp32" and not training.use_precision_aware_optimizer:
            flag = f"--{name.replace('_', '-')}"
            raise ArgumentError(f"{flag} {getattr(training, name)} needs --use-precision-aware-optimizer: add it")
    if training.quant_states not in ("", "bf16", "fp8"):
        raise ArgumentError(f"--quant-states is bf16 or fp8, not {training.quant_states!r}")
    if training.recompute_granularity == "full" and training.recompute_method not in ("uniform", "block"):
        raise ArgumentError("--recompute-granularity full needs --recompute-method uniform or block, as in Megatron")
    for budget in training.virtual_optimizer:
        if budget != "all":
            _number("--virtual-optimizer", budget, float)
    if training.virtual_optimizer and training.swap_optimizer:
        raise ArgumentError(
            "--virtual-optimizer and --swap-optimizer both keep Adam's moments in host memory: drop one"
        )
    if training.swap_attention:
        swapped.chosen(training)
    if training.schedules_method not in ("", "dualpipev"):
        raise ArgumentError(f"--schedules-method {training.schedules_method}: dualpipev is the one that is predicted")
    if len(training.virtual_optimizer) not in (0, 1, training.pp):
        raise ArgumentError(
            f"--virtual-optimizer has {len(training.virtual_optimizer)} budgets for {training.pp} pipeline stages: "
            "give one, or one for each stage"
        )
    return training


def _check_pattern(flag: str, text: str, training: TrainingConfig) -> None:
    try:
        found = pattern(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        raise ArgumentError(f"{flag} is a number or a list of 0 and 1, not {text[:80]!r}") from None
    if isinstance(found, int) and found < 1:
        raise ArgumentError(f"{flag} is at least 1, not {found}")
    if not isinstance(found, int) and len(found) != training.num_layers:
        raise ArgumentError(
            f"{flag} {text} has {len(found)} entries for {training.num_layers} layers: change one of them"
        )


def _parse(words: Sequence[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    traced: list[str] = []
    place = 0
    while place < len(words):
        flag, has_value, value = words[place].partition("=")
        place += 1
        if not flag.startswith("--"):
            continue
        values = [value] if has_value else []
        while not has_value and place < len(words) and not words[place].startswith("--"):
            values.append(words[place])
            place += 1
        _refuse(flag, values)
        if flag in _SWITCHES:
            found[_SWITCHES[flag]] = True
        elif flag in flags.OFF or flag in flags.TIMED_OFF:
            found[flags.OFF.get(flag) or flags.TIMED_OFF[flag]] = False
        elif flag in flags.LISTS:
            is_sizes = flag == "--hierarchical-context-parallel-sizes"
            found[flags.LISTS[flag]] = tuple(_number(flag, each, int) if is_sizes else each for each in values)
        elif flag == "--interleave-sliding-window":
            before = int(_number(flag, _one(flag, values), int))
            found.update(window_size=(before, 0), window_attn_skip_freq="2")
        elif flag == "--window-size":
            found["window_size"] = _window(_one(flag, values))
        elif flag in flags.TEXTS:
            found[flags.TEXTS[flag]] = _one(flag, values)
        elif flag in flags.INTEGERS or flag in flags.NUMBERS:
            number = _number(flag, _one(flag, values), int if flag in flags.INTEGERS else float)
            found[(flags.INTEGERS.get(flag) or flags.NUMBERS[flag])] = number
        elif flag not in flags.REFUSED and layer_flags.is_of_layers(flag):
            traced += [flag, *values]
    return found | {"traced_words": tuple(traced)}


def _one(flag: str, values: Sequence[str]) -> str:
    if not values:
        raise ArgumentError(f"{flag} has no value: give one after it")
    return values[0]


def _window(text: str) -> tuple[int, int]:
    """With or without parentheses, as in Megatron."""
    try:
        before, after = (int(each) for each in text.strip("()").split(","))
    except ValueError:
        raise ArgumentError(f"--window-size is two numbers such as 127,0, not {text!r}") from None
    return before, after


def _number(flag: str, text: str, kind: type[int] | type[float]) -> int | float:
    try:
        number = kind(text)
    except ValueError:
        raise ArgumentError(f"{flag} is a number, not {text[:40]!r}") from None
    least = 0 if kind is float or flag in flags.FROM_ZERO else 1
    if not number >= least:
        raise ArgumentError(f"{flag} is at least {least}, not {text}")
    most = flags.MOST.get(flag, flags.LARGEST)
    if number > most:
        raise ArgumentError(f"{flag} {text[:40]}: more than {most:,} are not predicted: give a smaller number")
    return number


def _refuse(flag: str, values: Sequence[str]) -> None:
    if flag in flags.FOREIGN:
        raise ArgumentError(f"{' '.join([flag, *values[:1]])}: {flags.FOREIGN[flag]}")
    nothing = ("0", "none", "1") if flag in flags.COUNTED_FROM_ONE else ("0", "none")
    if flag in flags.REFUSED and (not values or values[0].lower() not in nothing):
        raise ArgumentError(f"{' '.join([flag, *values[:1]])}: {flags.REFUSED[flag]}")


def untimed(words: Sequence[str]) -> list[tuple[str, str]]:
    """Flags without predicted time, and what is predicted instead."""
    asked = {word.partition("=")[0] for word in words}
    return [(flag, reason) for flag, reason in flags.NOT_TIMED.items() if flag in asked]


def misspelt(words: Sequence[str]) -> list[tuple[str, str]]:
    tables = (
        _SWITCHES,
        flags.TIMED_OFF,
        flags.NOT_TIMED,
        flags.OFF,
        flags.INTEGERS,
        flags.NUMBERS,
        flags.TEXTS,
        flags.LISTS,
        flags.REFUSED,
    )
    known = ["--window-size", "--interleave-sliding-window", *(flag for table in tables for flag in table)]
    asked = [word.partition("=")[0] for word in words if word.startswith("--")]
    close = [(flag, difflib.get_close_matches(flag, known, 1, 0.93)) for flag in asked if flag not in known]
    return [(flag, found[0]) for flag, found in close if found]
