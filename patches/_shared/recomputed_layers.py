"""Recomputes or offloads chosen parts of a layer; the choice may change between steps.

Norms and activation use `--recompute-norm` and `--recompute-activation-function`, other parts Megatron's `checkpoint`;
offloading is that of `--swap-attention`.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_lite.engine import Function, Session
from mindspeed_lite.memory.hooked_module import HookedModule
from mindspeed_lite.memory.layer_records import (
    ACTIVATION,
    ATTENTION,
    EXPERTS,
    INPUT_NORM,
    LAYER,
    MLP,
    MLP_NORM,
    SHARED,
    SHARED_ACTIVATION,
    LayerRecorder,
)
from mindspeed_lite.memory.offload import Offload

from .. import recompute_activation_function, recompute_norm
from .proxies import RECOMPUTED

_NORMS = {INPUT_NORM: "input_layernorm", MLP_NORM: "pre_mlp_layernorm"}
_CHECKPOINTED = {ATTENTION: "self_attention", MLP: "mlp"}
_OF_EXPERTS = {EXPERTS: "experts", SHARED: "shared_experts"}
_IN_PIECES = ("moe_alltoall_mc2", "moe_alltoall_overlap_comm", "moe_allgather_overlap_comm")
#: Module -> (its layer, its part).
_PARTS: weakref.WeakKeyDictionary[torch.nn.Module, tuple[RecomputedLayer, str]] = weakref.WeakKeyDictionary()


class RecomputedLayer:
    """A transformer layer whose parts may be recomputed or offloaded.

    Attributes:
        can, again: parts that can be and are recomputed; initially the whole layer.
        can_swap, swapped: parts that can be and are offloaded.
    """

    def __init__(self, number: int, layer: Any, session: Session, offload: Offload | None = None) -> None:
        self.number = number
        self.again: frozenset[str] = frozenset({LAYER})
        self.swapped: frozenset[str] = frozenset()
        self.recorder: LayerRecorder | None = None
        self._layer, self._session = weakref.ref(layer), session
        recompute_norm.prepare(layer, session)
        recompute_activation_function.prepare(layer, session)
        norms = {part for part, name in _NORMS.items() if getattr(layer, f"recompute_{name}")}
        acts = {part for part in (ACTIVATION, SHARED_ACTIVATION) if self._activations(part)}
        modules = _modules(layer, session)
        self.can = frozenset(norms | acts | {*modules} | {LAYER})
        for part, module in [(LAYER, layer), *modules.items()]:
            _PARTS[module] = (self, part)
            session.mark(module, "forward", functools.partial(_forward, module))
        self.can_swap: frozenset[str] = frozenset() if offload is None else self._hook(layer, offload)
        self.run_again(self.again)

    def _hook(self, layer: Any, offload: Offload) -> frozenset[str]:
        modules = {part: getattr(layer, name) for part, name in {**_NORMS, **_CHECKPOINTED}.items()}
        hooked = {part: each for part, each in modules.items() if any(True for _ in each.parameters())}

        def saving(part: str) -> contextlib.AbstractContextManager[Any]:
            return offload.saving() if part in self.swapped else contextlib.nullcontext()

        every = [
            HookedModule(layer, lambda: offload.layer(self.number, layer.parameters())),
            *(HookedModule(module, functools.partial(saving, part)) for part, module in hooked.items()),
        ]
        for handle in (handle for each in every for handle in each.handles):
            self._session.on_end(handle.remove)
        return frozenset(hooked)

    def _activations(self, part: str) -> list[Any]:
        layer = self._layer()
        if layer is None:
            return []
        shared, name = getattr(layer.mlp, "shared_experts", None), RECOMPUTED
        every = [each for each in layer.mlp.modules() if name in vars(each)]
        return [each for each in every if (each is shared) == (part == SHARED_ACTIVATION)]

    def run_again(self, parts: frozenset[str], swapped: frozenset[str] = frozenset()) -> None:
        layer = self._layer()
        if layer is None:
            return
        self.again, self.swapped = parts, swapped
        for part, name in _NORMS.items():
            if part in self.can:
                self._session.mark(layer, f"recompute_{name}", part in parts)
        for part in (ACTIVATION, SHARED_ACTIVATION):
            for module in self._activations(part):
                self._session.mark(module, RECOMPUTED, part in parts)

    def run(self, part: str, forward: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if part not in self.again:
            return forward(*args, **kwargs)
        recorder = self.recorder if part == LAYER else None
        if recorder is None:
            return _checkpointed(forward, args, kwargs, None)
        with recorder.forward(self.number):
            return _checkpointed(forward, args, kwargs, functools.partial(recorder.again, self.number))

    @contextlib.contextmanager
    def recorded(self, recorder: LayerRecorder) -> Iterator[None]:
        layer = self._layer()
        acts = {part: self._activations(part) for part in (ACTIVATION, SHARED_ACTIVATION)}
        handles = [] if layer is None else [*_watched(layer, _modules(layer, self._session), acts, recorder)]
        self.recorder = recorder
        try:
            yield
        finally:
            self.recorder = None
            for remove in handles:
                remove()


def _modules(layer: Any, session: Session) -> dict[str, Any]:
    found = {part: getattr(layer, name) for part, name in _CHECKPOINTED.items()}
    # Experts return a bias in some releases.
    if not (layer.config.add_bias_linear or any(session.settings.get(name) for name in _IN_PIECES)):
        found |= {part: getattr(layer.mlp, name, None) for part, name in _OF_EXPERTS.items()}
    return {part: each for part, each in found.items() if each is not None and any(True for _ in each.parameters())}


def _watched(
    layer: Any, modules: Mapping[str, Any], acts: Mapping[str, Sequence[Any]], recorder: LayerRecorder
) -> Iterator[Callable[[], None]]:
    for part, module in {**{part: getattr(layer, name) for part, name in _NORMS.items()}, **modules}.items():
        looks = part not in _CHECKPOINTED
        yield module.register_forward_pre_hook(
            lambda _, args, part=part, looks=looks: recorder.enter(
                part, *(each for each in args if looks and isinstance(each, Tensor))
            )
        ).remove
        yield module.register_forward_hook(
            lambda _, args, out, part=part: recorder.leave(part, out if part in _NORMS else None)
        ).remove
    for part, mlps in acts.items():
        for mlp in mlps:
            seen = (functools.partial(recorder.enter, part), functools.partial(recorder.leave, part))
            yield recompute_activation_function.observe(mlp, *seen)


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces a module's forward; copies of the module run unchanged."""
    forward = functools.partial(type(module).forward, module)
    layer, part = _PARTS.get(module, (None, ""))
    if layer is None or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return layer.run(part, forward, args, kwargs)


def _checkpointed(
    forward: Function, args: Sequence[Any], kwargs: Mapping[str, Any], around_again: Function | None
) -> Any:
    """Checkpoint `forward`; only the first output carries a gradient."""
    from megatron.core import tensor_parallel

    given: list[Any] = [*args, *kwargs.values()]
    places = [place for place, each in enumerate(given) if isinstance(each, Tensor) and each.requires_grad]
    if not places:
        return forward(*args, **kwargs)
    differentiable = [given[place] for place in places]
    for place in places:
        given[place] = None
    others = [each for each in given if isinstance(each, Tensor)]
    rest: list[Any] = []
    is_tuple = False

    def function(*tensors: Tensor) -> Any:
        nonlocal is_tuple
        values = list(given)
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        is_again = torch.is_grad_enabled()
        with around_again(tensors[0], others) if is_again and around_again else contextlib.nullcontext():
            output = forward(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))
        is_tuple = isinstance(output, tuple)
        first, *more = output if is_tuple else (output,)
        if not is_again:
            rest.extend(more)
        return first

    first = tensor_parallel.checkpoint(function, False, *differentiable)
    return (first, *rest) if is_tuple else first
