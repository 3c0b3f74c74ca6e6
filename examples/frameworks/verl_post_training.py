"""verl's Megatron engine: memory by `mindspeed_lite.sleep` and `wake`, log-probabilities without logits.

    VERL_USE_EXTERNAL_MODULES=mindspeed_lite_plugin,verl_post_training      this folder on PYTHONPATH, on every node

verl decides when to move what: `param_offload`, `optimizer_offload`, and its trainer between phases. Logits are avoided
with `actor_rollout_ref.model.use_fused_kernels=True`, whose own kernels need Triton on an NVIDIA GPU.
"""

from __future__ import annotations

import functools
from typing import Any

import wrapt

import mindspeed_lite

PARTS = ("weights", "optimizer", "gradients")


def sleep(engine: Any, parts: set[str]) -> None:
    asleep = vars(engine).setdefault("_asleep", set())
    if parts - asleep:
        mindspeed_lite.sleep(engine.module, engine.optimizer, keep=[each for each in PARTS if each not in parts])
        asleep |= parts


def wake(engine: Any, parts: set[str]) -> set[str]:
    """Those of the parts that slept."""
    asleep = vars(engine).setdefault("_asleep", set())
    slept = parts & asleep
    if slept:
        mindspeed_lite.wake(*slept, model=engine.module)
        asleep -= slept
    return slept


def to(self: Any, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
    """`MegatronEngine.to`: gradients leave with the weights, and come back if `grad`."""
    parts = {"optimizer"} if optimizer and self.optimizer is not None else set()
    if model:
        parts |= {"weights", "gradients"} if device == "cpu" or grad else {"weights"}
    if device == "cpu":
        sleep(self, parts)
    else:
        wake(self, parts)


def awake(original: Any, *parts: str, stays: bool = False) -> Any:
    """A method that needs these parts; afterwards they sleep again, unless it `stays`."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        slept = wake(self, {*parts})
        try:
            return original(self, *args, **kwargs)
        finally:
            if not stays:
                sleep(self, slept)

    return method


@wrapt.when_imported("verl.workers.engine.megatron.transformer_impl")
def sleep_and_wake(module: Any) -> None:
    engine = module.MegatronEngine
    engine.to = to
    for name in ("save_checkpoint", "load_checkpoint"):
        setattr(engine, name, awake(getattr(engine, name), *PARTS))
    # verl reads the weights afterwards, and calls `to` when it has.
    for name in ("get_per_tensor_param", "get_per_tensor_param_shard"):
        setattr(engine, name, awake(getattr(engine, name), "weights", stays=True))
    # Both checkpoint methods move them once more. What loads finds all in its place.
    module.offload_megatron_model_to_cpu = module.offload_megatron_optimizer = lambda _: None


@wrapt.when_imported("verl.utils.kernel.linear_cross_entropy")
def without_logits(module: Any) -> None:
    from mindspeed_lite.parallel.cross_entropy import vocab_parallel_linear_log_prob

    def linear_cross_entropy(
        hidden: Any, weight: Any, labels: Any, temperature: float = 1.0, reduction: str = "none", group: Any = None
    ) -> Any:
        if reduction != "none":
            raise ValueError(f"reduction is {reduction!r}, and values per token are 'none'")
        # verl hands over hidden [s, 1, H] and labels [1, s], and wants [s].
        rows, target = hidden.flatten(0, -2), labels.flatten()
        return vocab_parallel_linear_log_prob(rows, weight, target, group, temperature=temperature, entropy=True)

    module.linear_cross_entropy = linear_cross_entropy
