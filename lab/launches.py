"""Records launches of Triton kernels by operators on fake CUDA tensors: no GPU, no memory.

`install()` changes this process for good; use one of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed_lite.ops import traced
from mindspeed_lite.ops.adamw import cuda as adamw
from mindspeed_lite.ops.case import Draw

MULTIPROCESSORS = 132  # H100 SXM
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
_TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.bool: "i1", torch.uint8: "u8",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


class Launch(NamedTuple):
    """A kernel with its Triton signature, constants, integers divisible by 16, bytes of its tensors and grid."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...]
    options: dict[str, Any]
    programs: int
    sizes: dict[str, int]

    @property
    def name(self) -> str:
        """`package:kernel`, by the last two parts of the module."""
        return f"{'.'.join(self.kernel.fn.__module__.split('.')[-2:])}:{self.kernel.fn.__name__}"


class Torch(NamedTuple):
    """A kernel of PyTorch's own, with the bytes of its inputs and results."""

    name: str
    bytes: int


_recorded: list[Launch | Torch] = []
_NO_KERNEL = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "detach",
    "alias",
    "_unsafe_view",
)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records PyTorch's operators that launch kernels."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket._qualified_op_name
        if not func.is_view and name.startswith("aten::") and name.partition("::")[2] not in _NO_KERNEL:
            tensors = {id(each): each for each in tree_leaves((args, kwargs, out)) if isinstance(each, Tensor)}
            _recorded.append(Torch(name, sum(each.numel() * each.itemsize for each in tensors.values())))
        return out


def install() -> None:
    """Make kernel launches recorded and torch.cuda answer like an H100."""
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        _recorded.append(_launch(self, grid, args, given))

    JITFunction.run = run
    torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore[assignment, misc, return-value]
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(  # type: ignore[assignment, return-value]
        multi_processor_count=MULTIPROCESSORS
    )
    torch.cuda.is_current_stream_capturing = lambda: False
    traced.dry = True
    # A fake tensor has no counts to repeat by.
    adamw._pieces = _pieces  # type: ignore[assignment]


def _pieces(sizes: tuple[int, ...], device: torch.device, stream: int) -> tuple[Tensor, int]:
    count = sum(-(-size // adamw._BLOCK) for size in sizes)
    return torch.empty(count, 2, dtype=torch.int32, device=device), count


def record(
    function: Callable[..., Any], make: Callable[[Draw], Sequence[Tensor]], dtype: torch.dtype, backward: bool = True
) -> list[Launch | Torch]:
    """Launches of the forward pass and, with `backward` and gradients, of the backward pass."""
    draw = Draw("cpu", dtype)
    draw.device, draw.options = "cuda", {"device": "cuda"}
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = make(draw)
        _recorded.clear()
        with _Operators():  # type: ignore[no-untyped-call]
            out = function(*inputs)
            if backward and out.grad_fn is not None:
                _backward(out.grad_fn, torch.empty_like(out))
    return [*_recorded]


def _backward(node: Any, *gradients: Any) -> None:
    """Run a chain of autograd nodes; torch's engine refuses CUDA tensors without CUDA."""
    found = getattr(node, "apply", node)(*gradients)  # of Python or of C++
    # Inputs that are no tensors, or need no gradient, have no following node, and no gradient.
    wanted = [each for each, _ in node.next_functions if each is not None]
    given = [each for each in (found if isinstance(found, tuple) else (found,)) if each is not None]
    for following, gradient in zip(wanted, given, strict=False):
        if following.name() != "torch::autograd::AccumulateGrad":
            _backward(following, gradient)


def _launch(kernel: Any, grid: Any, args: Sequence[Any], given: dict[str, Any]) -> Launch:
    options = {name: given.pop(name) for name in _OPTIONS if name in given}
    values = {**dict(zip(kernel.arg_names, args, strict=False)), **given}
    signature, constants, divisible, sizes = {}, {}, [], {}
    for parameter in kernel.params:
        name = parameter.name
        value = values.get(name, parameter.default)
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            constants[name] = value
        elif isinstance(value, Tensor):
            signature[name] = "*" + _TYPES[value.dtype]
            sizes[name] = value.numel() * value.itemsize
        elif isinstance(value, (bool, float)):
            signature[name] = "u1" if isinstance(value, bool) else "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                divisible.append(name)
    counts = grid(values) if callable(grid) else grid
    programs = 1
    for count in counts:
        programs *= int(count)
    return Launch(kernel, signature, constants, tuple(divisible), options, programs, sizes)
