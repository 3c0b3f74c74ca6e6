"""`examples/pretrain_gpt.py` with a model of the kind that the variable FROZEN names."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import mindspeed_lite.megatron_adaptor  # noqa: F401  # isort: skip

from megatron.core.models.gpt import gpt_model

from tests.harness import frozen

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"
_build = gpt_model.GPTModel.__init__


def _build_frozen(self: Any, *args: Any, **kwargs: Any) -> None:
    _build(self, *args, **kwargs)
    frozen.freeze(self, os.environ["FROZEN"])


gpt_model.GPTModel.__init__ = _build_frozen
runpy.run_path(str(SCRIPT), run_name="__main__")
