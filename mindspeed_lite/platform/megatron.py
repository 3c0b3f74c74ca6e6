"""Where Megatron assumes CUDA beyond `torch.cuda` itself: the only file of this package's rooms that names Megatron.

Each assumption is a feature in the engine's language without a flag, in force on the devices it is about. They are
put in place one by one as Megatron's modules are imported, so a program that uses only part of Megatron loads no
more of it.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from mindspeed_lite.engine import (
    Around,
    Context,
    Entry,
    Feature,
    ImportHandle,
    Override,
    Patch,
    Provide,
    Report,
    Session,
    Settings,
    Swap,
    change,
    make_plan,
    when_imported,
)
from mindspeed_lite.engine.fingerprints import Table

HOST = "megatron-core"
CONFIG = "megatron.core.transformer.transformer_config:TransformerConfig"
DDP_CONFIG = "megatron.core.distributed.distributed_data_parallel_config:DistributedDataParallelConfig"
_TRAINING = "megatron.training.training"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"

# What `startup.py` hooks.
ADD_ARGUMENTS = "megatron.training.arguments:add_megatron_arguments"
PARSE_ARGS = "megatron.training.arguments:parse_args"
VALIDATE_ARGS = "megatron.training.arguments:validate_args"
VALIDATE_YAML = "megatron.training.yaml_arguments:validate_yaml"

# Where arguments from a YAML file hold the model's fields.
SECTIONS = ("language_model", "model_parallel")


def root() -> Path | None:
    """The folder with the `megatron` that an import would find, without importing it; None if there is none."""
    spec = importlib.util.find_spec("megatron")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (Path(location) / "core" / "package_info.py").is_file():
            return Path(location).parent
    return None


def version() -> str | None:
    """Version of the Megatron-core that an import would find, without importing it; None if there is none.

    Without its local part: Megatron appends the commit of whatever git repository the process stands in.
    """
    loaded = sys.modules.get("megatron.core.package_info")
    if loaded is not None:
        return str(loaded.__version__).partition("+")[0]
    folder = root()
    if folder is None:
        return None
    found = runpy.run_path(str(folder / "megatron" / "core" / "package_info.py"))["__version__"]
    return str(found).partition("+")[0]


def argument_holders(args: Any) -> list[Any]:
    """Where Megatron's arguments stand: in `args` and, from a YAML file, a model's fields also one level down."""
    sections = (getattr(args, name, None) for name in SECTIONS)
    return [args, *(section for section in sections if section is not None)]


def always(name: str, summary: str, *patches: Patch, condition: Any = None) -> Feature:
    """A feature without a flag: it is on."""
    return Feature(
        name=name,
        summary=summary,
        options=(),
        enabled=lambda settings: True,
        numerics="bitwise",
        condition=condition,
        patches=patches,
    )


class Placed:
    """Features without a flag in force, with their report."""

    def __init__(self, swaps: list[Swap], entries: list[Entry]) -> None:
        self.entries = entries
        self._swaps = swaps

    def remove(self) -> list[str]:
        """Take them back; returns what was left alone."""
        return change(remove=self._swaps)


def place(*features: Feature, device: str | None = None, fingerprints: Table | None = None) -> Placed:
    """Put features without a flag in force by themselves, on a release that need not be a verified one.

    device: what they are told they run on; the active device if not given.
    """
    if device is None:
        from . import current

        active = current()
        device = "cpu" if active is None else active.name
    context = Context(Settings({}), device, {})
    report = Report({}, device)
    session = Session(context.settings, context, report)
    plan = make_plan(
        features,
        context,
        host_version=version() or "0",
        fingerprints=Table() if fingerprints is None else fingerprints,
        allow_unverified=True,
    )
    swaps = [
        Swap(each.feature.name, step.patch, session.of(each.feature.name))
        for each in plan.applied
        for step in each.steps
    ]
    change(add=swaps)
    try:
        report.record(plan, swaps)
    except BaseException:
        change(remove=swaps)
        raise
    return Placed(swaps, report.entries)


def _norm_under_sequence_parallel(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """torch's norms are right on a sequence shard; only their weights' gradients must be summed over the group.

    Reaches every norm of the local implementation. `WrappedTorchNorm` refuses sequence parallelism, although all
    that is missing is the mark by which Megatron sums those gradients. Falls back without sequence parallelism.
    """

    def __new__(
        cls: Any,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
    ) -> Any:
        sequence_parallel = config.sequence_parallel
        if sequence_parallel:
            config = copy.copy(config)
            config.sequence_parallel = False
        norm = wrapped(cls, config, hidden_size, eps, persist_layer_norm, zero_centered_gamma, normalization)
        if sequence_parallel:
            for parameter in norm.parameters():
                parameter.sequence_parallel = True
        return norm

    return __new__


def _counts_on_host(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """Token counts of the all-to-all dispatcher become numbers although they never left the host.

    Megatron turns split sizes into an array only when it copies them from a GPU; on the CPU they stay tensors,
    which gloo's all-to-all does not take. Leaves every other tensor alone.
    """

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
            return tensor.numpy()
        return wrapped(tensor, as_numpy, record_stream)

    return maybe_move_tensor_to_cpu


def _adam_state_before_first_step(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """torch's Adam answers for its step count before it has made a step.

    Without Apex and Transformer Engine the distributed optimizer reads the count from the state that torch
    allocates in the first step, and so cannot load a checkpoint. Zero moments and a zero count are what torch
    would allocate. Leaves every other optimizer and every started one alone.
    """

    def state_dict(self: Any) -> Any:
        inner = self.optimizer
        if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)) and not inner.state:
            for group in inner.param_groups:
                for parameter in group["params"]:
                    inner.state[parameter] = {
                        "step": torch.tensor(0.0, dtype=torch.float32),
                        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    }
        return wrapped(self)

    return state_dict


def _step_count_of_checkpoint(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """Every parameter's step count is the checkpoint's, in a tensor of its own.

    Without Apex and Transformer Engine the distributed optimizer hands one tensor to all parameters, to which
    torch's Adam adds one for each of them, and then overwrites it with the count from before loading. Either way
    the bias correction after a resume is wrong. The count is in the checkpoint's parameter groups.
    """

    def load_state_dict(self: Any, state_dict: Any) -> Any:
        groups = state_dict.get("optimizer", {}).get("param_groups", ())
        steps = {float(group["step"]) for group in groups if group.get("step") is not None}
        result = wrapped(self, state_dict)
        if isinstance(self.optimizer, (torch.optim.Adam, torch.optim.AdamW)) and len(steps) == 1:
            step = steps.pop()
            for state in self.optimizer.state.values():
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"] = torch.tensor(step, dtype=torch.float32)
        return result

    return load_state_dict


def _state_without_step_count(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """A parameter's state is loaded although the checkpoint has no step count for it.

    Without Apex and Transformer Engine the distributed optimizer asks every state of a parameter of its checkpoint,
    but the formats that can be resharded leave the count out, which is in the parameter groups. Leaves the count
    that is there.
    """

    def _set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: Any) -> Any:
        if "step" not in tensors and isinstance(self.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            group, place = self.model_param_group_index_map[model_param]
            parameter = self.optimizer.param_groups[group]["params"][place]
            step = self.optimizer.state[parameter].get("step")
            if isinstance(step, torch.Tensor):
                tensors = {**tensors, "step": step}
        return wrapped(self, model_param, tensors)

    return _set_main_param_and_optimizer_states


def _compiled_dataset_helpers(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """A wheel's compiled dataset helpers are used as they are.

    `megatron.training` compiles them at every start by the makefile beside them, which is in a checkout but not in
    the wheels, and ends the run when that fails. Falls back wherever there is a makefile.
    """

    def compile_helpers() -> Any:
        folder = Path(wrapped.__code__.co_filename).parent
        if (folder / "Makefile").is_file() or not list(folder.glob("helpers_cpp*")):
            return wrapped()
        return None

    return compile_helpers


def _given_back(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """A recomputed output is copied into the storage that was released, as before 0.17.

    Since then Megatron lets both share one storage by an extension that is compiled when it is first needed, in every
    environment, which takes a compiler and ninja. Here the copy's own storage is released at once.
    """

    def share_storage(output: torch.Tensor, recomputed: torch.Tensor) -> None:
        storage, found = output.untyped_storage(), recomputed.untyped_storage()
        storage.resize_(found.size())
        storage.copy_(found)
        recomputed.data = output.detach()

    def _get_share_storage() -> Any:
        return share_storage

    return _get_share_storage


def _without_transformer_engine(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """A checkpoint that is told nothing of fp8 asks Transformer Engine about it; without it there is none."""

    def __init__(self: Any, fp8: Any = False, *args: Any, **kwargs: Any) -> None:
        wrapped(self, fp8 or None, *args, **kwargs)

    return __init__


def _only_fp8_is_quantized(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """The distributed optimizer without a parameter in fp8 quantizes nothing, as since 0.13.

    Before, it asks Transformer Engine whether there is one or not, and ends where that is absent.
    """

    def quantize_param_shard(
        model_params: Any,
        main_params: Any,
        start_offsets: Any,
        data_parallel_group: Any,
        fsdp_shard_model_params: Any = None,
    ) -> Any:
        if not model_params:
            return None
        return wrapped(model_params, main_params, start_offsets, data_parallel_group, fsdp_shard_model_params)

    return quantize_param_shard


def _lengths_counted_on_host(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """The sums of a pack's lengths are there already where the original would name a CUDA device by number for them."""

    def update_seqlen_stats_from_cu_seqlens(cu_seqlens: Any) -> None:
        training = sys.modules[_TRAINING]
        if training._seqlen_stats_in_iteration is None:  # type: ignore[attr-defined]
            sums = torch.zeros(2, dtype=torch.float64)
            training._seqlen_stats_in_iteration = sums  # type: ignore[attr-defined]
        wrapped(cu_seqlens)

    return update_seqlen_stats_from_cu_seqlens


