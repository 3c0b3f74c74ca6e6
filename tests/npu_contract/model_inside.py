"""What `model_run` runs in a subprocess that has torch_npu and stubs for CANN: a Megatron GPT on the NPU.

In mode `fake` tensors are fake: shapes, dtypes, autograd and the operators' real schemas are what is seen. In mode
`host` they are tensors of the stub device, and every operator goes through the wheel's own C++ code, ours and torch's
alike. Neither computes a value. Five things cannot run so, and are arranged here, in the test:

- process groups are torch's "fake" ones, which exchange nothing: so one process is rank 0 of any layout;
- Megatron's tracker of generators compares host states in Python, so `fork` enters and leaves outside the fake mode;
- `Module.to` cannot move a fake parameter, so `_place` does what `Float16Module(config, model.cuda())` would;
- a fake device has no memory to give, so every tensor is made inside the fake mode;
- there is no pinned memory for the experts' counts to be copied to, and the scale of their auxiliary loss is a constant
  that only a real device could hold.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.npu_contract.model_run import BATCH, HEADS, HIDDEN, LAYERS, MARK, SEQUENCE, VOCABULARY
from tests.npu_contract.operators import UNFUSED, violations
from tests.npu_contract.recorder import Recorder, describe


def run(jobs: Sequence[Mapping[str, Any]]) -> None:
    """Run `jobs` (see `model_run.job`) and print their results as one line."""
    os.environ["MINDSPEED_LITE_DEVICE"] = "npu"
    print(MARK + json.dumps([_one(each) for each in jobs]), flush=True)


def _one(given: Mapping[str, Any]) -> dict[str, Any]:
    import mindspeed_lite
    from mindspeed_lite import runtime
    from mindspeed_lite.ops import dispatch

    features = {"auto": True}
    if given["features"] is not None:
        flags = {feature.name: feature.options[0].dest for feature in runtime.catalogue()}
        features = {flags[name]: True for name in given["features"]}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mindspeed_lite.enabled(**features))
        for operator in given["reference"]:
            stack.enter_context(dispatch.force(operator, dispatch.REFERENCE))
        chosen = stack.enter_context(_selections())
        result = _forward_and_backward(given["options"])
        report = mindspeed_lite.report()
        assert report is not None
        names = {feature.name for feature in runtime.catalogue()}
        result["applied"] = [
            entry.feature for entry in report.entries if entry.feature in names and entry.status == "applied"
        ]
        result["left_off"] = [
            f"{entry.feature}: {'; '.join(entry.reasons)}"
            for entry in report.entries
            if entry.status == "off" and entry.reasons
        ]
        result["fallbacks"] = [f"{each.feature}: {each.reason}" for each in report.fallbacks]
    result["name"] = given["name"]
    result["on_reference"] = sorted({operator for operator, backend in chosen if backend != "npu"})
    return result


@contextlib.contextmanager
def _selections() -> Iterator[list[tuple[str, str]]]:
    """Yields (operator, backend) of every call of an operator of ours in the block."""
    from mindspeed_lite.ops.dispatch import Operator

    own, chosen = Operator._backend, []

    def backend(self: Any, case: Any, tensors: Any) -> Any:
        module = own(self, case, tensors)
        chosen.append((self.name, "reference" if module is None else module.__name__.rpartition(".")[2]))
        return module

    Operator._backend = backend  # type: ignore[method-assign]
    try:
        yield chosen
    finally:
        Operator._backend = own  # type: ignore[method-assign]


def _forward_and_backward(options: Mapping[str, Any]) -> dict[str, Any]:
    """The recorded calls of one forward and one backward, and what is wrong with the gradients, if anything."""
    import torch.distributed as dist
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    tp = options.get("tp", 1)
    dist.init_process_group("cpu:fake,npu:fake", store=FakeStore(), rank=0, world_size=tp)
    try:
        ps.initialize_model_parallel(tp, create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(1)
        fake = os.environ["CANN_STUB_MODE"] == "fake"
        with contextlib.ExitStack() as stack:
            stack.enter_context(_fork_outside_the_mode())
            stack.enter_context(FakeTensorMode() if fake else contextlib.nullcontext())
            model = _place(_model(options))
            tokens = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64, device="npu")
            mask = None
            if options.get("mask"):
                mask = torch.zeros(BATCH, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device="npu")
            if options.get("experts"):
                stack.enter_context(_experts_without_a_device())
            with Recorder() as recorder, _names() as names:
                loss = model(tokens, tokens, mask, labels=tokens).float().mean()
                forward = len(recorder.calls)
                loss.backward()
            wrong = [
                f"{name}: {parameter.grad if parameter.grad is None else describe(parameter.grad)}"
                for name, parameter in model.named_parameters()
                if parameter.grad is None or str(describe(parameter.grad)) != str(describe(parameter))
            ]
        calls = recorder.calls
        # The router has a softmax of its own, and a gradient with a sign.
        others = ("aten::_softmax", "aten::neg") if options.get("experts") else ()
        unfused = {operator: set(theirs) - set(others) for operator, theirs in UNFUSED.items()}
        if "use_flash_attn" in options.get("without", ()):
            del unfused["attention"]
        return {
            "forward": [text_of(call) for call in calls[:forward]],
            "backward": [text_of(call) for call in calls[forward:]],
            "violations": [text for call in calls for text in violations(call)],
            "unfused": {operator: sorted(names & theirs) for operator, theirs in unfused.items()},
            "wrong_gradients": wrong,
        }
    finally:
        ps.destroy_model_parallel()
        dist.destroy_process_group()


def text_of(call: Any) -> str:
    """A recorded call on one line: the arguments that differ from the schema's defaults, and what came back."""
    schema = getattr(torch.ops.npu, call.operator).default._schema
    given = []
    for argument in schema.arguments:
        value = call.arguments[argument.name]
        if not argument.has_default_value() or value != argument.default_value:
            shown = f"{value:.6g}" if isinstance(value, float) else value
            given.append(f"{argument.name}={shown}")
    return f"{call.operator}({', '.join(given)}) -> {', '.join(str(each) for each in call.results or ())}"


