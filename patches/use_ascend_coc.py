"""`--use-ascend-coc`: tensor-parallel communication behind the products of the linear layers it belongs to.

Reaches `ColumnParallelLinear` and `RowParallelLinear` of the local implementation: attention, MLP, shared experts and
the output layer with its own or with the embedding's weight. `_forward_impl` is where both hand input, weight and
group to Megatron's one linear function, and where `--delay-wgrad-compute` sets its buffer; a row parallel layer
reduces its output after it, so its `forward` is the second place. Bias, frozen weights, gradient accumulation fusion,
delayed weight gradients and recomputation are served. `--tp-comm-overlap` asks for the same; it is off again once it
has been read, or Megatron would build Transformer Engine's buffers. Leaves experts alone, whose dispatcher
communicates, and Transformer Engine's layers. Steps aside, with a reason, for weights that are not whole and under
autocast.

Megatron hides the gather and the scatter of a column parallel layer's backward pass; its forward gather, and the
scatter and gather of a row parallel one, wait for each other. Q, K and V are one layer in Megatron, as are the two
halves of a gated fc1: their input is gathered once.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_lite.engine import Context, Feature, Option, OptionError, Session, Settings, Wrap
from mindspeed_lite.parallel.slices import Trials
from mindspeed_lite.parallel.tp_linear import Link, Slices, column_linear, fixed, row_linear

from . import _main_grad

_LAYERS = "megatron.core.tensor_parallel.layers"
_NAME = "tp_comm_buffer_name"
AUTO = "auto"
# What is taken where a time must not decide: --deterministic-mode.
_DETERMINISTIC = 4

_log = logging.getLogger("mindspeed_lite")


@dataclass(frozen=True)
class _Reduced:
    """In a row parallel layer's call of its linear function, in place of a group: where its output is reduced."""

    group: Any
    scattered: bool


