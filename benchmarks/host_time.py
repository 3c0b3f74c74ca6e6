"""Host time and launches of a layer where computation is nothing: features on over off, in one process, in turn."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from typing import Any

import torch

import mindspeed_lite
from benchmarks.configurations import DENSE
from benchmarks.harness import Benchmark, Options, Row
from lab.ranks import ratio_in_words
from mindspeed_lite import runtime
from mindspeed_lite.tuning.host import LaunchRecorder

HIDDEN, HEADS = 64, 4
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {
        "num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2,
    },
}  # fmt: skip
_EXPERTS = "moe_grouped_gemm,moe_permute_fusion,moe_router_fusion"
PASSES = ("forward", "backward")
_WARMUP = 10


def _flags(model: str, features: str) -> dict[str, bool]:
    """`auto`, or all features that work in a layer, by name."""
    if features == "auto":
        return {"auto": True}
    names = f"{DENSE},bias_dropout_fusion" + (f",{_EXPERTS}" if model == "experts" else "")
    return {name: True for name in names.split(",")}


def _arguments(model: str, options: Options) -> dict[str, Any]:
    """Megatron's arguments for the conditions of features."""
    return {
        "transformer_impl": "local", "normalization": "RMSNorm", "bf16": True, "swiglu": True, "optimizer": "adam",
        "seq_length": options.tokens, "num_experts": MODELS[model].get("num_moe_experts"), "add_bias_linear": False,
        "moe_token_dispatcher_type": "alltoall", "use_distributed_optimizer": False, "sequence_parallel": False,
        "position_embedding_type": "rope",
        **{f"{name}_parallel_size": 1 for name in ("tensor_model", "pipeline_model", "context", "expert_model")},
    }  # fmt: skip


class _Layers:
    """A block of layers in Megatron's DDP, with what the active features set in its configuration."""

    def __init__(self, model: str, options: Options) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.transformer_block import TransformerBlock

        config = TransformerConfig(
            num_layers=options.layers, hidden_size=HIDDEN, ffn_hidden_size=HIDDEN, num_attention_heads=HEADS,
            normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu,
            add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16,
            gradient_accumulation_fusion=False, persist_layer_norm=False, apply_rope_fusion=False,
            # As a script has them unless told otherwise.
            bias_activation_fusion=True, bias_dropout_fusion=True, **MODELS[model],
        )  # fmt: skip
        for name, value in _asked().items():
            setattr(config, name, value)
        experts = config.num_moe_experts
        spec = get_gpt_layer_local_spec(experts, config.moe_grouped_gemm, normalization="RMSNorm")
        block = TransformerBlock(config, spec).bfloat16()
        self.model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), block)
        self._count = options.layers
        shape = options.tokens, 1, HIDDEN
        self._x = torch.randn(*shape, dtype=torch.bfloat16)
        self._mask = torch.ones(1, 1, options.tokens, options.tokens).triu(1).bool()
        self._positions = RotaryEmbedding(HIDDEN // HEADS, 1.0)(options.tokens)

    def times(self, steps: int) -> dict[str, float]:
        """Median seconds of a layer by pass."""
        found: list[tuple[float, float]] = []
        for _ in range(steps):
            self.model.zero_grad_buffer()
            x = self._x.detach().requires_grad_()
            begin = time.perf_counter()
            y = self.model(x, self._mask, rotary_pos_emb=self._positions)
            middle = time.perf_counter()
            y.sum().backward()
            found.append((middle - begin, time.perf_counter() - middle))
        medians = (statistics.median(each) / self._count for each in zip(*found, strict=True))
        return dict(zip(PASSES, medians, strict=True))

    def launches(self) -> dict[str, float]:
        recorder = LaunchRecorder()
        with recorder.recording([self.model]):
            self.times(1)
        within = {each: n for each, n in recorder.counts.items() if each[0].startswith("layers.")}
        return {
            each: sum(n for (_, during), n in within.items() if during == each) / self._count for each in PASSES
        }  # fmt: skip


def _asked() -> dict[str, Any]:
    """Fields of a configuration that active features set for a script, and Megatron's own flags among theirs."""
    from megatron.core.transformer import TransformerConfig

    active = runtime.current()
    if active is None:
        return {}
    fields = {each.name for each in dataclasses.fields(TransformerConfig)}
    own = {option.dest: True for each in active.plan.applied for option in each.feature.options if option.is_switch}
    set_ = {name: value for each in active.plan.applied for name, value in each.arguments.items()}
    set_ |= {"apply_rope_fusion": True} if "use_fused_rotary_pos_emb" in own else {}
    set_ |= {"gradient_accumulation_fusion": True} if "use_gradient_accumulation_fusion" in own else {}
    return {name: value for name, value in {**own, **set_}.items() if name in fields}


def _start() -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MINDSPEED_LITE_DEVICE="cpu")
    torch.set_num_threads(1)
    # The device layer, which stays.
    mindspeed_lite.enable()
    folder = tempfile.mkdtemp()
    torch.distributed.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)


