"""Fused norms in place of torch's, for `--use-fused-layernorm` and `--use-fused-rmsnorm`."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from mindspeed_lite.engine import Context, Function, Override, Session
from mindspeed_lite.ops.norm import reference

from .conditions import Condition, every, local
from .wrappers import act_again, at_end


class FusedNorm(torch.nn.Module):
    """Mixin: a torch norm computed over the last dimension by an operator.

    kind: torch's class name. operator: a function of (x, *parameters, eps, zero_centered).
    """

    kind: ClassVar[str]
    operator_name: ClassVar[str]
    parameter_names: ClassVar[tuple[str, ...]] = ("weight",)
    operator: ClassVar[Callable[..., Tensor]]
    weight: torch.nn.Parameter
    eps: Any
    verifier: Any = None

    def __init__(
        self, hidden_size: int, eps: float, zero_centered: bool = False, sequence_parallel: bool = False
    ) -> None:
        """Args:
        hidden_size: length of the last dimension.
        zero_centered: the stored weight is gamma - 1.
        sequence_parallel: Megatron sums gradients over the tensor-parallel group.
        """
        super().__init__(hidden_size, eps=eps)  # type: ignore[call-arg]
        self.zero_centered = zero_centered
        if zero_centered:
            torch.nn.init.zeros_(self.weight)
        # Some of Megatron's code tests whether the attribute exists, not its value.
        if sequence_parallel:
            for parameter in self.parameters():
                parameter.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        parameters = [getattr(self, name) for name in self.parameter_names]
        if self.verifier is not None:
            self._verify(x, dict(zip(self.parameter_names, parameters, strict=True)))
        return type(self).operator(x, *parameters, self.eps, self.zero_centered)

    def _verify(self, x: Tensor, parameters: dict[str, Tensor]) -> None:
        def torchs(x: Tensor, *tensors: Tensor) -> Tensor:
            original = vars(self).get("original") or _torchs_class(self)(self.normalized_shape, self.eps)
            given = dict(zip(parameters, tensors, strict=True))
            found: Tensor = torch.func.functional_call(original, given, (x,))
            return found

        def ours(*tensors: Tensor) -> Tensor:
            return type(self).operator(*tensors, self.eps, self.zero_centered)

        def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return reference.norm(x, weight, bias, self.eps, self.zero_centered)

        against = f"torch.nn.{self.kind}"
        if self.zero_centered:
            against = f"the plain definition, since Megatron's local path has no {self.kind} with zero-centred gamma"
        elif getattr(self.weight, "sequence_parallel", False):
            against += ", which Megatron's local path refuses under sequence parallelism"
        self.verifier.check(
            f"use_fused_{self.kind.lower()}",
            self.operator_name,
            "ulp",
            ours,
            plain if self.zero_centered else torchs,
            {"x": x, **parameters},
            against=against,
            variant="zero-centred" if self.zero_centered else "",
        )


def norm_patch(norm_class: type[FusedNorm]) -> Override:
    """Build norms of a kind as `norm_class`; convert norms of earlier sessions in place."""
    kind, adopted = norm_class.kind, weakref.WeakKeyDictionary[Any, None]()

    def adopt(norm: Any, session: Session) -> None:
        if session.verifier is not None:
            norm.verifier = session.verifier
        adopted[norm] = None
        at_end(session, norm, _restore_class)

    def new(wrapped: Function, session: Session) -> Function:
        def __new__(
            cls: Any,
            config: Any,
            hidden_size: int,
            eps: float = 1e-5,
            persist_layer_norm: bool = False,
            zero_centered_gamma: bool = False,
            normalization: str = "LayerNorm",
        ) -> Any:
            def original() -> Any:
                return wrapped(cls, config, hidden_size, eps, persist_layer_norm, zero_centered_gamma, normalization)

            if config.normalization != kind or config.memory_efficient_layer_norm:
                return original()
            norm = norm_class(hidden_size, eps, config.layernorm_zero_centered_gamma, config.sequence_parallel)
            if session.verifier is not None:
                with contextlib.suppress(AssertionError):  # what Megatron refuses has no original
                    vars(norm)["original"] = original()
            adopt(norm, session)
            return norm

        def adopt_again(norm: Any) -> None:
            if type(norm) is not norm_class:
                norm.__class__, norm.zero_centered = norm_class, False
            adopt(norm, session)

        act_again(session, adopted, adopt_again)
        return __new__

    # Outside the device layer's wrap of the same symbol, which would drop sequence parallelism.
    return Override(
        "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        new,
        order=10,
    )


def _restore_class(norm: Any) -> None:
    """Restore torch's class, unless gamma is zero-centred, which torch lacks."""
    for name in ("verifier", "original"):
        vars(norm).pop(name, None)
    if not norm.zero_centered:
        del norm.zero_centered
        norm.__class__ = _torchs_class(norm)


def _torchs_class(norm: Any) -> type[Any]:
    return next(each for each in type(norm).__mro__ if each.__module__.startswith("torch.nn.modules.normalization"))


MEMORY_EFFICIENT = {"memory_efficient_layer_norm": "--memory-efficient-layer-norm is a property of Apex's norm"}


def local_norm(kind: str) -> Condition:
    def condition(context: Context) -> list[str]:
        given = context.arg("normalization", kind)
        return [] if given == kind else [f"the model has --normalization {given}, not {kind}"]

    return every(local("uses its own fused norm"), condition)
