"""Flags of Megatron's layers that only a trace reads: fields of its own configuration classes."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from pathlib import Path

# Beginnings of fields that change no storage, or only with Transformer Engine or on a GPU, or that count layers.
_NOT_TRACED = (
    "te_", "use_te_", "fp8", "fp4", "cuda_graph", "inference_", "cross_entropy_fusion_impl", "moe_flex_",
    "moe_hybridep_", "moe_deepep_", "init_method", "embedding_init_method", "layernorm_epsilon", "moe_z_loss",
    "persist_layer_norm", "deterministic_mode", "clone_scatter", "no_rope_freq", "num_layers_at_", "first_last_layers",
    "init_model_with_meta_device",
)  # fmt: skip


def sources() -> list[Path]:
    """Folders of Megatron's package: a checkout in the current folder comes first."""
    spec = importlib.util.find_spec("megatron")
    return [Path("megatron").resolve(), *map(Path, (spec.submodule_search_locations or ()) if spec else ())]


def is_of_layers(flag: str) -> bool:
    name = flag.removeprefix("--").replace("-", "_")
    name = name if name in _fields() else re.sub("^(no|disable|enable)_", "", name)
    return name in _fields() and not name.startswith(_NOT_TRACED)


@functools.cache
def _fields() -> set[str]:
    """Empty without Megatron."""
    files = [folder / "core" / "transformer" / "transformer_config.py" for folder in sources()]
    text = next((each.read_text() for each in files if each.is_file()), "")
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    targets = [field.target for node in classes for field in node.body if isinstance(field, ast.AnnAssign)]
    return {target.id for target in targets if isinstance(target, ast.Name)}