def _measure(options: Options) -> list[Row]:
    _start()
    return [_compared(model, features, options) for model in options.models for features in options.features]


def _compared(model: str, features: str, options: Options) -> Row:
    flags, arguments = _flags(model, features), _arguments(model, options)

    def within(arm: str) -> contextlib.AbstractContextManager[Any]:
        return mindspeed_lite.enabled(host_args=arguments, **flags) if arm == "on" else contextlib.nullcontext()

    arms: dict[str, _Layers] = {}
    times: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
    launches = {}
    for arm in times:
        with within(arm):
            arms[arm] = _Layers(model, options)
            arms[arm].times(_WARMUP)
            launches[arm] = arms[arm].launches()
    for repeat in range(options.repeats):
        for arm in times if repeat % 2 == 0 else reversed(times):
            with within(arm):
                arms[arm].times(_WARMUP)
                times[arm].append(arms[arm].times(options.steps))
    totals = {arm: [sum(each.values()) for each in its] for arm, its in times.items()}
    ratio = ratio_in_words(totals["on"], totals["off"])
    return {
        "model": model, "features": features, "launches": launches, "ratio": ratio,
        "seconds": {
            arm: {each: statistics.median(one[each] for one in its) for each in PASSES} for arm, its in times.items()
        },
    }  # fmt: skip


def _times(during: str) -> Any:
    def cell(row: Row) -> str:
        off, on = (1e6 * row["seconds"][arm][during] for arm in ("off", "on"))
        return f"{off:.0f}, {on:.0f}, {on / off:.2f}"

    return cell


def _launches(during: str) -> Any:
    return lambda row: ", ".join(f"{row['launches'][arm][during]:g}" for arm in ("off", "on"))


BENCHMARK = Benchmark(
    name="host_time",
    title="Host time of a layer where computation is nothing",
    about="{layers} layers of hidden size 64 on {tokens} tokens in Megatron's DDP, in one process with one thread, off "
    "and on in turn (A B B A). Medians of {steps} steps, {repeats} times.",
    columns={
        "model": lambda row: row["model"],
        "features": lambda row: row["features"],
        "forward in us: off, on, ratio": _times("forward"),
        "backward in us": _times("backward"),
        "both, on over off": lambda row: row["ratio"],
        "launches forward: off, on": _launches("forward"),
        "backward": _launches("backward"),
    },
    measure=_measure,
    options={"models": [*MODELS], "features": ["auto", "all"], "tokens": 8, "layers": 4, "steps": 60, "repeats": 12},
    tiny={"models": ["dense"], "features": ["all"], "tokens": 8, "layers": 1, "steps": 2, "repeats": 2},
    choices={"models": [*MODELS], "features": ["auto", "all"]},
    note="`all` are those of [`make bench`](cpu.md) with `bias_dropout_fusion`, and for experts those of experts. A "
    "layer's time includes a fourth of the block's final norm and of the loss's sum. Ratios have their 95 % "
    "interval. On CPU a kernel of this package is a call of C++; on a GPU it is a launch by Triton, which costs the "
    "host more.",
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