@dataclass(frozen=True)
class _WeightGradient:
    """The weight's gradient as Megatron's linear function leaves it: in the main gradient, to autograd, or undone."""

    weight: Any
    fused: bool
    buffer: Any
    limit: int

    def later(self, dy: torch.Tensor) -> bool:
        if self.buffer is None or (self.limit and len(self.buffer) >= self.limit):
            return False
        self.buffer.append(dy)
        return True

    def __call__(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        if not self.fused:
            return dy.t() @ x
        _main_grad.add(self.weight.main_grad, dy, x)
        return _main_grad.stand_in(self.weight)


class _Choice:
    """The number of slices for every group of a session."""

    def __init__(self, number: int | None) -> None:
        self._number = number
        self._trials: dict[Any, Trials] = {}

    def of(self, group: Any, training: bool) -> Slices:
        if self._number is not None:
            return fixed(self._number)
        trials = self._trials.setdefault(group, Trials(group, lambda text: _log.warning("%s: %s", FEATURE.name, text)))
        return trials if training else trials.known


_choices: weakref.WeakKeyDictionary[Session, _Choice] = weakref.WeakKeyDictionary()


def _choice(session: Session) -> _Choice:
    if session not in _choices:
        number, mode = session.settings["coc_parallel_num"], session.settings["coc_mode"]
        if mode == 1:
            number = 1
        elif number == AUTO and torch.are_deterministic_algorithms_enabled():
            number = _DETERMINISTIC
            session.notice(f"{FEATURE.name}: {number} slices, because the times of a trial differ from run to run")
        _choices[session] = _Choice(None if number == AUTO else number)
    return _choices[session]


def _init(wrapped: Callable[..., None], session: Session) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        wrapped(self, *args, **kwargs)
        setattr(self, _NAME, kwargs.get(_NAME))

    return __init__


def _linear(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def _forward_impl(self: Any, input: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
        group: Any = kwargs.get("tp_group")
        is_row = isinstance(group, _Reduced)
        if not is_row and not _column_talks(self, input, weight, kwargs, session):
            return wrapped(self, input, weight, *args, **kwargs)
        group, scattered = (group.group, group.scattered) if is_row else (group, kwargs["sequence_parallel"])
        fused = kwargs["gradient_accumulation_fusion"] and hasattr(weight, "main_grad")
        gradient = _WeightGradient(
            weight, fused, kwargs.get("grad_output_buffer"), kwargs.get("wgrad_deferral_limit") or 0
        )
        link = Link(group, scattered, _slices(self, session, group, is_row), gradient)
        if is_row:
            return row_linear(input, weight, link)
        return column_linear(input, weight, kwargs["bias"], link)

    return _forward_impl


def _slices(layer: Any, session: Session, group: Any, is_row: bool) -> Slices:
    """Megatron's own switches say which passes and layers are left in one piece."""
    config = layer.config
    choose = _choice(session).of(group, layer.training)
    off = set()
    if not getattr(config, "tp_comm_overlap_ag", True):
        off |= {"column forward", "row backward"}
    if not getattr(config, "tp_comm_overlap_rs", True):
        off.add("row forward")
    name = getattr(layer, _NAME, None)
    if not is_row and name in ("qkv", "fc1") and getattr(config, f"tp_comm_overlap_disable_{name}", False):
        return fixed(1)
    if not off:
        return choose
    return lambda phase, x, w, run: 1 if phase in off else choose(phase, x, w, run)


def _column_talks(layer: Any, input: Any, weight: Any, given: dict[str, Any], session: Session) -> bool:
    group = given.get("tp_group")
    if not (given["sequence_parallel"] or given["allreduce_dgrad"]) or group is None or group.size() == 1:
        return False
    return _can(layer, input, weight, session)


def _can(layer: Any, input: Any, weight: Any, session: Session) -> bool:
    """Whether nothing is in the way of this call; what is, is said."""
    found = {
        "input and weight differ in dtype": input.dtype != weight.dtype,
        "autocast is on": torch.is_autocast_enabled(input.device.type),
        "a weight is distributed": getattr(layer, "gtp_remat_size", 1) > 1 or hasattr(weight, "__fsdp_param__"),
        "--cpu-offloading-num-layers looks for what Megatron's own linear layer saves": bool(
            getattr(layer.config, "cpu_offloading", False)
        ),
    }
    reasons = [reason for reason, holds in found.items() if holds]
    if reasons:
        session.fallback(FEATURE.name, "; ".join(reasons))
    return not reasons


def _row(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def forward(self: Any, input_: Any) -> Any:
        group = self.tp_group
        if (
            self.explicit_expert_comm
            or group is None
            or group.size() == 1
            or not self.input_is_parallel
            or not _can(self, input_, self.weight, session)
        ):
            return wrapped(self, input_)
        output = self._forward_impl(
            input=input_,
            weight=self.weight,
            bias=None,
            gradient_accumulation_fusion=self.gradient_accumulation_fusion,
            allreduce_dgrad=False,
            sequence_parallel=False,
            tp_group=_Reduced(group, self.sequence_parallel),
            grad_output_buffer=None,
        )
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias, None

    return forward


def _number(text: str) -> int | str:
    if text == AUTO:
        return text
    if text not in ("1", "2", "4", "8"):
        raise ValueError("1, 2, 4, 8 or auto")
    return int(text)


def _enabled(settings: Settings) -> bool:
    return bool(settings.get("use_ascend_coc", False) or settings.get("tp_comm_overlap", False))


def _why_not(context: Context) -> Sequence[str]:
    settings = context.settings
    if settings.get("coc_mode", -1) not in (-1, 0, 1, 2):
        raise OptionError(f"--coc-mode takes -1, 0, 1 or 2, not {settings['coc_mode']}.")
    reasons = []
    if settings.get("coc_mode", -1) == 0:
        reasons.append("--coc-mode 0 asks for Megatron's own linear layers")
    if context.arg("transformer_impl", "local") == "transformer_engine":
        reasons.append("--transformer-impl transformer_engine overlaps by itself, with --tp-comm-overlap")
    elif settings.get("tp_comm_overlap", False) and context.arg("tp_comm_overlap_cfg", None):
        raise OptionError(
            "--tp-comm-overlap-cfg describes buffers of Transformer Engine, which --transformer-impl local does not "
            "have. Leave it out; --coc-parallel-num says how many slices."
        )
    if context.host_args is not None and context.arg("tensor_model_parallel_size", 1) < 2:
        reasons.append("--tensor-model-parallel-size is 1: nothing travels")
    if settings.get("mindspeed_lite_auto", False) and not _enabled(settings):
        reasons.append("times choose the slices, so that two runs may differ in the last bit: ask for it by name")
    if context.arg("cuda_graph_impl", "none") not in (None, "none") or context.arg("enable_cuda_graph", False):
        reasons.append("CUDA graphs: recording collectives in slices has not been tried")
    if context.arg("cpu_offloading_num_layers", 0):
        reasons.append("--cpu-offloading-num-layers looks for what Megatron's own linear layer saves")
    return reasons


def _adjust(context: Context) -> Mapping[str, Any]:
    return {"tp_comm_overlap": False} if context.settings.get("tp_comm_overlap", False) else {}


FEATURE = Feature(
    name="use_ascend_coc",
    summary="tensor-parallel communication behind the products of its own linear layers",
    options=(
        Option("--use-ascend-coc", help="Hide tensor-parallel communication behind products, in slices."),
        Option(
            "--coc-parallel-num",
            help="Messages a pass of a layer is cut into: 1, 2, 4, 8, or auto, which tries them at the first step.",
            default=AUTO,
            type=_number,
            metavar="N",
        ),
        Option(
            "--coc-mode",
            help="0: Megatron's own layers; 1: in one message; 2 and -1: in slices.",
            default=-1,
        ),
        Option(
            "--tp-comm-overlap",
            help="As --use-ascend-coc, with the local implementation.",
            upstream=">=0.16,<0.20",
        ),
    ),
    numerics="ulp",
    condition=_why_not,
    enabled=_enabled,
    adjust=_adjust,
    patches=(
        Wrap(f"{_LAYERS}:ColumnParallelLinear.__init__", _init),
        # Nearer the original than the wrap of --delay-wgrad-compute, whose buffer it serves.
        Wrap(f"{_LAYERS}:ColumnParallelLinear._forward_impl", _linear, order=-10),
        Wrap(f"{_LAYERS}:RowParallelLinear._forward_impl", _linear, order=-10),
        Wrap(f"{_LAYERS}:RowParallelLinear.forward", _row),
    ),
)
