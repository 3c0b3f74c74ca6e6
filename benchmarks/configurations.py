"""Trainings whose shapes stay the same from release to release."""

from __future__ import annotations

from dataclasses import dataclass

COMMON = (
    "--bf16 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --normalization RMSNorm --swiglu "
    "--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights "
    "--hidden-dropout 0 --attention-dropout 0 --train-iters 1000 --log-interval 1 --eval-iters 1 "
    "--eval-interval 1000 --split 90,5,5 --seed 1234 --micro-batch-size 1"
)


@dataclass(frozen=True)
class Configuration:
    """One training.

    Attributes:
        about: what stands in the table beside the name.
        processes: how many, each of them a device.
        flags: Megatron's, on top of the common ones.
        bench: options of `mindspeed-lite bench`.
        link_rate: Mbit/s between processes (`lab.links`); 0 leaves the machine's own links.
    """

    name: str
    about: str
    processes: int
    flags: str
    bench: str = ""
    link_rate: int = 0

    def command(self) -> list[str]:
        """The training command, from the repository's root."""
        start = ["python"]
        if self.processes > 1:
            start = ["torchrun", "--nproc-per-node", str(self.processes)]
        if self.link_rate:
            start = [*"python -m lab.links --rate".split(), str(self.link_rate), "--", *start]
        return [*start, "examples/pretrain_gpt.py", *COMMON.split(), *self.flags.split()]


def _model(layers: int, hidden: int, ffn: int, heads: int, sequence: int, vocabulary: int, batch: int) -> str:
    return (
        f"--num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {ffn} --num-attention-heads {heads} "
        f"--seq-length {sequence} --max-position-embeddings {sequence} --vocab-size {vocabulary - 1} "
        f"--global-batch-size {batch}"
    )


DENSE = (
    "use_flash_attn,use_fused_rmsnorm,use_fused_swiglu,use_fused_rotary_pos_emb,use_fused_adamw,"
    "use_fused_cross_entropy,gradient_accumulation_fusion"
)
_TP2_SP = "--tensor-model-parallel-size 2 --sequence-parallel"


def _moe(experts: int, parallel: int) -> str:
    return (
        f"--num-experts {experts} --moe-router-topk 2 --expert-model-parallel-size {parallel} "
        "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
    )


CONFIGURATIONS: dict[str, tuple[Configuration, ...]] = {
    "cpu": (
        Configuration(
            "dense-medium", "4 layers, hidden 1024, sequence 1024, vocabulary 32,768", 1,
            _model(4, 1024, 2816, 16, 1024, 32768, 4), "--all --repeats 4 --warmup 2 --steps 3",
        ),
        Configuration(
            "dense-small-tp2-sp", "4 layers, hidden 512, sequence 512, tensor and sequence parallel over 2", 2,
            f"{_model(4, 512, 1408, 8, 512, 8192, 4)} {_TP2_SP}", "--all --repeats 3 --warmup 2 --steps 6",
        ),
        Configuration(
            "tp2-sp-500mbit", "2 layers, hidden 1024, sequence 1024, over links of 500 Mbit/s; communication alone", 2,
            f"{_model(2, 1024, 2816, 16, 1024, 32768, 2)} {_TP2_SP}",
            f"--features use_ascend_coc --beside {DENSE} --repeats 3 --warmup 2 --steps 6", 500,
        ),
        Configuration(
            "moe-small", "4 layers, hidden 512, 8 experts, top 2, expert parallel over 2", 2,
            f"{_model(4, 512, 704, 8, 512, 8192, 4)} {_moe(8, 2)}", "--all --repeats 3 --warmup 2 --steps 6",
        ),
        Configuration(
            "long", "2 layers, hidden 1024, sequence 4096", 1,
            _model(2, 1024, 2816, 16, 4096, 32768, 1), "--all --repeats 3 --warmup 1 --steps 3",
        ),
    ),
    # For one device of 80 GB: off keeps every score of the attention, which bounds layers and length.
    "gpu": (
        Configuration(
            "dense", "4 layers, hidden 4096, 8 query groups, sequence 4096, vocabulary 128,256", 1,
            f"{_model(4, 4096, 14336, 32, 4096, 128256, 4)} --group-query-attention --num-query-groups 8",
        ),
        Configuration(
            "experts", "8 layers, hidden 2048, 8 experts, top 2, sequence 4096", 1,
            # At the common rate gradients grow a hundredfold, and rounding with them.
            f"{_model(8, 2048, 1408, 16, 4096, 32768, 4)} {_moe(8, 1)} --lr 1e-5",
        ),
    ),
    # For `--tiny`.
    "tiny": (
        Configuration("dense", "1 layer, hidden 64, sequence 32", 1, _model(1, 64, 128, 2, 32, 128, 1)),
        Configuration(
            "experts", "1 layer, hidden 64, 4 experts, top 2", 1, f"{_model(1, 64, 64, 2, 32, 128, 1)} {_moe(4, 1)}"
        ),
    ),
}  # fmt: skip
