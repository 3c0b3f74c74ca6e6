"""What parts of a model hold, traced from layers that Megatron builds without storage; kept in the cache folder.

A trace has one layer of each kind. It depends on neither pipeline stages, data parallelism nor the optimizer.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from mindspeed_lite.platform import cache

from . import flags, layer_flags
from .layers import LayerKind, kinds
from .optimizer import gradient_width
from .training import ArgumentError, TrainingConfig

# Bytes and number of saved storages by module.
Saved = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Part:
    """Part of a model.

    Attributes:
        dense, experts: parameters.
        once: saved for all micro-batches together. kept: for each, after its forward.
        peak: while its backward runs, with what is restored.
    """

    dense: int
    experts: int
    once: Saved
    kept: Saved
    peak: Saved


@dataclass(frozen=True)
class ModelTrace:
    """layers: by kind. shared: what a chunk's layers save together for each micro-batch. words: word embeddings."""

    parts: Mapping[str, Part]
    layers: Mapping[LayerKind, Part]
    shared: Saved
    words: int


# Fields that change no layer, or whose words `request` writes itself.
_LEFT_OUT = {
    "num_layers", "pipeline_model_parallel_size", "global_batch_size", "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank", "microbatch_group_size_per_vp_stage", "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "moe_layer_freq", "cp_comm_type",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "window_attn_skip_freq",
    "use_distributed_optimizer", "accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16", "quant_states",
    "grad_reduce_compression", "grad_reduce_compression_scope", "reuse_fp32_param", "swap_optimizer",
    "virtual_optimizer", "use_fused_adamw", "optimizer", "pipeline_schedule", "schedules_method", "swap_attention",
    "swap_modules", "moe_fb_overlap", "overlap_moe_expert_parallel_comm", "transformer_impl", "attention_backend",
    "use_flash_attn", "recompute_num_layers", "recompute_norm_num_layers", "recompute_norm", "cuda_graph_impl",
    "recompute_activation_function_num_layers", "recompute_activation_function", "moe_zero_memory_num_layers",
    "recompute_activations", "fp16", "bf16", "max_position_embeddings", "tokenizer_type", "position_embedding_type",
    "moe_shared_expert_gate", "rope_type", "vocab_size", "padded_vocab_size", "make_vocab_size_divisible_by",
    "create_attention_mask_in_dataloader", "micro_batch_size", "balanced_moe_experts", "balanced_moe_hot_expert_num",
    "num_query_groups", "use_bias_dropout_fusion", "use_masked_softmax_fusion", "use_precision_aware_optimizer",
    "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype",
}  # fmt: skip


