"""Layout candidates of a search, as TrainingConfig and as flags."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .training import TrainingConfig

# Flags chosen by a search; with a value, or switches.
CHOSEN_VALUES = (
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size",
    "--expert-model-parallel-size", "--expert-tensor-parallel-size", "--micro-batch-size",
    "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank",
    "--pipeline-model-parallel-layout", "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers",
    "--context-parallel-algo", "--ulysses-degree-in-cp", "--cp-comm-type", "--recompute-granularity",
    "--recompute-method", "--recompute-num-layers", "--recompute-modules",
    "--recompute-activation-function-num-layers", "--recompute-norm-num-layers",
    "--microbatch-group-size-per-virtual-pipeline-stage", "--pipeline-schedule", "--schedules-method",
)  # fmt: skip
CHOSEN_SWITCHES = (
    "--sequence-parallel", "--use-distributed-optimizer", "--recompute-activations", "--recompute-norm",
    "--recompute-activation-function", "--reuse-fp32-param", "--swap-optimizer",
    "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split",
)  # fmt: skip
# Minimum tokens per rank of a split sequence.
SHORTEST = 512
# Where a node has hundreds of devices.
MOST_TP = 16
# Virtual stages, where none divides the layers.
UNEVEN = (2, 3, 4, 6, 8)
RECOMPUTE = ("none", "parts", "full")
# Each needs less memory and more time than the previous one.
STATES = ("kept", "shared", "swapped")
_PARTS = ("recompute_norm", "recompute_activation_function")


@dataclass(frozen=True)
class LayoutCandidate:
    """Layout, micro-batch and memory options.

    Attributes:
        recompute: none; parts (norms and activation functions); or full, layer by layer.
        states: kept; shared (--reuse-fp32-param); or swapped (also --swap-optimizer).
        layout: `--pipeline-model-parallel-layout` if layers do not divide, else empty.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    cp_algo: str = ""
    ep: int = 1
    micro_batch: int = 1
    recompute: str = "none"
    states: str = "kept"
    layout: str = ""

    @property
    def name(self) -> str:
        shown = [f"TP{self.tp}", f"PP{self.pp}"]
        shown += [f"VPP{self.vpp}"] if self.vpp > 1 else []
        shown += [f"CP{self.cp} {self.cp_algo.removesuffix('_cp_algo')}"] if self.cp > 1 else []
        shown += [f"EP{self.ep}"] if self.ep > 1 else []
        shown.append(f"MBS{self.micro_batch}")
        shown += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        shown += [f"states {self.states}"] if self.states != "kept" else []
        return " ".join(shown)

    def applied(self, base: TrainingConfig) -> TrainingConfig:
        """The chosen training, unchecked."""
        changed: dict[str, object] = {
            "tensor_model_parallel_size": self.tp,
            "sequence_parallel": self.tp > 1,
            "pipeline_model_parallel_size": self.pp,
            "num_virtual_stages_per_pipeline_rank": self.vpp if self.vpp > 1 or self.layout else 0,
            "pipeline_model_parallel_layout": self.layout,
            "context_parallel_size": self.cp,
            "context_parallel_algo": self.cp_algo if self.cp > 1 else "",
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": 1 if base.num_experts and self.tp > 1 else 0,
            "micro_batch_size": self.micro_batch,
            "use_distributed_optimizer": True,
            "recompute_granularity": "full" if self.recompute == "full" else "",
            "recompute_method": "uniform" if self.recompute == "full" else "",
            "recompute_num_layers": 1 if self.recompute == "full" else 0,
            "recompute_modules": (),
            "reuse_fp32_param": self.states != "kept",
            "swap_optimizer": self.states == "swapped",
            **{name: self.recompute == "parts" for name in _PARTS},
        }
        return base.replace(**changed)

    def flags(self, base: TrainingConfig) -> list[str]:
        words = [
            "--tensor-model-parallel-size", str(self.tp), *(["--sequence-parallel"] if self.tp > 1 else []),
            "--pipeline-model-parallel-size", str(self.pp),
        ]  # fmt: skip
        if self.layout:
            words += ["--pipeline-model-parallel-layout", self.layout]
        elif self.vpp > 1:
            words += ["--num-virtual-stages-per-pipeline-rank", str(self.vpp)]
        if self.cp > 1:
            words += ["--context-parallel-size", str(self.cp), "--context-parallel-algo", self.cp_algo]
        if base.num_experts:
            words += ["--expert-model-parallel-size", str(self.ep)]
            words += ["--expert-tensor-parallel-size", "1"] if self.tp > 1 else []
        words += ["--micro-batch-size", str(self.micro_batch), "--use-distributed-optimizer"]
        if self.recompute == "full":
            words += ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
        elif self.recompute == "parts":
            words += ["--recompute-norm", "--recompute-activation-function"]
        words += ["--reuse-fp32-param"] if self.states != "kept" else []
        return words + (["--swap-optimizer"] if self.states == "swapped" else [])


