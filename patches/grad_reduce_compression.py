"""`--grad-reduce-compression`: gradients cross the network in 8 bits, with error feedback.

Reaches `_ParamAndGradBucketGroup.start_grad_sync`, where buckets of dense parameters and experts are reduced, with the
distributed optimizer or without, also while the backward pass runs. `DistributedDataParallel.__init__` names the
buckets; `dist_checkpointing`'s `save` and `load` keep what rounding took in a file per rank; `ChainedOptimizer.step`
changes the loss scale that it is in, or skips a step. Leaves scaling, checks for NaN and the optimizer alone: gradient
norm and clipping read the reduced values.
"""

from __future__ import annotations

import hashlib
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
_OPTIMIZER = "megatron.core.optimizer.optimizer"
_SERIALIZATION = "megatron.core.dist_checkpointing.serialization"


class _Compression:
    """The compressed reductions of one bucket group.

    Attributes:
        key: names the bucket group in checkpoints: model chunk, parameters, global ranks.
        steps: reductions so far, those of the warm-up included.
    """

    def __init__(self, key: str, code: str, bucket_group: Any, ranks: Any, nodes: NodeGroups | None) -> None:
        self.key, self.steps = key, 0
        config, self._ranks = bucket_group.ddp_config, ranks.size()
        self._reduces = [
            CompressedReduce(
                bucket.grad_data.numel(), bucket.grad_data.device, ranks, code,
                scatters=config.use_distributed_optimizer, nodes=nodes,
            )
            for bucket in bucket_group.buckets
        ]  # fmt: skip

    def start(self, buckets: Any, config: Any) -> list[PendingReduce]:
        divisor = self._ranks if config.average_in_collective else 1
        return [reduce.start(bucket.grad_data, divisor) for reduce, bucket in zip(self._reduces, buckets, strict=True)]

    def residuals(self) -> list[torch.Tensor]:
        return [tensor for each in self._reduces for tensor in each.residuals]

    def rescale(self, factor: torch.Tensor | float) -> None:
        for each in self.residuals():
            each.mul_(factor)

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps, "residuals": self.residuals()}

    def load(self, state: Any) -> None:
        """Load a `state`; raises LookupError, TypeError or ValueError if it is of another bucket group."""
        own, found = self.residuals(), state["residuals"]
        if [each.shape for each in own] != [each.shape for each in found]:
            raise ValueError("buckets differ from the checkpoint's")
        self.steps = int(state["steps"])
        for tensor, each in zip(own, found, strict=True):
            tensor.copy_(each)


# Model chunk -> its number, which names its bucket groups in checkpoints.
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _compressions(session: Session) -> weakref.WeakKeyDictionary[Any, _Compression | None]:
    """Compression of each bucket group; None where gradients are not compressed."""
    return session.state(NAME, weakref.WeakKeyDictionary)


def _active(session: Session) -> list[_Compression]:
    return [each for each in _compressions(session).values() if each is not None]


def _register(session: Session, ddp: Any) -> None:
    """Make the reductions of bucket groups that several ranks reduce."""
    found = _compressions(session)
    chunks: weakref.WeakSet[Any] = session.state(f"{NAME} chunks", weakref.WeakSet)
    number = _numbers.setdefault(ddp, max((_numbers[each] for each in chunks), default=0) + 1)
    chunks.add(ddp)
    names = {parameter: name for name, parameter in ddp.module.named_parameters()}
    for each in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups):
        found[each] = None
        group = _group_of(each)
        if group.size() > 1 and (nodes := _nodes_of(session, group)) is not _EXACT:
            # Their order in a list is Megatron's and may change.
            held = " ".join(names.get(parameter, "") for bucket in each.buckets for parameter in bucket.params_list)
            ranks = torch.distributed.get_process_group_ranks(group)
            key = f"{number} {hashlib.sha256(held.encode()).hexdigest()[:16]} of ranks {ranks}"
            found[each] = _Compression(key, session.settings[NAME], each, group, nodes)


def _group_of(bucket_group: Any) -> Any:
    if bucket_group.ddp_config.use_distributed_optimizer:
        return bucket_group.intra_distributed_optimizer_instance_group
    return bucket_group.data_parallel_group


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
        if self not in found and _group_of(self).size() > 1:
            session.fallback(NAME, "bucket groups made after DistributedDataParallel are reduced as they are")
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


def _step(wrapped: Function, session: Session) -> Function:
    """Keep error feedback in the units of the next gradients: those of the loss scale, one for all models.

    After a step that is skipped it starts at zero: its part of these messages was dropped with them, and the rest is
    what rounding took from gradients that overflowed.
    """

    def step(self: Any) -> Any:
        before = self.get_loss_scale()
        found = wrapped(self)
        # A scaler replaces its tensor when it changes it: a comparison would wait for the device.
        after = self.get_loss_scale()
        if not found[0] or after is not before:
            for each in _active(session):
                each.rescale(after / before if found[0] else 0.0)
        return found

    return step


def _file(checkpoint_dir: Any) -> str:
    return os.path.join(checkpoint_dir, f"{NAME}_{torch.distributed.get_rank():05d}.pt")


def _save(wrapped: Function, session: Session) -> Function:
    def save(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        found = wrapped(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        states, file = {each.key: each.state() for each in _active(session)}, _file(checkpoint_dir)
        try:
            if states:
                torch.save(states, f"{file}.part")
                os.replace(f"{file}.part", file)
        except (OSError, RuntimeError) as error:
            session.fallback(NAME, f"error feedback is not in the checkpoint {checkpoint_dir}: {error}")
        return found

    return save


def _load(wrapped: Function, session: Session) -> Function:
    def load(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        found = wrapped(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        # Without the optimizer the loss scale starts anew.
        if not (session.context.arg("finetune", False) or session.context.arg("no_load_optim", False)):
            _load_states(session, _file(checkpoint_dir))
        return found

    return load


def _load_states(session: Session, file: str) -> None:
    """Load this rank's file; ranks agree on the step, and rank 0 says which of them start at zero. A collective."""
    compressions, why = _active(session), ""
    try:
        states = torch.load(file, map_location="cpu", weights_only=True) if compressions else {}
        for each in compressions:
            each.load(states[each.key])
    except FileNotFoundError:
        why = "the checkpoint has none"
    except LookupError:
        why = "the checkpoint has none of these ranks and buckets"
    except ValueError as error:
        why = str(error)
    except Exception as error:  # of a damaged file, torch's, pickle's and zipfile's
        why = f"{file} cannot be read: {str(error).partition(chr(10))[0]}"
    told: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(told, (max((each.steps for each in compressions), default=0), why))
    for each in compressions:
        each.steps = max(steps for steps, _ in told)
        if why:
            each.rescale(0.0)
    for reason in dict.fromkeys(reason for _, reason in told if reason):
        ranks = [rank for rank, (_, each) in enumerate(told) if each == reason]
        whose = "" if len(ranks) == len(told) else f" of rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        session.log_decision(f"{NAME}: error feedback{whose} starts at zero: {reason}")


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
                "expert_parallel_bucket_groups",
                "module",
                "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucket.params_list",
                f"{_GROUP}.buckets",
                f"{_GROUP}.ddp_config",
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
        Around(f"{_OPTIMIZER}:ChainedOptimizer.step", _step, reads=("get_loss_scale",)),
        Around(f"{_SERIALIZATION}:save", _save),
        Around(f"{_SERIALIZATION}:load", _load),
    ),
)
