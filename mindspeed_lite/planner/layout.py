"""Reads `--pipeline-model-parallel-layout`.

`E` is the embedding, `t` a transformer layer, `m` an MTP layer, `L` the loss; `|` ends a stage, commas are ignored,
`*n` repeats a letter or parentheses.
"""

from __future__ import annotations

import re

from .training import MOST_ENTRIES, ArgumentError, TrainingConfig

FLAG = "--pipeline-model-parallel-layout"
_ALONE = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def parts(text: str) -> list[str]:
    """Letters of each model chunk, in execution order."""
    written = text.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d{1,5})", r"(.)\*(\d{1,5})"):
        written = re.sub(repeated, _repeat, written)
    return written.split("|")


def _repeat(found: re.Match[str]) -> str:
    if len(found[1]) * int(found[2]) > MOST_ENTRIES:
        raise ArgumentError(f"{FLAG}: {found[0][:40]!r} is more than {MOST_ENTRIES:,} layers, which are not predicted")
    return found[1] * int(found[2])


def read(training: TrainingConfig) -> int:
    """Check the layout and return chunks per stage; raises ArgumentError."""
    text = training.pipeline_model_parallel_layout
    found = parts(text)
    letters = "".join(found)
    unknown = sorted(set(letters) - set("EtmL"))
    if unknown:
        raise ArgumentError(f"{FLAG} {text}: {unknown[0]!r} is none of E, t, m and L, | and *n: write it with these")
    if len(found) % training.pp:
        raise ArgumentError(
            f"{FLAG} {text} has {len(found)} parts, which --pipeline-model-parallel-size {training.pp} does not "
            "divide: change one of them"
        )
    for name in _ALONE:
        if getattr(training, name) not in (0, None, False):
            raise ArgumentError(f"{FLAG} says what each stage holds: leave --{name.replace('_', '-')} out")
    if not found[0].startswith("E") or not letters.endswith("L") or (letters.count("E"), letters.count("L")) != (1, 1):
        raise ArgumentError(f"{FLAG} {text}: one E is the first letter and one L the last: change it")
    for letter, flag, count in (
        ("t", "--num-layers", training.num_layers),
        ("m", "--mtp-num-layers", training.mtp_num_layers),
    ):
        if letters.count(letter) != count:
            raise ArgumentError(
                f"{FLAG} {text} has {letters.count(letter)} letters {letter} for {flag} {count}: change one of them"
            )
    further = "m" * training.mtp_num_layers
    if further and not any(further in each for each in found[-training.pp :]):
        raise ArgumentError(f"{FLAG} {text}: all letters m are in one part, one of the last of each stage: change it")
    if "m" in letters and "t" in letters[letters.index("m") :]:
        raise ArgumentError(f"{FLAG} {text}: every t is before m: change it")
    return len(found) // training.pp