def without_chosen(words: Sequence[str]) -> list[str]:
    found: list[str] = []
    drops = False
    for word in words:
        if word.startswith("--"):
            flag = word.partition("=")[0]
            drops = flag in CHOSEN_VALUES and "=" not in word
            if flag in CHOSEN_VALUES or flag in CHOSEN_SWITCHES:
                continue
        elif drops:
            continue
        found.append(word)
    return found


def states_of(base: TrainingConfig) -> Sequence[str]:
    """What can be done with optimizer states: those of Transformer Engine's Adam stay as they are."""
    return STATES if base.bf16 and not base.use_precision_aware_optimizer else STATES[:1]


def variants(base: TrainingConfig, layout: LayoutCandidate) -> Iterator[LayoutCandidate]:
    """Layout with all memory options, largest memory first."""
    for recompute in RECOMPUTE:
        for states in states_of(base):
            yield replace(layout, recompute=recompute, states=states)


def costs_less(one: LayoutCandidate, other: LayoutCandidate) -> bool:
    """Whether each memory option of one takes no more time than the other's."""
    return RECOMPUTE.index(one.recompute) <= RECOMPUTE.index(other.recompute) and STATES.index(
        one.states
    ) <= STATES.index(other.states)


def layouts(base: TrainingConfig, world_size: int, node: int, vpp: int = 0) -> Iterator[LayoutCandidate]:
    """Layouts without recomputation, all states on the device.

    Sizes divide, TP is within a node, and a rank has at least 512 tokens. Others cannot run, or send activations
    between nodes. VPP divides the layers, or layers with embedding and loss; any, if none does; or is `vpp`.
    """
    for tp in _divisors(world_size, min(node, MOST_TP, base.num_attention_heads)):
        if base.num_attention_heads % tp or (base.groups % tp and tp % base.groups):
            continue
        for pp in _divisors(world_size // tp, base.num_layers + 2):
            for cp in _powers(min(world_size // (tp * pp), 64)):
                if world_size % (tp * pp * cp) or (cp > 1 and base.seq_length % (2 * cp * tp)):
                    continue
                if cp > 1 and base.seq_length // cp < SHORTEST:
                    continue
                yield from _of_layout(base, world_size, tp, pp, cp, vpp)


def _virtual(base: TrainingConfig, pp: int, vpp: int) -> list[int]:
    most = (base.num_layers + 2) // pp
    even = [v for v in range(2, most + 1) if base.num_layers % (pp * v) == 0 or (base.num_layers + 2) % (pp * v) == 0]
    if base.mtp_num_layers or not even:
        even = sorted({*even, *(v for v in UNEVEN if v <= most)})
    return [1, *even, *([vpp] if 1 < vpp <= most and vpp not in even else [])]


def _of_layout(base: TrainingConfig, world_size: int, tp: int, pp: int, cp: int, vpp: int) -> Iterator[LayoutCandidate]:
    dp = world_size // (tp * pp * cp)
    for micro in _powers(16):
        if base.global_batch_size % (micro * dp):
            continue
        count = base.global_batch_size // (micro * dp)
        for ep in _divisors(world_size // pp, base.num_experts) if base.num_experts else (1,):
            if base.num_experts % ep:
                continue
            # As in Megatron: whole groups of as many micro-batches as stages.
            for chunks in _virtual(base, pp, vpp) if pp > 1 and count % pp == 0 else [1]:
                for algo in ("megatron_cp_algo", "ulysses_cp_algo") if cp > 1 else ("",):
                    yield LayoutCandidate(tp, pp, chunks, cp, algo, ep, micro)


def _divisors(number: int, most: int) -> list[int]:
    return [each for each in range(1, min(number, most) + 1) if number % each == 0]


def _powers(most: int) -> list[int]:
    return [1 << place for place in range(most.bit_length()) if 1 << place <= most]
