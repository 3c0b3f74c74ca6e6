"""`--grad-reduce-compression`: gradients cross the network in 8 bits, with error feedback.

Reaches `_ParamAndGradBucketGroup.start_grad_sync`, where buckets of dense parameters and experts are reduced, with the
distributed optimizer or without, also while the backward pass runs. `DistributedDataParallel.__init__` names the
buckets; `dist_checkpointing`'s `save` and `load` keep what rounding took in a file per rank. Leaves scaling, checks for
NaN and the optimizer alone: gradient norm and clipping read the reduced values.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch

from mindspeed_lite.engine import Around, Context, Feature, Function, Option, Override, Session
from mindspeed_lite.parallel.block_codes import FORMATS
from mindspeed_lite.parallel.compressed_reduce import CompressedReduce, PendingReduce
from mindspeed_lite.parallel.node_groups import NodeGroups
from mindspeed_lite.platform.megatron import DDP_CONFIG

from ._shared.conditions import CUDA_GRAPH_ARGS, fsdp_args
from ._shared.steps import current_step
from ._shared.wrappers import after_init

NAME = "grad_reduce_compression"
SCOPE = "grad_reduce_compression_scope"
WARMUP = "grad_reduce_compression_warmup"
_GROUP = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
_SERIALIZATION = "megatron.core.dist_checkpointing.serialization"


class _Compression:
    """The compressed reductions of one bucket group.

    Attributes:
        key: names the bucket group in checkpoints: model chunk, kind, place, global ranks.
        steps: reductions so far, those of the warm-up included.
    """

    def __init__(self, session: Session, key: str, group: Any, nodes: NodeGroups | None) -> None:
        self._session, self._group, self._nodes = session, group, nodes
        self.key, self.steps = key, 0
        self._reduces: list[CompressedReduce] = []
        self._loaded: list[list[torch.Tensor]] = []

    def start(self, buckets: Any, config: Any) -> list[PendingReduce]:
        if not self._reduces:
            self._reduces = [self._of(bucket.grad_data, config.use_distributed_optimizer) for bucket in buckets]
            self._use_loaded()
        divisor = self._group.size() if config.average_in_collective else 1
        return [reduce.start(bucket.grad_data, divisor) for reduce, bucket in zip(self._reduces, buckets, strict=True)]

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps, "residuals": [each.residuals for each in self._reduces] or self._loaded}

    def load(self, state: dict[str, Any]) -> None:
        self.steps, self._loaded = state["steps"], state["residuals"]
        if self._reduces:
            self._use_loaded()

    def _of(self, gradient: torch.Tensor, scatters: bool) -> CompressedReduce:
        code = self._session.settings[NAME]
        return CompressedReduce(
            gradient.numel(), gradient.device, self._group, code, scatters=scatters, nodes=self._nodes
        )

    def _use_loaded(self) -> None:
        own = [tensor for each in self._reduces for tensor in each.residuals]
        loaded = [tensor for each in self._loaded for tensor in each]
        self._loaded = []
        if [each.shape for each in own] == [each.shape for each in loaded]:
            for tensor, found in zip(own, loaded, strict=True):
                tensor.copy_(found)
        elif loaded:
            self._session.log_decision(f"{NAME}: buckets differ from the checkpoint's: error feedback starts at zero")


# Model chunk -> its number, which names its bucket groups in checkpoints.
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _compressions(session: Session) -> weakref.WeakKeyDictionary[Any, _Compression]:
    """By bucket group."""
    return session.state(NAME, weakref.WeakKeyDictionary)


def _register(session: Session, ddp: Any) -> None:
    """Name the bucket groups that several ranks reduce."""
    found, config = _compressions(session), ddp.ddp_config
    chunks: weakref.WeakSet[Any] = session.state(f"{NAME} chunks", weakref.WeakSet)
    number = _numbers.setdefault(ddp, max((_numbers[each] for each in chunks), default=0) + 1)
    chunks.add(ddp)
    for kind, groups in (("dense", ddp.bucket_groups), ("experts", ddp.expert_parallel_bucket_groups)):
        for place, each in enumerate(groups):
            scatters = config.use_distributed_optimizer
            group = each.intra_distributed_optimizer_instance_group if scatters else each.data_parallel_group
            if group.size() > 1 and (nodes := _nodes_of(session, group)) is not _EXACT:
                ranks = torch.distributed.get_process_group_ranks(group)
                key = f"{number} {kind} {place} of ranks {ranks}"
                found[each] = _Compression(session, key, group, nodes)


# Of groups that nothing is compressed for.
_EXACT: Any = object()


def _nodes_of(session: Session, group: Any) -> Any:
    """Groups within and between nodes; None if all messages are compressed, _EXACT if none is."""
    scope, size = session.settings[SCOPE], _node_size()
    ranks = torch.distributed.get_process_group_ranks(group)
    if scope == "all":
        return None
    if not size or len({rank // size for rank in ranks}) == 1:
        return None if scope == "auto" else _EXACT
    try:
        return NodeGroups(group, size)
    except ValueError as error:
        if scope == "auto":
            return None
        session.fallback(NAME, f"{error}: gradients are reduced as they are")
        return _EXACT


def _node_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "0"))


def _start_grad_sync(wrapped: Function, session: Session) -> Function:
    found, warmup = _compressions(session), session.settings[WARMUP]

    def start_grad_sync(self: Any, force_all_reduce: bool | None = False) -> None:
        compression, config = found.get(self), self.ddp_config
        is_started = getattr(self, "is_first_batch", False) and self.grad_reduce_handle is not None
        if compression is None or is_started:
            return wrapped(self, force_all_reduce)  # type: ignore[no-any-return]
        compression.steps += 1
        if any(getattr(bucket, "params_with_extra_main_grads", ()) for bucket in self.buckets):
            session.fallback(NAME, "gradients of some parameters are summed in another precision")
        elif (current_step(session.context) or compression.steps) > warmup and not (
            force_all_reduce and config.use_distributed_optimizer
        ):
            return _start_compressed(self, compression, config)
        return wrapped(self, force_all_reduce)  # type: ignore[no-any-return]

    return start_grad_sync


def _start_compressed(group: Any, compression: _Compression, config: Any) -> None:
    assert group.grad_reduce_handle is None, "Should not have multiple communication calls outstanding at once"
    if config.check_for_nan_in_grad or config.check_for_large_grads:
        group.check_grads(
            check_for_nan_or_inf=config.check_for_nan_in_grad, check_for_large=config.check_for_large_grads
        )
    with torch.no_grad():
        for bucket in group.buckets:
            if bucket.gradient_scaling_factor != 1.0:
                bucket.grad_data *= bucket.gradient_scaling_factor
        pending = compression.start(group.buckets, config)

    def wait() -> None:
        with torch.no_grad():
            for each in pending:
                each.wait()

    if config.overlap_grad_reduce:
        group.grad_reduce_handle = PendingReduce(wait)
    else:
        wait()


def _file(checkpoint_dir: Any) -> str:
    return os.path.join(checkpoint_dir, f"{NAME}_{torch.distributed.get_rank():05d}.pt")


def _save(wrapped: Function, session: Session) -> Function:
    def save(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        found = wrapped(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        states = {each.key: each.state() for each in _compressions(session).values()}
        try:
            if states:
                torch.save(states, _file(checkpoint_dir))
        except (OSError, RuntimeError) as error:
            session.fallback(NAME, f"error feedback is not in the checkpoint {checkpoint_dir}: {error}")
        return found

    return save


def _load(wrapped: Function, session: Session) -> Function:
    def load(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        found = wrapped(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        compressions, file = list(_compressions(session).values()), _file(checkpoint_dir)
        if not compressions or session.context.arg("finetune", False):
            return found
        states = torch.load(file, map_location="cpu", weights_only=True) if os.path.exists(file) else {}
        for each in compressions:
            if each.key in states:
                each.load(states[each.key])
        if not all(each.key in states for each in compressions):
            session.log_decision(
                f"{NAME}: the checkpoint has no error feedback of these ranks and buckets: it starts at zero"
            )
        return found

    return load


def _why_not(context: Context) -> list[str]:
    reasons = []
    replicas = (context.arg("data_parallel_size", None) or 0) * (context.arg("context_parallel_size", None) or 1)
    if context.host_args is not None and replicas == 1:
        reasons.append("one rank holds each parameter: no gradients are reduced")
    if (context.arg("num_distributed_optimizer_instances", 1) or 1) > 1:
        reasons.append("--num-distributed-optimizer-instances is above 1: Megatron reduces in two steps")
    if context.settings[SCOPE] == "between-nodes" and not _node_size():
        reasons.append("the launcher (LOCAL_WORLD_SIZE) does not say how many ranks a node has")
    return reasons


FEATURE = Feature(
    name=NAME,
    summary="gradients cross the network in 8 bits, with error feedback",
    options=(
        Option(
            "--grad-reduce-compression",
            help="Reduce gradients by messages of int8 or fp8 (a scale for every 64 values) or bf16, summed in fp32.",
            default=None,
            choices=tuple(FORMATS),
            on="int8",
            metavar="{int8,fp8,bf16}",
        ),
        Option(
            "--grad-reduce-compression-scope",
            help="Compress messages between all ranks, or between nodes after a sum in each node; auto: the "
            "latter where a group has several nodes.",
            default="auto",
            choices=("auto", "all", "between-nodes"),
            metavar="{auto,all,between-nodes}",
        ),
        Option(
            "--grad-reduce-compression-warmup",
            help="Steps at the start whose gradients are reduced exactly.",
            default=0,
            least=0,
            metavar="N",
        ),
    ),
    numerics="deviation",
    theme="communication",
    condition=_why_not,
    conflicting_args={
        **CUDA_GRAPH_ARGS,
        **fsdp_args("reduces gradients by itself"),
        "reduce_scatter_with_fp32_accumulation": "--reduce-scatter-with-fp32-accumulation reduces them by itself",
    },
    not_auto="it pays on slow links only, and rounds gradients: enable it explicitly with its flag",
    patches=(
        Around(
            "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
            after_init(_register),
            reads=(
                "bucket_groups",
                "ddp_config",
                "expert_parallel_bucket_groups",
                f"{DDP_CONFIG}.use_distributed_optimizer",
                f"{_GROUP}.data_parallel_group",
                f"{_GROUP}.intra_distributed_optimizer_instance_group",
            ),
        ),
        Override(
            f"{_GROUP}.start_grad_sync",
            _start_grad_sync,
            by_name=True,
            reads=("_ParamAndGradBucket.grad_data", "_ParamAndGradBucket.gradient_scaling_factor"),
        ),
        Around(f"{_SERIALIZATION}:save", _save),
        Around(f"{_SERIALIZATION}:load", _load),
    ),
)
