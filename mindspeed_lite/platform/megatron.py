"""Corrects Megatron where it assumes CUDA beyond `torch.cuda`.

The only module of `platform` that names Megatron. Each correction is a feature without a flag for some devices, applied
when its Megatron module is imported.
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
from wrapt import register_post_import_hook

from mindspeed_lite.engine import (
    Around,
    Context,
    Entry,
    Feature,
    Override,
    PartialArguments,
    Patch,
    Provide,
    Report,
    Session,
    Settings,
    Swap,
    change,
    make_plan,
)
from mindspeed_lite.engine.fingerprints import Table

HOST = "megatron-core"
CONFIG = "megatron.core.transformer.transformer_config:TransformerConfig"
DDP_CONFIG = "megatron.core.distributed.distributed_data_parallel_config:DistributedDataParallelConfig"
_TRAINING = "megatron.training.training"
_RANDOM = "megatron.core.tensor_parallel.random"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"

ADD_ARGUMENTS = "megatron.training.arguments:add_megatron_arguments"
PARSE_ARGS = "megatron.training.arguments:parse_args"
VALIDATE_ARGS = "megatron.training.arguments:validate_args"
VALIDATE_YAML = "megatron.training.yaml_arguments:validate_yaml"

SECTIONS = ("language_model", "model_parallel")


def root() -> Path | None:
    spec = importlib.util.find_spec("megatron")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (Path(location) / "core" / "package_info.py").is_file():
            return Path(location).parent
    return None


def version() -> str | None:
    """Version of the importable Megatron-core, or None; imports nothing.

    Without local part: Megatron appends the commit of the current directory's git repository.
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
    """`args` and its YAML sections, which may hold Megatron's arguments."""
    sections = (getattr(args, name, None) for name in SECTIONS)
    return [args, *(section for section in sections if section is not None)]


def arguments_of(given: Any) -> Any:
    """Arguments of a training script that a model's configuration decides; other objects as they are."""
    activation = getattr(given, "activation_func", None)
    if not callable(activation):
        return given
    found = PartialArguments(vars(given))
    kind, is_gated = getattr(activation, "__name__", ""), found.get("gated_linear_unit", False)
    if found.get("transformer_impl") == getattr(type(given), "transformer_impl", None):
        found.pop("transformer_impl", None)  # a layer specification decides, whatever the default says
    return PartialArguments(
        found,
        num_experts=found.get("num_moe_experts"),
        swiglu=is_gated and kind == "silu",
        quick_geglu=is_gated and kind == "quick_gelu",
        squared_relu=kind == "squared_relu",
        bias_gelu_fusion=found.get("bias_activation_fusion", True),
        group_query_attention=found.get("num_query_groups") != found.get("num_attention_heads"),
    )


def without_flag(name: str, summary: str, *patches: Patch, condition: Any = None) -> Feature:
    """Declare a feature that is always on."""
    return Feature(
        name=name,
        summary=summary,
        enabled=lambda settings: True,
        numerics="bitwise",
        condition=condition,
        patches=patches,
    )


class ImportHook:
    """Applies a feature when the module of its first patch is imported, or now.

    Applied on unverified releases too. Default device: the active one.
    """

    def __init__(self, feature: Feature, device: str | None = None) -> None:
        self.entries: list[Entry] = []
        self._feature = feature
        self._device = device
        self._swaps: list[Swap] = []
        self._module: Any = None
        name = feature.patches[0].target.partition(":")[0]
        is_known = name in _waiting
        self._others = _waiting.setdefault(name, [])
        self._others.append(self)
        if not is_known:
            register_post_import_hook(functools.partial(_imported, name), name)
        elif sys.modules.get(name) is not None:
            self.apply(sys.modules[name])

    def apply(self, module: Any) -> None:
        release = version() or "0"
        # Some wrapt releases notify again on reload in place.
        if self._module is module or not self._feature.patches_for(release)[0]:
            return
        self._module = module
        from . import current

        active = current()
        device = self._device or ("cpu" if active is None else active.name)
        context = Context(Settings({}), device, {})
        report = Report({}, device)
        session = Session(context.settings, context, report).of(self._feature.name)
        plan = make_plan(
            [self._feature],
            context,
            host_version=release,
            fingerprints=_known(),
            allow_unverified=True,
        )
        swaps = [Swap(self._feature.name, step.patch, session) for each in plan.applied for step in each.steps]
        report.record(plan)
        change(add=swaps)
        self._swaps, self.entries = swaps, report.entries

    def remove(self) -> None:
        """Take the patches back. Raises EngineError; they stay then."""
        change(remove=self._swaps)
        self._swaps, self.entries = [], []
        if self in self._others:
            self._others.remove(self)


# wrapt cannot remove a hook: each module gets one, for all features of this list.
_waiting: dict[str, list[ImportHook]] = {}


def _imported(name: str, module: Any) -> None:
    for each in tuple(_waiting[name]):
        each.apply(module)


