"""`--use-ascend-coc`: overlap tensor-parallel communication with the layer's own GEMM.

Cuts collectives into chunks; Megatron overlaps only a column parallel layer's backward. Reaches the local
`ColumnParallelLinear` and `RowParallelLinear` through `_shared.linear_layers`. Resets `--tp-comm-overlap`, or Megatron
would build Transformer Engine's buffers. Leaves experts and Transformer Engine alone. Falls back for distributed
weights and under autocast.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from mindspeed_lite.engine import Around, Context, Feature, Option, OptionError, Session, Settings
from mindspeed_lite.parallel.symmetric import Symmetric
from mindspeed_lite.parallel.tp_linear import ChunkPolicy, TPCommConfig, fixed_chunks
from mindspeed_lite.tuning.chunk_autotuner import CANDIDATES, ChunkAutotuner

from ._shared import linear_layers
from ._shared.conditions import every, local
from ._shared.linear_layers import LAYERS, LayerCall
from ._shared.wrappers import with_arguments

NAME = "use_ascend_coc"
_LAYER_NAME = "tp_comm_buffer_name"
AUTO = "auto"
_is_local = local("overlaps by itself, with --tp-comm-overlap")
# Chunks under --deterministic-mode, where times must not decide.
_DETERMINISTIC = 4

_log = logging.getLogger("mindspeed_lite")


class _Choice:
    def __init__(self, number: int | None) -> None:
        self._number = number
        self._trials: dict[Any, ChunkAutotuner] = {}

    def of(self, group: Any, training: bool) -> ChunkPolicy:
        if self._number is not None:
            return fixed_chunks(self._number)
        if group not in self._trials:
            self._trials[group] = ChunkAutotuner(group, lambda text: _log.warning("%s: %s", NAME, text))
        trials = self._trials[group]
        return trials if training else trials.known


def _choice(session: Session) -> _Choice:
    def make() -> _Choice:
        number, mode = session.settings["coc_parallel_num"], session.settings["coc_mode"]
        if mode == 1:
            number = 1
        elif number == AUTO and torch.are_deterministic_algorithms_enabled():
            number = _DETERMINISTIC
            session.notice(f"{NAME}: {number} chunks, because the times of a trial differ from run to run")
        return _Choice(None if number == AUTO else number)

    return session.state(NAME, make)


def _name(layer: Any, given: Mapping[str, Any]) -> Any:
    return given.get(_LAYER_NAME)


def _keep_name(session: Session, layer: Any, name: str) -> None:
    session.mark(layer, _LAYER_NAME, name)


def _comm_config(call: LayerCall) -> TPCommConfig:
    if call.session.settings["coc_fused_kernel"]:
        say = call.session.fallback_of(NAME)
        if call.sequence_parallel:
            symmetric = Symmetric(lambda reason: say(f"--coc-fused-kernel: {reason}"))
            return TPCommConfig(call.group, True, fixed_chunks(1), call.wgrad, symmetric)
        say("--coc-fused-kernel: a layer is not sequence parallel, which PyTorch's operators are for: chunks")
    return TPCommConfig(call.group, call.sequence_parallel, _slices(call), call.wgrad)


def _slices(call: LayerCall) -> ChunkPolicy:
    config = call.layer.config
    choose = _choice(call.session).of(call.group, call.layer.training)
    off = set()
    if not getattr(config, "tp_comm_overlap_ag", True):
        off |= {"column forward", "row backward"}
    if not getattr(config, "tp_comm_overlap_rs", True):
        off.add("row forward")
    name = getattr(call.layer, _LAYER_NAME, None)
    if not call.is_row and name in ("qkv", "fc1") and getattr(config, f"tp_comm_overlap_disable_{name}", False):
        return fixed_chunks(1)
    if not off:
        return choose
    return lambda phase, x, w, run: 1 if phase in off else choose(phase, x, w, run)


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _enabled(settings: Settings) -> bool:
    return any(settings.get(name, False) for name in ("use_ascend_coc", "tp_comm_overlap", "coc_fused_kernel"))


def _why_not(context: Context) -> list[str]:
    settings = context.settings
    reasons = _is_local(context)
    if settings.get("coc_mode", -1) == 0:
        reasons.append("--coc-mode 0 asks for Megatron's own linear layers")
    if not reasons and settings.get("tp_comm_overlap", False) and context.arg("tp_comm_overlap_cfg", None):
        raise OptionError(
            "--tp-comm-overlap-cfg describes buffers of Transformer Engine, which --transformer-impl local does not "
            "have. Leave it out; --coc-parallel-num says how many chunks."
        )
    if settings.get("coc_fused_kernel", False) and context.device != "cuda":
        other = "--use-ascend-mc2 has those of an NPU" if context.device == "npu" else "leave it out"
        raise OptionError(
            f"--coc-fused-kernel uses symmetric memory, which is CUDA's, and the device is {context.device}: {other}."
        )
    return reasons


def _arguments(context: Context) -> Mapping[str, Any]:
    return {"tp_comm_overlap": False} if context.settings.get("tp_comm_overlap", False) else {}


FEATURE = Feature(
    name=NAME,
    summary="tensor-parallel communication overlapped in chunks with the GEMMs of its own linear layers",
    options=(
        Option("--use-ascend-coc"),
        Option(
            "--coc-parallel-num",
            help="Messages a pass of a layer is cut into: 1, 2, 4, 8, or auto, which tries them at the first step.",
            default=AUTO,
            type=_number,
            choices=(*CANDIDATES, AUTO),
            metavar="N",
        ),
        Option(
            "--coc-mode",
            help="0: Megatron's own layers; 1: in one message; 2 and -1: in chunks.",
            default=-1,
            choices=(-1, 0, 1, 2),
        ),
        Option(
            "--coc-fused-kernel",
            help="On CUDA, PyTorch's operators over symmetric memory for sequence parallel layers, instead of chunks.",
        ),
        Option("--tp-comm-overlap", help="As --use-ascend-coc, with the local implementation.", upstream=">=0.12"),
    ),
    numerics="ulp",
    theme="communication",
    memory="not predicted: one chunk of a gathered input or output",
    unsupported=linear_layers.UNSUPPORTED,
    condition=every(_why_not, linear_layers.has_group),
    conflicting_args=linear_layers.CONFLICTING_ARGS,
    not_auto="measured times choose the chunks, so that two runs may differ in the last bit: enable it explicitly",
    enabled=_enabled,
    arguments=_arguments,
    patches=(
        Around(f"{LAYERS}:ColumnParallelLinear.__init__", with_arguments(_name, _keep_name)),
        *linear_layers.tp_linear_patches(NAME, _comm_config),
    ),
)
