"""What a row is made of: layouts, options, features with their variants, and the command line that they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_lite import runtime
from mindspeed_lite.engine import Option
from tests.harness import training

STEPS = 3
SCRIPT = str(Path(training.__file__).with_name("paired_script.py"))

_OF = training.LAYOUTS
_EXPERTS = _OF["ep2"][1].replace("--expert-model-parallel-size 2 ", "")
LAYOUTS: dict[str, tuple[int, str]] = {
    **{name: _OF[name] for name in ("single", "tp2", "tp2_sp", "pp2", "pp2_vpp2", "ep2")},
    "dp2": (2, ""),
    "dp2_distributed_optimizer": (2, "--use-distributed-optimizer"),
    "cp2": (2, "--context-parallel-size 2"),
    "tp2_sp_ep2": (2, f"{_OF['tp2_sp'][1]} {_OF['ep2'][1]} --expert-tensor-parallel-size 1"),
}
_FULL = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"
_DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce"
# Flags by option; `-FLAG` takes one of the model's away. What comes after `=` is a variant.
OPTIONS: dict[str, str] = {
    "dropout": "--hidden-dropout 0.1 --attention-dropout 0.1",
    "fp16": "-bf16 --fp16 --initial-loss-scale 1024",
    "fp32": "-bf16",
    "gqa": "--group-query-attention --num-query-groups 2",
    "mla": "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 16",
    "mtp": "--mtp-num-layers 1",
    "tied": "-untie-embeddings-and-output-weights",
    **{f"frozen={each}": "" for each in ("embedding", "first_layer", "all_but_norms", "all_but_fc2", "all_but_output")},
    **{f"lora={each}": "" for each in ("qkv", "all")},
    "capacity": "--moe-expert-capacity-factor 1.0",
    "capacity=padded": "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity",
    "expert_bias": "--moe-router-enable-expert-bias --moe-router-score-function sigmoid",
    "overlap": "--overlap-grad-reduce",
    "overlap=both": f"{_DISTRIBUTED} --overlap-param-gather",
    "overlap=instances": f"{_DISTRIBUTED} --num-distributed-optimizer-instances 2",
    "recomputation": f"{_FULL} uniform",
    "recomputation=block": f"{_FULL} block",
    "recomputation=selective": "--recompute-granularity selective --recompute-modules core_attn",
    "gradients16": "--grad-reduce-in-bf16",
    "windows": "--window-size 16,0",
    "windows=documents": "--window-size 16,0 --reset-attention-mask --reset-position-ids",
    # What some features are about.
    "experts": _EXPERTS,
    "allgather": "--moe-token-dispatcher-type allgather",
    "shared_expert": "--moe-shared-expert-intermediate-size 64",
    "router_fp32": "--moe-router-dtype fp32",
    "combined": "--overlap-moe-expert-parallel-comm",
    "layernorm": "-normalization --normalization LayerNorm",
    "biases": "-disable-bias-linear",
    "qk_l2_norm": "--qk-l2-norm",
    "per_token_loss": "--calculate-per-token-loss",
    # Beside a feature that places layers in another way: weights follow from the layers' names.
    "by_name": "--num-layers 4",
}
NEEDS_EXPERTS = {"capacity", "expert_bias", "allgather", "shared_expert", "router_fp32", "combined"}
# In which layouts Megatron trains an option.
ONLY = {"combined": {"ep2", "tp2_sp_ep2"}, "overlap=instances": {"dp2", "dp2_distributed_optimizer"}}
# Of each at most one: what Megatron refuses, or what says the same.
EXCLUSIVE = (
    {"fp16", "fp32", "gradients16"},
    {"mla", "gqa"},
    {"mla", "qk_l2_norm"},
    {"frozen", "lora"},
    {"allgather", "shared_expert", "combined"},
    {"lora", "tp2", "tp2_sp", "tp2_sp_ep2"},  # the adapters here are of whole layers
    {"tied", "frozen"},
    {"recomputation", "combined"},
    {"experts", "ep2", "tp2_sp_ep2", "tp2"},
    {"cp2", "windows"},
)
# Flags by variant of a feature; without any, its first option as a switch.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "adaptive_memory": {
        "": {"adaptive_memory": True, "memory_budget": 1.0},
        "tight": {"adaptive_memory": True, "memory_budget": 0.0005},
    },
    "balanced_moe_experts": {"": {"balanced_moe_experts": True, "balanced_moe_break_even": 0.0}},
    "context_parallel_algo": {
        "ring": {"context_parallel_algo": "megatron_cp_algo"},
        "ulysses": {"context_parallel_algo": "ulysses_cp_algo"},
        "gathered": {"context_parallel_algo": "kvallgather_cp_algo"},
        "cached": {"context_parallel_algo": "megatron_cp_algo", "context_parallel_kv_cache_policy": "full"},
    },
    "enable_expert_placement": {
        "": {"enable_expert_placement": True, "expert_placement_freq": 1, "expert_placement_break_even": 0.0}
    },
    "grad_reduce_compression": {each: {"grad_reduce_compression": each} for each in ("int8", "fp8", "bf16")},
    "moe_hierarchical_alltoallv": {"": {"moe_hierarchical_alltoallv": True, "moe_node_size": 1}},
    "moe_record_load": {"": {"moe_record_load": "/dev/null"}},
    "moe_wgrad_side_stream": {"": {"moe_wgrad_side_stream": "always"}},
    "moe_zero_memory": {each: {"moe_zero_memory": each} for each in ("level0", "level1")},
    "pipeline_schedule": {each: {"pipeline_schedule": each} for each in ("1f1b", "interleaved", "zb-h1", "zb-auto")},
    "quant_states": {each: {"quant_states": each} for each in ("bf16", "fp8")},
    "recompute_activation_function": {
        "": {"recompute_activation_function": True},
        "1": {"recompute_activation_function": True, "recompute_activation_function_num_layers": 1},
    },
    "recompute_in_bubble": {
        "": {"recompute_in_bubble": True, "pipeline_schedule_max_live": 1},
        "advance": {"recompute_in_advance": True},
    },
    "recompute_norm": {
        "": {"recompute_norm": True},
        "1": {"recompute_norm": True, "recompute_norm_num_layers": 1},
    },
    "schedules_method": {
        "": {"schedules_method": "dualpipev"},
        "detach": {"schedules_method": "dualpipev", "dualpipev_dw_detach": True},
    },
    "use_ascend_coc": {
        "": {"use_ascend_coc": True, "coc_parallel_num": 2},
        "auto": {"use_ascend_coc": True},
    },
    "virtual_optimizer": {"": {"virtual_optimizer": ["all"]}},
}
# What delays weight gradients, which the fused product alone does.
DELAYS = ("delay_wgrad_compute", "moe_fb_overlap", "pipeline_schedule=zb-", "schedules_method=detach")
FUSES = "gradient_accumulation_fusion"
# Its data are documents of a file: tests/training/test_balance_sequence_lengths.py trains it.
_ELSEWHERE = {"balance_sequence_lengths"}
# Without it Megatron's own attention takes no part of a sequence, and on its local implementation no latent attention.
SPLITS, LATENT = "context_parallel_algo", "use_flash_attn"
# Their pages say that dropout drops other elements with them than without.
DRAWS = {"bias_dropout_fusion", "context_parallel_algo", "pipeline_schedule", "schedules_method", "use_flash_attn"}
# With it ranks draw the weights of other experts.
MOVES = "moe_tp_extend_ep"


def name_of(token: str) -> str:
    return token.partition("=")[0]


@dataclass(frozen=True)
class Row:
    """What is trained off and on."""

    layout: str
    options: tuple[str, ...] = ()
    features: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str) -> Row:
        """Raises ValueError with what is wrong."""
        base, _, features = text.partition(":")
        layout, *options = base.split(",")
        row = cls(layout, tuple(options), tuple(filter(None, features.split(","))))
        asked = [(layout, [*LAYOUTS])]
        asked += [(each, [*OPTIONS]) for each in options] + [(each, [*TOKENS]) for each in row.features]
        for each, known in asked:
            if each not in known:
                raise ValueError(f"{each!r} is none of {', '.join(known)}")
        return row

    def __str__(self) -> str:
        return f"{','.join((self.layout, *self.options))}:{','.join(self.features)}"

    @property
    def tokens(self) -> frozenset[str]:
        return frozenset((self.layout, *self.options, *self.features))

    @property
    def base(self) -> Row:
        return Row(self.layout, self.options)

    @property
    def always(self) -> list[str]:
        """The features without which Megatron does not train this layout and these options."""
        needed = [SPLITS] * (self.layout == "cp2") + [LATENT] * ("mla" in self.options)
        return [each for each in self.features if name_of(each) in needed]

    def having(self, features: Iterable[str]) -> Row:
        return Row(self.layout, self.options, tuple(features))

    def without(self, token: str) -> Row:
        left = [tuple(each for each in its if each != token) for its in (self.options, self.features)]
        return Row(self.layout, *left)

    @property
    def arguments(self) -> list[str]:
        """The command line, without the script."""
        model, given = [*training.MODEL], [*_ALWAYS, *LAYOUTS[self.layout][1].split()]
        for option in self.options:
            for word in OPTIONS[option].split():
                if word.startswith("-") and not word.startswith("--"):
                    place = model.index(f"-{word}")
                    del model[place : place + 1 + (not model[place + 1].startswith("--"))]
                else:
                    given.append(word)
        return [*model, *given, *_argv(flags_of(self.features))]


_ALWAYS = f"{' '.join(training.NO_DROPOUT)} --train-iters {STEPS} --eval-iters 0 --split 100,0,0".split()
TOKENS: dict[str, str] = {
    f"{feature.name}{'=' if variant else ''}{variant}": feature.name
    for feature in runtime.catalogue()
    for variant in VARIANTS.get(feature.name, {"": {}})
    if feature.name not in _ELSEWHERE
}
DESTS: dict[str, Option] = {option.dest: option for option in runtime.catalogue().options()}


def flags_of(tokens: Iterable[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for token in tokens:
        name, _, variant = token.partition("=")
        switch = {runtime.catalogue()[name].options[0].dest: True}
        found |= VARIANTS[name][variant] if name in VARIANTS else switch
    return found


def _argv(flags: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for dest, value in flags.items():
        words.append(DESTS[dest].flag)
        words += [] if value is True else map(str, value) if isinstance(value, list) else [str(value)]
    return words
