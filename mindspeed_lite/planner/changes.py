"""Predicts each memory feature's effect on the peak rank, which may change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from . import context, traces
from .estimate import CATEGORIES, Rank, ranks
from .training import TrainingConfig


@dataclass(frozen=True)
class Change:
    """Effect of one feature.

    Attributes:
        is_on: whether the command enables it.
        without, having: bytes of the peak rank.
        difference: bytes added on that rank, by category.
        stages: total bytes added, by pipeline stage.
    """

    flag: str
    is_on: bool
    without: int
    having: int
    difference: Mapping[str, int]
    stages: tuple[int, ...]


@dataclass(frozen=True)
class _Toggle:
    flag: str
    is_on: Callable[[TrainingConfig], bool]
    on: Mapping[str, object]
    off: Mapping[str, object]
    applies: Callable[[TrainingConfig], bool] = lambda training: True


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _switch(flag: str, applies: Callable[[TrainingConfig], bool] = lambda training: True, name: str = "") -> _Toggle:
    name = name or _name(flag)
    return _Toggle(flag, lambda training: bool(getattr(training, name)), {name: True}, {name: False}, applies)


def _recompute_toggle(flag: str) -> _Toggle:
    name = _name(flag)
    number = f"{name}_num_layers"
    return _Toggle(
        flag,
        lambda training: bool(getattr(training, name)) or getattr(training, number) is not None,
        {name: True},
        {name: False, number: None},
        lambda training: training.recompute_granularity != "full" or training.recompute_method == "block",
    )


def _recompute(flags: str, granularity: str, method: str = "", modules: tuple[str, ...] = ()) -> _Toggle:
    on = {
        "recompute_granularity": granularity,
        "recompute_method": method,
        "recompute_modules": modules,
        "recompute_num_layers": 1 if method else 0,
    }
    off = {"recompute_granularity": "", "recompute_method": "", "recompute_modules": (), "recompute_num_layers": 0}
    return _Toggle(
        flags,
        lambda training: training.recompute_granularity == granularity,
        on,
        off,
        # Would replace another recompute method.
        lambda training: training.recompute_granularity in ("", granularity),
    )


def _choice(
    flag: str, value: str, applies: Callable[[TrainingConfig], bool] = lambda training: True, **off: object
) -> _Toggle:
    """One value of a flag that has none in the command, or this one."""
    name = _name(flag)
    return _Toggle(
        f"{flag} {value}",
        lambda training: getattr(training, name) == value,
        {name: value},
        {name: "", **off},
        lambda training: getattr(training, name) in ("", "disable", value) and applies(training),
    )


# No algorithm flag, and a ring.
_NO_CHOICE: Mapping[str, object] = {
    "cp_comm_type": (),
    "ulysses_degree_in_cp": 0,
    "cp_window_size": 1,
    "use_cp_send_recv_overlap": False,
    "context_parallel_kv_cache_policy": "",
    "use_ulysses_allgather_kv": False,
}
_RING: Mapping[str, object] = {**_NO_CHOICE, "context_parallel_algo": "megatron_cp_algo"}


def _algorithms(training: TrainingConfig) -> set[str]:
    if training.cp == 1:
        return set()
    return {context.algorithm(training, layer) for layer in range(training.num_layers)}


def _is_ring(training: TrainingConfig) -> bool:
    return training.cp > 1 and _algorithms(training) <= {"ring", "hybrid"}


def _steps(training: TrainingConfig) -> bool:
    """Whether our Adam can step."""
    return not training.use_precision_aware_optimizer


def _is_grouped(training: TrainingConfig) -> bool:
    return training.moe_grouped_gemm


def _is_rms(training: TrainingConfig) -> bool:
    return training.normalization == "RMSNorm"


_TOGGLES = (
    _Toggle(
        "--use-flash-attn",
        lambda training: training.flash,
        {"use_flash_attn": True, "create_attention_mask_in_dataloader": False},
        {"use_flash_attn": False, "attention_backend": "auto", "create_attention_mask_in_dataloader": True},
        # A split sequence never keeps scores; latent attention requires it.
        lambda training: training.cp == 1 and not training.multi_latent_attention,
    ),
    _Toggle(
        "--context-parallel-algo ulysses_cp_algo",
        lambda training: _algorithms(training) == {"ulysses"},
        {**_NO_CHOICE, "context_parallel_algo": "ulysses_cp_algo"},
        _RING,
        lambda training: training.cp > 1 and context.divides_heads(training, training.cp),
    ),
    _switch("--use-ulysses-allgather-kv", lambda training: "ulysses" in _algorithms(training)),
    _choice("--context-parallel-kv-cache-policy", "full", _is_ring, context_parallel_cache_interval=0),
    _choice("--context-parallel-kv-cache-policy", "half", _is_ring, context_parallel_cache_interval=0),
    _switch(
        "--masked-softmax-fusion",
        lambda training: training.has_softmax_to_fuse,
        "use_masked_softmax_fusion",
    ),
    _switch(
        "--bias-dropout-fusion",
        lambda training: training.has_dropout_to_fuse,
        "use_bias_dropout_fusion",
    ),
    _switch("--use-fused-rmsnorm", _is_rms),
    _switch("--use-fused-layernorm", lambda training: not _is_rms(training)),
    _switch("--use-fused-swiglu"),
    _switch(
        "--use-fused-rotary-pos-emb",
        lambda training: training.position_embedding_type == "rope" or training.multi_latent_attention,
    ),
    _switch("--use-fused-cross-entropy", lambda training: not training.use_fused_linear_cross_entropy),
    _switch("--use-fused-linear-cross-entropy", lambda training: not training.mtp_num_layers),
    _recompute_toggle("--recompute-activation-function"),
    _recompute_toggle("--recompute-norm"),
    _recompute("--recompute-granularity selective", "selective", modules=("core_attn",)),
    _recompute("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "full", "uniform"),
    _switch("--reuse-fp32-param", lambda training: training.bf16 and _steps(training)),
    _choice("--quant-states", "bf16", _steps),
    _choice("--quant-states", "fp8", _steps),
    _Toggle(
        "--virtual-optimizer all",
        lambda training: bool(training.virtual_optimizer),
        {"virtual_optimizer": ("all",)},
        {"virtual_optimizer": ()},
        lambda training: _steps(training) and not training.swap_optimizer,
    ),
    _switch("--swap-optimizer", lambda training: _steps(training) and not training.virtual_optimizer),
    _switch("--use-distributed-optimizer", lambda training: training.dp > 1),
    # Megatron requires it for experts under TP.
    _switch(
        "--sequence-parallel",
        lambda training: training.tp > 1 and not (training.num_experts and training.sequence_parallel),
    ),
    _choice("--grad-reduce-compression", "int8", lambda training: training.dp * training.cp > 1),
    # All take as much: others are shown where they are on.
    _choice("--grad-reduce-compression", "fp8", lambda training: bool(training.grad_reduce_compression)),
    _choice("--grad-reduce-compression", "bf16", lambda training: bool(training.grad_reduce_compression)),
    _switch("--grad-reduce-in-bf16", lambda training: training.bf16),
    _switch("--accumulate-allreduce-grads-in-fp32", lambda training: training.fp16),
    _switch("--moe-permute-fusion", lambda training: bool(training.num_experts)),
    _choice("--moe-zero-memory", "level0", _is_grouped, moe_zero_memory_num_layers=None),
    _choice("--moe-zero-memory", "level1", _is_grouped, moe_zero_memory_num_layers=None),
)


def changes(training: TrainingConfig) -> Iterator[Change]:
    toggles = [each for each in _TOGGLES if each.applies(training)]
    others = [training.replace(**(each.off if each.is_on(training) else each.on)) for each in toggles]
    traces.prepare([training, *others])
    here = ranks(training)
    for toggle, other in zip(toggles, others, strict=True):
        is_on, there = toggle.is_on(training), ranks(other)
        on, off = (here, there) if is_on else (there, here)
        stages = tuple(one.total - two.total for one, two in zip(on, off, strict=True))
        if any(stages):
            having, without = _fullest(on), _fullest(off)
            difference = {name: having.categories[name] - without.categories[name] for name in CATEGORIES}
            yield Change(toggle.flag, is_on, without.total, having.total, difference, stages)


def _fullest(found: Sequence[Rank]) -> Rank:
    return max(found, key=lambda rank: rank.total)