def _assumption(name: str, summary: str, devices: Sequence[str], *patches: Patch) -> Feature:
    """A feature that is in force on `devices` without a flag; where Megatron runs without it, no number changes."""

    def condition(context: Context) -> Sequence[str]:
        return [] if context.device in devices else [f"about {', '.join(devices)}, not {context.device}"]

    return always(name, summary, *patches, condition=condition)


ASSUMPTIONS: tuple[Feature, ...] = (
    _assumption(
        "device_sequence_parallel_norm",
        "torch's norms accept sequence parallelism",
        ("cpu", "npu"),
        Override(
            "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
            _norm_under_sequence_parallel,
            reads=[f"{CONFIG}.sequence_parallel"],
            order=-10,
        ),
    ),
    _assumption(
        "device_split_sizes",
        "split sizes of expert parallelism reach gloo as numbers",
        ("cpu",),
        Override("megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu", _counts_on_host),
    ),
    _assumption(
        "device_adam_state",
        "the distributed optimizer loads checkpoints with torch's Adam",
        ("cpu", "npu"),
        Around(f"{_DISTRIBUTED}.state_dict", _adam_state_before_first_step, reads=["optimizer"]),
        Around(f"{_DISTRIBUTED}.load_state_dict", _step_count_of_checkpoint, reads=["optimizer"]),
        Override(
            f"{_DISTRIBUTED}._set_main_param_and_optimizer_states",
            _state_without_step_count,
            reads=["optimizer", "model_param_group_index_map"],
        ),
    ),
    _assumption(
        "device_dataset_helpers",
        "training scripts start on a wheel, which has the dataset helpers compiled and no makefile",
        ("cpu", "npu"),
        Override("megatron.core.datasets.utils:compile_helpers", _compiled_dataset_helpers),
    ),
    _assumption(
        "device_recomputed_output",
        "outputs that are released and computed again need neither a compiler nor Transformer Engine",
        ("cpu", "npu"),
        Override(
            "megatron.core.tensor_parallel.random:CheckpointWithoutOutput.__init__",
            _without_transformer_engine,
            absent_in="<0.13",
        ),
        Override("megatron.core.tensor_parallel.random:_get_share_storage", _given_back, absent_in="<0.17"),
    ),
    _assumption(
        "device_fp8_params",
        "0.12's distributed optimizer asks Transformer Engine about parameters in fp8, whether there are any or not",
        ("cpu", "npu"),
        Override("megatron.core.fp8_utils:quantize_param_shard", _only_fp8_is_quantized, versions="<0.13"),
    ),
    _assumption(
        "device_packed_lengths",
        "packed sequences train: sums of their lengths need no CUDA device",
        ("cpu",),
        Around(f"{_TRAINING}:update_seqlen_stats_from_cu_seqlens", _lengths_counted_on_host, versions=">=0.18"),
    ),
    _assumption(
        "device_router_gemm",
        "until 0.16 the router looks for a Transformer Engine function that its absence leaves undefined",
        ("cpu", "npu"),
        Provide(
            "megatron.core.transformer.moe.moe_utils:te_general_gemm",
            lambda session: None,
            versions="<0.17",
            absent_in="<0.13",
        ),
    ),
)