def _norm_under_sequence_parallel(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """Let torch's norms accept sequence parallelism, which `WrappedTorchNorm` refuses.

    They lack only the mark by which Megatron sums their gradients over the group.
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
    """Convert CPU token counts to arrays, as Megatron does with a GPU's.

    gloo's all-to-all takes no tensors as split sizes.
    """

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
            return tensor.numpy()
        return wrapped(tensor, as_numpy, record_stream)

    return maybe_move_tensor_to_cpu


def _adam_state_before_first_step(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """Allocate state of torch's Adam before its first step, zero moments and count.

    Without Apex and Transformer Engine the distributed optimizer reads the count from it to load a checkpoint.
    """

    def state_dict(self: Any) -> Any:
        inner = self.optimizer
        if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)) and not inner.state:
            for group in inner.param_groups:
                for parameter in group["params"]:
                    # A captured step counts on the device.
                    device = parameter.device if group.get("capturable") else "cpu"
                    inner.state[parameter] = {
                        "step": torch.tensor(0.0, dtype=torch.float32, device=device),
                        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    }
        return wrapped(self)

    return state_dict


def _step_count_of_checkpoint(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """Give every parameter its own tensor of the checkpoint's step count.

    Without Apex and Transformer Engine parameters share one, which torch's Adam increments for each, or keep the old
    count: wrong bias correction after a resume.
    """

    def load_state_dict(self: Any, state_dict: Any) -> Any:
        groups = state_dict.get("optimizer", {}).get("param_groups", ())
        steps = {float(group["step"]) for group in groups if group.get("step") is not None}
        result = wrapped(self, state_dict)
        if isinstance(self.optimizer, (torch.optim.Adam, torch.optim.AdamW)) and len(steps) == 1:
            step = steps.pop()
            for state in self.optimizer.state.values():
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"] = torch.tensor(step, dtype=torch.float32, device=state["step"].device)
        return result

    return load_state_dict


def _state_without_step_count(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """Load parameter state without its step count.

    Reshardable formats have the count only in parameter groups.
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
    """Use a wheel's compiled dataset helpers: it has no makefile to compile them at start."""

    def compile_helpers() -> Any:
        folder = Path(wrapped.__code__.co_filename).parent
        if (folder / "Makefile").is_file() or not list(folder.glob("helpers_cpp*")):
            return wrapped()
        return None

    return compile_helpers


def _given_back(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """Copy a recomputed output into the released storage, as before 0.17.

    Megatron shares storage by an extension that needs a compiler and ninja.
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
    """Pass `fp8=None`: for False Megatron asks Transformer Engine, also where there is none."""
    has_engine = session.context.device == "cuda" and sys.modules[_RANDOM].HAVE_TE  # type: ignore[attr-defined]

    def __init__(self: Any, fp8: Any = False, *args: Any, **kwargs: Any) -> None:
        wrapped(self, fp8 if has_engine else fp8 or None, *args, **kwargs)

    return __init__


def _only_fp8_is_quantized(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """Quantize nothing without fp8 parameters; before 0.13 Megatron asks Transformer Engine."""

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
    """Allocate sums of packed lengths on the CPU; the original names a CUDA device."""

    def update_seqlen_stats_from_cu_seqlens(cu_seqlens: Any) -> None:
        training = sys.modules[_TRAINING]
        if training._seqlen_stats_in_iteration is None:  # type: ignore[attr-defined]
            sums = torch.zeros(2, dtype=torch.float64)
            training._seqlen_stats_in_iteration = sums  # type: ignore[attr-defined]
        wrapped(cu_seqlens)

    return update_seqlen_stats_from_cu_seqlens


def _assumption(name: str, summary: str, devices: Sequence[str], *patches: Patch) -> Feature:
    """Declare a feature without a flag for `devices`; values equal Megatron's."""

    def condition(context: Context) -> Sequence[str]:
        return [] if context.device in devices else [f"about {', '.join(devices)}, not {context.device}"]

    return without_flag(name, summary, *patches, condition=condition)


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
    without_flag(
        "device_adam_state",
        "the distributed optimizer loads checkpoints with torch's Adam",
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
    without_flag(
        "device_recomputed_output",
        "outputs that are released and computed again need no Transformer Engine",
        Override(f"{_RANDOM}:CheckpointWithoutOutput.__init__", _without_transformer_engine, versions=">=0.13"),
    ),
    _assumption(
        "device_shared_storage",
        "outputs that are released and computed again need no compiler",
        ("cpu", "npu"),
        Override(f"{_RANDOM}:_get_share_storage", _given_back, versions=">=0.17"),
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
            versions=">=0.13,<0.17",
        ),
    ),
)


@functools.cache
def _known() -> Table:
    return Table.load(Path(__file__).with_name("fingerprints.json"))


_applied: list[ImportHook] = []


def attach(device: str) -> None:
    """Apply corrections for `device` when their modules are imported, or now."""
    context = Context(Settings({}), device, {})
    for feature in ASSUMPTIONS:
        if feature.condition is None or not feature.condition(context):
            _applied.append(ImportHook(feature, device))


def entries() -> list[Entry]:
    return [entry for each in _applied for entry in each.entries]


def detach() -> None:
    while _applied:
        _applied[-1].remove()
        _applied.pop()