@contextlib.contextmanager
def _names() -> Iterator[set[str]]:
    """Yields the names of all operators that run in the block."""
    names: set[str] = set()

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.add(func._schema.name)
            return func(*args, **(kwargs or {}))

    with Names():
        yield names


def _model(options: Mapping[str, Any]) -> Any:
    """A GPT of Megatron-core's local specification, on the current device."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    qk_layernorm, experts = options.get("qk_layernorm", False), options.get("experts")
    given = {"masked_softmax_fusion": False, **options.get("config", {})}
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=128,
        num_attention_heads=HEADS,
        num_query_groups=options.get("query_groups", HEADS),
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=options.get("dropout", 0.0),
        attention_dropout=options.get("dropout", 0.0),
        bf16=True,
        params_dtype=torch.bfloat16,
        tensor_model_parallel_size=options.get("tp", 1),
        sequence_parallel=options.get("sp", False),
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        qk_layernorm=qk_layernorm,
        num_moe_experts=experts,
        # JSON has lists where Megatron has tuples.
        **{key: tuple(value) if isinstance(value, list) else value for key, value in given.items()},
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=experts, normalization="RMSNorm", qk_layernorm=qk_layernorm
        ),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )


def _place(model: Any) -> Any:
    """Every floating parameter on the NPU in bf16, with the marks that Megatron keeps on it."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or (parameter.device.type == "npu" and parameter.dtype == torch.bfloat16):
                continue
            placed = torch.nn.Parameter(parameter.detach().to("npu", torch.bfloat16), parameter.requires_grad)
            for mark, value in vars(parameter).items():
                if not hasattr(placed, mark):
                    setattr(placed, mark, value)
            module._parameters[name] = placed
    return model


@contextlib.contextmanager
def _experts_without_a_device() -> Iterator[None]:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    own, scaler = token_dispatcher.maybe_move_tensor_to_cpu, moe_utils.MoEAuxLossAutoScaler
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, **_: (
        tensor.to("cpu") if isinstance(tensor, torch.Tensor) else tensor
    )
    scaler.main_loss_backward_scale = torch.ones((), device="npu")
    try:
        yield
    finally:
        token_dispatcher.maybe_move_tensor_to_cpu = own
        scaler.main_loss_backward_scale = None


@contextlib.contextmanager
def _fork_outside_the_mode() -> Iterator[None]:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    own = CudaRNGStatesTracker.fork

    @contextlib.contextmanager
    def fork(self: Any, *args: Any) -> Iterator[None]:
        forked = own(self, *args)
        with unset_fake_temporarily():
            forked.__enter__()
        try:
            yield
        finally:
            with unset_fake_temporarily():
                forked.__exit__(None, None, None)

    CudaRNGStatesTracker.fork = fork
    try:
        yield
    finally:
        CudaRNGStatesTracker.fork = own