@functools.cache
def _known() -> Table:
    return Table.load(Path(__file__).with_name("fingerprints.json"))


_waiting: list[ImportHandle] = []
_applied: list[Placed] = []


def attach(device: str) -> None:
    """Put the assumptions about `device` right as the modules they live in are imported (or now, if they are)."""
    context = Context(Settings({}), device, {})
    present: list[Feature] = []
    for feature in ASSUMPTIONS:
        if feature.condition is not None and feature.condition(context):
            continue
        module = feature.patches[0].target.partition(":")[0]
        if sys.modules.get(module) is not None:
            present.append(feature)
        else:
            _waiting.append(when_imported(module, functools.partial(_put_right, [feature], device)))
    # Together, since each change may look through every loaded module.
    _put_right(present, device)


def _put_right(features: Sequence[Feature], device: str, module: Any = None) -> None:
    fitting = [each for each in features if each.patches_for(version() or "0")[0]]
    if fitting:
        _applied.append(place(*fitting, device=device, fingerprints=_known()))


def entries() -> list[Entry]:
    """What has been put in place so far, for the report."""
    return [entry for each in _applied for entry in each.entries]


def detach() -> None:
    """Take everything back, the latest first."""
    while _waiting:
        _waiting.pop().cancel()
    while _applied:
        # If that fails it is still in place, and still known.
        _applied[-1].remove()
        _applied.pop()
