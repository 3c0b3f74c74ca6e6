"""Traces what parts of a model hold: one layer of each kind, without storage, on one rank of a small world.

Started by `planner.traces` as `python -m mindspeed_lite.dryrun.layer_trace`, which imports torch and Megatron once. A
line of JSON has requests, each of which is traced in a fork; a line answers them.
"""

from __future__ import annotations

import functools
import gc
import inspect
import json
import os
import signal
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# Of a trace, at most.
_SECONDS = 300
# Traced first: what this imports, reads of Megatron's sources and caches, forks have.
_WARM = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --seq-length "
    "64 --max-position-embeddings 64 --bf16 --swiglu --disable-bias-linear --normalization RMSNorm --use-flash-attn "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 "
    "--micro-batch-size 1 --global-batch-size 1 --tensor-model-parallel-size 2 --sequence-parallel --lr 1e-3 "
    "--context-parallel-size 2 --num-experts 4 --moe-layer-freq [0,1] --moe-token-dispatcher-type alltoall "
    "--moe-grouped-gemm --moe-permute-fusion --moe-router-force-load-balancing --use-fused-swiglu --use-fused-rmsnorm "
    "--use-fused-rotary-pos-emb --use-fused-cross-entropy --recompute-norm --recompute-activation-function "
    "--train-iters 1 --eval-interval 1 --eval-iters 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 100 "
    "--transformer-impl local --context-parallel-algo megatron_cp_algo"
)


def main() -> None:
    os.environ.update(MINDSPEED_LITE_DEVICE="cpu", TORCH_COMPILE_DISABLE="1")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # torch.distributed is changed before any module imports from it by name.
    from mindspeed_lite.dryrun import fake_tensors
    from mindspeed_lite.dryrun.worker import fuse_compiled, hide_broken_engine
    from mindspeed_lite.dryrun.world import World

    world = World(1)
    world.install()
    fuse_compiled()
    import torch

    import mindspeed_lite.megatron_adaptor  # noqa: F401

    hide_broken_engine()
    from mindspeed_lite.ops import traced
    from mindspeed_lite.patches._shared import gpt_model

    # Threads do not outlive a fork.
    torch.set_num_threads(1)
    fake_tensors.install()
    traced.dry = True
    # Megatron's parser reads the sources of its configuration classes.
    inspect.getsource = functools.cache(inspect.getsource)  # type: ignore[assignment]
    # No backward: a process whose autograd has threads cannot be forked.
    _trace({"words": _WARM.split(), "world_size": 4, "device": "cpu", "backward": False}, world, gpt_model)
    gpt_model.forget()
    gc.collect()
    gc.freeze()
    # What lives must not depend on when garbage is collected.
    gc.disable()
    for line in sys.stdin:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found = list(pool.map(lambda each: _in_fork(each, world, gpt_model), json.loads(line)))
        answers.write(json.dumps(found) + "\n")
        answers.flush()


def _in_fork(request: dict[str, Any], world: Any, script: Any) -> dict[str, Any]:
    read_end, write_end = os.pipe()
    if child := os.fork():
        os.close(write_end)
        with open(read_end) as answer:
            text = answer.read()
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        how = f"it took over {_SECONDS} seconds" if code == -signal.SIGALRM else f"its process ended with {code}"
        found: dict[str, Any] = json.loads(text) if text else {"error": how}
        return found
    signal.alarm(_SECONDS)
    try:
        found = _trace(request, world, script)
    except BaseException as error:
        traceback.print_exc()
        text = "its parser ended" if isinstance(error, SystemExit) else " ".join(str(error).split())[:300]
        found = {"error": text or type(error).__name__}
    sys.stderr.flush()
    with open(write_end, "w") as answer:
        json.dump(found, answer)
    os._exit(0)


def _trace(request: dict[str, Any], world: Any, script: Any) -> dict[str, Any]:
    from mindspeed_lite.dryrun.fake_tensors import StoragelessMode

    world.size = request["world_size"]
    world.claim(0, 8, None)
    _act_as(request["device"])
    with StoragelessMode():
        model, args = script.build(request["words"])
        return _Parts(model, args).traced(script.forward_step, request.get("backward", True))


def _act_as(device: str) -> None:
    """Let torch save what it saves on a device."""
    import torch

    functional: Any = torch.nn.functional
    if device != "cpu":

        def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
            # A mask of bytes; a CPU's has the input's dtype. None is kept of a forward that is computed again.
            return torch.native_dropout(input, p, True)[0] if training and p and torch.is_grad_enabled() else input

        functional.dropout = dropout
        functional.layer_norm = lambda x, shape, weight=None, bias=None, eps=0.0: _norm(x, weight, bias, 2)
    if device == "cuda" and hasattr(torch.ops.aten, "_fused_rms_norm"):
        functional.rms_norm = lambda x, shape, weight=None, eps=None: _norm(x, weight, None, 1)


@functools.cache
def _norm_of_device() -> Any:
    """Norm of a device's kernel, which keeps its input and some statistics of each row in fp32."""
    import torch

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Any, weight: Any, bias: Any, count: int) -> Any:
            rows = [x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(count)]
            context.save_for_backward(x, weight, bias, *rows)
            # As Transformer Engine's and apex's, also of an fp32 residual stream.
            return torch.empty_like(x, dtype=None if weight is None else weight.dtype)

        @staticmethod
        def backward(context: Any, *grads: Any) -> Any:
            return *(None if each is None else torch.empty_like(each) for each in context.saved_tensors[:3]), None

    return Norm


