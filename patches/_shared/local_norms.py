"""Patches the factory of the local implementation's norms, and gives the conditions that hold for both kinds."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from mindspeed_lite.engine import Context, Override, Session
from mindspeed_lite.platform.megatron import CONFIG

from .held_before import held_before


def instead_of(kind: str, make: type[Any]) -> Override:
    """The patch that has `make` build every norm of `kind`, from size, epsilon, zero-centred and sequence parallel."""

    def hold(norm: Any, session: Session) -> None:
        if session.verifier is not None:
            norm.verifier = session.verifier
        held_before(kind)[norm] = None
        session.on_end(functools.partial(_give_back, weakref.ref(norm)))

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
                with contextlib.suppress(AssertionError):  # what Megatron refuses has no original
                    vars(norm)["original"] = wrapped(
                        cls, config, hidden_size, eps, persist_layer_norm, zero_centered_gamma, normalization
                    )
            hold(norm, session)
            return norm

        for norm in [*held_before(kind)]:
            if type(norm) is not make:
                norm.__class__, norm.zero_centered = make, False
            hold(norm, session)
        return __new__

    # Outside the device layer's wrap of the same symbol, so that sequence parallelism reaches this one.
    fields = ("layernorm_zero_centered_gamma", "memory_efficient_layer_norm", "normalization", "sequence_parallel")
    return Override(
        "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        new,
        reads=[f"{CONFIG}.{name}" for name in fields],
        order=10,
    )


def _give_back(reference: weakref.ref[Any]) -> None:
    """Make a norm torch's own again; one with zero-centred gamma, which torch has not, goes on as it is."""
    norm = reference()
    if norm is None or norm.zero_centered:
        return
    for name in ("zero_centered", "verifier", "original"):
        vars(norm).pop(name, None)
    norm.__class__ = _torchs_class(norm)


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


def torchs(norm: Any, x: torch.Tensor, **parameters: torch.Tensor) -> torch.Tensor:
    """What Megatron has instead of `norm`, with these parameters."""
    original = vars(norm).get("original") or _torchs_class(norm)(norm.normalized_shape, norm.eps)
    found: torch.Tensor = torch.func.functional_call(original, parameters, (x,))
    return found


def _torchs_class(norm: Any) -> type[Any]:
    return next(each for each in type(norm).__mro__ if each.__module__.startswith("torch."))


def compared_with(kind: str, norm: Any) -> str:
    """What `--mindspeed-lite-verify` says it compares `norm` with."""
    if norm.zero_centered:
        return f"the plain definition, since Megatron's local path has no {kind} with zero-centred gamma"
    refused = ", which Megatron's local path refuses under sequence parallelism"
    return f"torch.nn.{kind}" + (refused if getattr(norm.weight, "sequence_parallel", False) else "")
