"""`--balance-sequence-lengths`: equal attention cost on data-parallel ranks.

Reaches `build_pretraining_data_loader`, which every loader uses, and wraps the training set; whole micro-batches of one
step change ranks. Lengths come from the `GPTDataset` indices, without communication. Leaves validation and test sets
alone; falls back for other data sets. An existing loader keeps its order when the feature is turned off.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from mindspeed_lite.engine import Context, Feature, Function, Override, Session
from mindspeed_lite.parallel.balance.lengths import StepOrder, attention_pairs

_GPT = "megatron.core.datasets.gpt_dataset:GPTDataset"
_BLEND = "megatron.core.datasets.blended_dataset:BlendedDataset"
_CHANGING = ("--rampup-batch-size", "--step-batch-size-schedule", "--decrease-batch-size-if-needed")


class BalancedDataset(torch.utils.data.Dataset[Any]):
    """A data set whose samples change places within their step."""

    def __init__(self, dataset: Any, order: StepOrder) -> None:
        self._dataset, self._order = dataset, order

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[self._order.source(int(index))]

    def __getattr__(self, name: str) -> Any:
        # Workers ask for special methods and unpickle without attributes.
        if name.startswith("__") or "_dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._dataset, name)


def document_lengths(dataset: Any, index: int) -> list[int]:
    """Document lengths in tokens of a `GPTDataset` sample, as in its `cu_seqlens`."""
    from megatron.core.datasets.blended_dataset import BlendedDataset

    if isinstance(dataset, BlendedDataset):
        if dataset.dataset_index is None:
            dataset[index]
        return document_lengths(dataset.datasets[dataset.dataset_index[index]], dataset.dataset_sample_index[index])
    if dataset.shuffle_index is None:
        dataset[index]
    sample = int(dataset.shuffle_index[index])
    (first, begin), (last, end) = (dataset.sample_index[each].tolist() for each in (sample, sample + 1))
    lengths: list[int] = dataset.dataset.sequence_lengths[dataset.document_index[first : last + 1]].tolist()
    # The last document is cut first; it may also be the first.
    lengths[-1] = end
    lengths[0] -= begin
    return lengths


def _cost(dataset: Any, index: int) -> int:
    return attention_pairs(document_lengths(dataset, index))


def _unknown(dataset: Any) -> str | None:
    from megatron.core.datasets.blended_dataset import BlendedDataset
    from megatron.core.datasets.gpt_dataset import GPTDataset

    if type(dataset) is BlendedDataset:
        return next(filter(None, map(_unknown, dataset.datasets)), None)
    own = ("__getitem__", "_query_document_sample_shuffle_indices")
    kind = type(dataset)
    if isinstance(dataset, GPTDataset) and all(getattr(kind, name) is getattr(GPTDataset, name) for name in own):
        return None
    return kind.__name__


def _loader(wrapped: Function, session: Session) -> Function:
    from megatron.core import parallel_state
    from megatron.core.datasets.utils import Split

    arg = session.context.arg

    def build_pretraining_data_loader(dataset: Any, consumed_samples: int) -> Any:
        split = getattr(dataset, "split", getattr(dataset, "index_split", None))
        if dataset is None or split in (Split.valid, Split.test):
            return wrapped(dataset, consumed_samples)
        reason = None
        if arg("global_batch_size") is None:
            reason = "Megatron's arguments are not known: give the flag to a script that reads them"
        elif (unknown := _unknown(dataset)) is not None:
            reason = f"the lengths in a {unknown} are not known before its samples are read"
        if reason is not None:
            session.fallback(FEATURE.name, reason)
            return wrapped(dataset, consumed_samples)
        order = StepOrder(
            first=consumed_samples,
            total=len(dataset),
            step=arg("global_batch_size"),
            micro_batch=arg("micro_batch_size"),
            ranks=parallel_state.get_data_parallel_world_size(),
            cost_of=partial(_cost, dataset),
            waits=arg("expert_model_parallel_size", 1) > 1,
        )
        return wrapped(BalancedDataset(dataset, order), consumed_samples)

    return build_pretraining_data_loader


def _why_not(context: Context) -> list[str]:
    if context.host_args is None:
        return []
    reasons = []
    if not context.arg("dataloader_inter_document_masking", False):
        reasons.append(
            "without --dataloader-inter-document-masking attention costs the same for every sample of the indexed data"
        )
    if (kind := context.arg("dataloader_type", None) or "single") != "single":
        reasons.append(f"--dataloader-type {kind} has an order of its own: single is balanced")
    if "global_aux_loss" in (context.arg("moe_router_load_balancing_type", None) or ()):
        reasons.append(
            "--moe-router-load-balancing-type global_aux_loss depends on which micro-batches ranks train on at one time"
        )
    ranks = context.arg("data_parallel_size", None)
    if ranks == 1:
        reasons.append("there is one data-parallel rank")
    elif ranks and context.arg("global_batch_size", None) == ranks * context.arg("micro_batch_size", 1):
        reasons.append("a rank has one micro-batch in a step (--global-batch-size): ranks have nothing to exchange")
    return reasons


FEATURE = Feature(
    name="balance_sequence_lengths",
    summary="micro-batches of equal attention cost on data-parallel ranks, where documents differ in length",
    numerics="ulp",
    theme="communication",
    memory="none: it keeps the order of a few steps",
    condition=_why_not,
    conflicting_args={
        "hybrid_context_parallel": "--hybrid-context-parallel assigns documents to ranks itself",
        **{flag[2:].replace("-", "_"): f"{flag} changes how many samples a step has" for flag in _CHANGING},
    },
    not_auto="it changes which rank trains on which micro-batch: enable it explicitly with its flag",
    unsupported={"<0.19": "before Megatron 0.19 data sets do not give attention the ends of documents"},
    patches=(
        Override(
            "megatron.training.datasets.data_samplers:build_pretraining_data_loader",
            _loader,
            reads=(
                *(f"{_GPT}.{name}" for name in ("document_index", "sample_index", "shuffle_index")),
                *(f"{_BLEND}.{name}" for name in ("datasets", "dataset_index", "dataset_sample_index")),
            ),
        ),
    ),
)