def _norm(x: Any, weight: Any, bias: Any, count: int) -> Any:
    return _norm_of_device().apply(x, weight, bias, count)


class _Parts:
    """Parts of a model in the order in which they run: embedding, layers, norm, further tokens, output."""

    def __init__(self, model: Any, args: Any) -> None:
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

        from mindspeed_lite.memory.saved_tensors import Tracker

        self.model, self.args = model, args
        self._part, self._stack = "embedding", [""]
        self._starts: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self.order = ["embedding"]
        self.is_backward = False
        inner = model
        while hasattr(inner, "module"):
            inner = inner.module
        self.inner = inner
        starts = [(f"layer {number}", layer) for number, layer in enumerate(inner.decoder.layers)]
        starts += [("norm", inner.decoder.final_layernorm)] if inner.decoder.final_layernorm is not None else []
        starts += [("further", inner.mtp)] if getattr(inner, "mtp", None) is not None else []
        starts += [("output", inner.output_layer)]
        self._modules = starts
        for part, module in starts:
            self._starts[id(module)] = part
            self.order.append(part)
        for _, module in [("embedding", inner.embedding), *starts]:
            for name, each in module.named_modules():
                self._names.setdefault(id(each), name)
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        own = {each.untyped_storage()._cdata for each in model.parameters()}
        self.tracker = Tracker(own.__contains__, True, self._place)
        self.tracker.unpack = self._unpack  # type: ignore[method-assign]
        self._before: set[int] = set()
        self._peaks: dict[str, tuple[int, dict[str, list[int]]]] = {}

    def _enter(self, module: Any, *_: Any) -> None:
        self._part = self._starts.get(id(module), self._part)
        self._stack.append(self._names.get(id(module), self._stack[-1]))

    def _leave(self, *_: Any) -> None:
        self._stack.pop()

    def _place(self) -> str:
        return f"{self._part}|{self._stack[-1]}|{int(self.is_backward)}"

    def _unpack(self, packed: Any) -> Any:
        if self.is_backward:
            self._note()
        return packed.tensor if hasattr(packed, "tensor") and hasattr(packed, "tracker") else packed

    def _note(self) -> None:
        """Keep what is live if it is the most in the backward of the part whose storages were saved last."""
        live = [(*self._where(each), each.storage.nbytes()) for key, each in self.tracker._live.items()
                if key not in self._before]  # fmt: skip
        last = max((place for place, _, is_restored, size in live if size and not is_restored), default=None)
        if last is None:
            return
        there = [(path, size) for place, path, is_restored, size in live if is_restored or place >= last]
        total = sum(size for _, size in there)
        if total > self._peaks.get(self.order[last], (0, {}))[0]:
            self._peaks[self.order[last]] = total, _by_path(there)

    def _where(self, storage: Any) -> tuple[int, str, bool]:
        """Place of its part, path in it, and whether it was saved in a backward."""
        part, path, is_restored = storage.module.split("|")
        return self.order.index(part), path, is_restored == "1"

    def _kept(self) -> dict[str, dict[str, list[int]]]:
        found: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for key, each in self.tracker._live.items():
            if key not in self._before:
                part, path, _ = each.module.split("|")
                found[part].append((path, each.storage.nbytes()))
        return {part: _by_path(entries) for part, entries in found.items()}

    def traced(self, forward_step: Any, with_backward: bool) -> dict[str, Any]:
        with self.tracker:
            losses = [self._forward(forward_step)]
            first = self._kept()
            self._before = set(self.tracker._live)
            losses.append(self._forward(forward_step))
            kept = self._kept()
            self.is_backward, self._part = with_backward, "output"
            if with_backward:
                losses[1].backward()
            self.is_backward = False
        for hook in self._hooks:
            hook.remove()
        words = getattr(self.inner.embedding, "word_embeddings", None)
        return {
            "kept": {part: kept.get(part, {}) for part in self.order},
            # Where they differ.
            "first": {part: each for part, each in first.items() if each != kept.get(part)},
            "peak": {part: each for part, (_, each) in self._peaks.items() if each != kept.get(part)},
            "parameters": self._parameters(),
            "words": 0 if words is None else sum(each.numel() for each in words.parameters()),
        }

    def _parameters(self) -> dict[str, list[int]]:
        """Of each part, dense ones and those of experts; tied ones once."""
        found: dict[str, list[int]] = {}
        seen = set[int]()
        for part, module in (("embedding", self.inner.embedding), *self._modules):
            counts = found.setdefault(part, [0, 0])
            for name, each in module.named_parameters():
                counts[".experts." in f".{name}"] += each.numel() * (id(each) not in seen)
                seen.add(id(each))
        return found

    def _forward(self, forward_step: Any) -> Any:
        self._part = "embedding"
        output, loss = forward_step(iter([_batch(self.args)]), self.model)
        self._part = "output"
        return loss(output)


def _by_path(entries: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for path, size in entries:
        if size:
            both = found.setdefault(path, [0, 0])
            both[0] += 1
            both[1] += size
    return found


def _batch(args: Any) -> dict[str, Any]:
    import torch

    rows, length = args.micro_batch_size, args.seq_length
    text = torch.empty(rows, length + 1, dtype=torch.int64)
    found = {
        "tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous(),
        "position_ids": torch.empty(rows, length, dtype=torch.int64),
        "loss_mask": torch.empty(rows, length, dtype=torch.float32),
    }  # fmt: skip
    if args.create_attention_mask_in_dataloader:
        found["attention_mask"] = torch.empty(rows, 1, length, length, dtype=torch.bool)
    return found


if __name__ == "__main__":
    main()
