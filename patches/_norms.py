"""Where Megatron makes the norms of its local implementation, and why one of them may not be ours: for both kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_lite.engine import Context, Session, Wrap


def instead_of(kind: str, make: Callable[[int, float, bool, bool], Any]) -> Wrap:
    """The patch that has `make` build every norm of `kind`, from size, epsilon, zero-centred and sequence parallel."""

    def new(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
        def __new__(
            cls: Any,
            config: Any,
            hidden_size: int,
            eps: float = 1e-5,
            persist_layer_norm: bool = False,
            zero_centered_gamma: bool = False,
            normalization: str = "LayerNorm",
        ) -> Any:
            # Megatron's own answer to a memory-efficient norm is a refusal that should stand.
            if config.normalization != kind or config.memory_efficient_layer_norm:
                return wrapped(cls, config, hidden_size, eps, persist_layer_norm, zero_centered_gamma, normalization)
            norm = make(hidden_size, eps, config.layernorm_zero_centered_gamma, config.sequence_parallel)
            if session.verifier is not None:
                norm.verifier = session.verifier
            return norm

        return __new__

    # Outside the device layer's wrap of the same symbol, so that sequence parallelism reaches this one.
    return Wrap("megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__", new, order=10)


def why_not(context: Context, kind: str) -> list[str]:
    """Reasons that hold for both kinds."""
    reasons = []
    if context.arg("transformer_impl", "local") == "transformer_engine":
        reasons.append("--transformer-impl transformer_engine uses Transformer Engine's own fused norm")
    normalization = context.arg("normalization", kind)
    if normalization != kind:
        reasons.append(f"the model has --normalization {normalization}, not {kind}")
    if context.arg("memory_efficient_layer_norm", False):
        reasons.append("--memory-efficient-layer-norm is a property of Apex's norm")
    return reasons


def compared_with(kind: str, norm: Any) -> str:
    """What `--mindspeed-lite-verify` says it compares `norm` with."""
    if norm.zero_centered:
        return f"the plain definition, since Megatron's local path has no {kind} with zero-centred gamma"
    refused = ", which Megatron's local path refuses under sequence parallelism"
    return f"torch.nn.{kind}" + (refused if getattr(norm.weight, "sequence_parallel", False) else "")