def request(training: TrainingConfig) -> tuple[dict[str, Any], list[LayerKind]]:
    """What is traced, and the kind of each layer but the first, which is as the second."""
    training = training.replace(expert_model_parallel_size=_traced_parts(training))
    found = kinds(training)
    rows = [found[0], *found] if not training.context_parallel_cache_interval else found
    if training.mtp_num_layers:
        rows = [*rows, kinds(training, last=True)[0]]
    # What a micro-batch saves is in proportion to its size, but for logits that are kept up to a limit.
    batch = training.micro_batch_size if training.use_fused_linear_cross_entropy else 1
    words = ["--num-layers", str(len(rows)), "--micro-batch-size", str(batch)]
    for flag, name in (*flags.ON.items(), *flags.INTEGERS.items(), *flags.NUMBERS.items(), *flags.TEXTS.items(),
                       *flags.LISTS.items()):  # fmt: skip
        if name in _LEFT_OUT:
            continue
        value, plain = getattr(training, name), _DEFAULTS[name]
        if value == plain or value in (None, "", ()):
            continue
        words += [flag] if value is True else [flag, *map(str, value if isinstance(value, tuple) else [value])]
    words += [flag for flag, name in flags.OFF.items() if name not in _LEFT_OUT and not getattr(training, name)]
    if training.group_query_attention:
        words += ["--num-query-groups", str(training.num_query_groups)]
    words += ["--position-embedding-type", training.position_embedding_type]
    words += ["--rope-type", training.rope_type] if training.rope_type else []
    words += ["--max-position-embeddings", str(max(training.max_position_embeddings, training.seq_length))]
    words += ["--bf16"] if training.bf16 or (training.fp16 and training.device != "cpu") else []
    words += ["--fp16"] if training.fp16 and training.device == "cpu" else []
    words += ["--use-flash-attn"] if training.flash else []
    # A trace runs as on a CPU, which alone has these.
    words += ["--bias-dropout-fusion"] if training.use_bias_dropout_fusion and training.has_dropout_to_fuse else []
    words += ["--masked-softmax-fusion"] if training.use_masked_softmax_fusion and training.has_softmax_to_fuse else []
    words += [] if training.create_attention_mask_in_dataloader else ["--no-create-attention-mask-in-dataloader"]
    if training.num_experts:
        words += ["--moe-layer-freq", str([int(each.has_experts) for each in rows]).replace(" ", "")]
        words += ["--moe-router-force-load-balancing"]
        words += ["--moe-shared-expert-gate"] if training.moe_shared_expert_gate else []
        # Megatron refuses the bias with softmax, and what is saved does not depend on it.
        words += ["--moe-router-score-function", "sigmoid"] if training.moe_router_enable_expert_bias else []
    if training.window_size:
        words += ["--window-size", ",".join(map(str, training.window_size))]
        words += ["--window-attn-skip-freq", str([int(each.window is not None) for each in rows]).replace(" ", "")]
    if training.cp_comm_type:
        words += ["--cp-comm-type", *(each.comm_type for each in rows)]
    whole = sum(each.is_recomputed for each in rows)
    if training.recompute_granularity == "full":
        words += ["--recompute-num-layers", str(whole if training.recompute_method == "block" else 1)]
    for name in ("norm", "activation_function"):
        count = sum(getattr(each, f"gives_{name}") for each in rows)
        flag = f"--recompute-{name.replace('_', '-')}"
        words += [flag] if count == len(rows) else [f"{flag}-num-layers", str(count)] if count else []
    zeros = sum(each.is_zero_memory for each in rows)
    words += ["--moe-zero-memory-num-layers", str(zeros)] if 0 < zeros < len(rows) else []
    dense = training.tp * training.cp
    world = math.lcm(dense, training.ep * training.etp)
    words += ["--global-batch-size", str(batch * world // dense)]
    divisor = str(training.padded_vocab_size // training.tp)
    words += training.traced_words
    words += [*_FIXED, "--vocab-size", str(training.padded_vocab_size - 1), "--make-vocab-size-divisible-by", divisor]
    return {"words": words, "world_size": world, "device": training.device}, rows


_FIXED = (
    "--lr 1e-3 --train-iters 1 --eval-interval 1 --eval-iters 0 --mock-data --tokenizer-type NullTokenizer "
    "--transformer-impl local"
).split()
_DEFAULTS = {name: field.default for name, field in TrainingConfig.__dataclass_fields__.items()}


@lru_cache(maxsize=256)
def of(training: TrainingConfig) -> ModelTrace:
    """Raises ArgumentError for what Megatron does not build."""
    asked, rows = request(training)
    answer = answers([asked])[0]
    if "error" in answer and training.traced_words:
        # On a GPU they may run.
        refused[" ".join(training.traced_words)] = answer["error"]
        return of(training.replace(traced_words=()))
    if "error" in answer:
        raise ArgumentError(f"Megatron does not train this: {answer['error']}")
    batch = 1 if training.use_fused_linear_cross_entropy else training.micro_batch_size
    scale = _traced_parts(training) // training.expert_model_parallel_size
    parts = {name: _part(answer, name, batch, scale) for name in answer["kept"]}
    shared: dict[str, tuple[int, int]] = {}
    layers = {kind: parts[f"layer {number}"] for number, kind in reversed([*enumerate(rows)])}
    if len(rows) > 1 and rows[0] == rows[1]:
        shared = _less(parts["layer 0"].kept, parts["layer 1"].kept)
        layers[rows[0]] = parts["layer 1"]
    layers = {kind: _spread(training, part) if kind.has_experts else part for kind, part in layers.items()}
    return ModelTrace(parts, layers, shared, answer["words"])


# Counts of tokens that a dry run knows: those of all experts on all of their ranks.
_COUNTS = 1 << 15


def _traced_parts(training: TrainingConfig) -> int:
    """Parts of the experts in a trace: a few experts a rank have all that more have, but for their number."""
    parts, experts = training.expert_model_parallel_size, training.num_experts
    # What swaps looks at each storage, of which more experts have more.
    varies = training.moe_token_dispatcher_type != "alltoall" or training.moe_tp_extend_ep or training.swap_attention
    if parts == 1 or varies:
        return parts
    traced = parts
    while experts // traced % 2 == 0 and experts // traced > 2 and 2 * traced * training.etp * experts <= _COUNTS:
        traced *= 2
    return traced


def _part(answer: Mapping[str, Any], name: str, batch: int, scale: int) -> Part:
    """scale: experts of a rank for each that was traced."""
    saved = {
        what: {path: (each[0], each[1]) for path, each in answer[what].get(name, answer["kept"][name]).items()}
        for what in ("first", "kept", "peak")
    }
    once = _less(saved["first"], saved["kept"])
    kept, peak = (
        {path: (count, size * batch) for path, (count, size) in saved[what].items()} for what in ("kept", "peak")
    )
    dense, experts = answer["parameters"].get(name, (0, 0))
    return Part(dense, experts * scale, once, kept, peak)


def _spread(training: TrainingConfig, part: Part) -> Part:
    """With uneven tokens of experts, and with copies of hot experts."""
    if training.ep == 1:
        return part
    kept, peak = (
        {
            path: (count, round(size * training.expert_load) if path == "mlp" or ".experts" in path else size)
            for path, (count, size) in saved.items()
        }
        for saved in (part.kept, part.peak)
    )
    if training.balanced_moe_experts and training.moe_token_dispatcher_type == "alltoall":
        # At most, with gradients if products add to main gradients.
        number = min(training.balanced_moe_hot_expert_num, training.num_experts)
        width = training.width + (gradient_width(training) if training.fuses_accumulation else 0)
        copies = number, number * part.experts * training.ep // training.num_experts * width
        kept, peak = kept | {"mlp.copies": copies}, peak | {"mlp.copies": copies}
    return replace(part, kept=kept, peak=peak)


def _less(one: Saved, other: Saved) -> dict[str, tuple[int, int]]:
    found = {}
    for path, (count, size) in one.items():
        fewer, less = other.get(path, (0, 0))
        if size > less:
            found[path] = max(1, count - fewer), size - less
    return found


def prepare(trainings: Sequence[TrainingConfig]) -> None:
    """Trace several at once, on all cores."""
    answers([request(each)[0] for each in trainings])


# Answers by request, of whichever sources.
known: dict[str, Any] = {}
# Words of `TrainingConfig.traced_words` that no trace has, and what Megatron says.
refused: dict[str, str] = {}


def answers(requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What was traced before, or is now."""
    texts = [json.dumps(each, sort_keys=True) for each in requests]
    missing = [text for text in dict.fromkeys(texts) if text not in known and not _read(text)]
    if missing:
        for text, answer in zip(missing, _server().ask(missing), strict=True):
            known[text] = answer
            # What failed here may be mended outside of what the stamp sees.
            if "error" not in answer:
                _write(text, answer)
    return [known[text] for text in texts]


def _read(text: str) -> bool:
    with contextlib.suppress(OSError, ValueError, cache.NoCache):
        known[text] = json.loads(_file(text).read_text())
        return True
    return False


def _write(text: str, answer: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError, cache.NoCache):
        file = _file(text)
        file.parent.mkdir(exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(answer))
        part.replace(file)


def _file(text: str) -> Path:
    name = hashlib.sha256(f"{_stamp()} {text}".encode()).hexdigest()[:32]
    return cache.folder() / "traces" / f"{name}.json"


@lru_cache(maxsize=1)
def _stamp() -> str:
    """Of what a trace runs: sources of this package and of Megatron, and torch's release."""
    folders = [Path(__file__).resolve().parents[1], *layer_flags.sources()]
    files = [(str(each), each.stat().st_mtime_ns) for folder in folders for each in sorted(folder.rglob("*.py"))]
    release = importlib.metadata.version("torch") if importlib.util.find_spec("torch") else ""
    return hashlib.sha256(repr((files, release)).encode()).hexdigest()


class _Server:
    """A process that traces: it imports torch and Megatron once."""

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the process)
        self._child = subprocess.Popen(
            [sys.executable, "-m", "mindspeed_lite.dryrun.layer_trace"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        atexit.register(self._child.kill)

    def ask(self, texts: Sequence[str]) -> list[dict[str, Any]]:
        assert self._child.stdin is not None and self._child.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(f"[{', '.join(texts)}]\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        if not line:
            self._log.seek(0)
            last = self._log.read().decode(errors="replace").strip().splitlines()[-1:] or ["it ended"]
            raise ArgumentError(
                f"memory is that of Megatron's layers, which cannot be built here ({last[0][:200]}): install torch and "
                "megatron-core with megatron.training, or put a Megatron-LM checkout first on PYTHONPATH"
            )
        found: list[dict[str, Any]] = json.loads(line)
        return found


@lru_cache(maxsize=1)
def _server() -> _Server:
    return _Server()
