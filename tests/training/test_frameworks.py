"""The plugin of `examples/frameworks`, as a framework imports it: before megatron.core, and after."""

from __future__ import annotations

import pytest

from tests.harness.checkouts import ROOT
from tests.harness.commands import python

PLUGIN = "import mindspeed_lite, mindspeed_lite_plugin as plugin"
CORE = "import megatron.core"


@pytest.mark.parametrize("order", [f"{PLUGIN}; assert mindspeed_lite.report() is None; {CORE}", f"{CORE}; {PLUGIN}"])
def test_features_are_on_once_megatron_is_there(order: str) -> None:
    names = "sorted(each.feature for each in mindspeed_lite.report().entries if each.status == 'applied')"
    path = f"import sys; sys.path.insert(0, {str(ROOT / 'examples' / 'frameworks')!r}); "
    found = python("-c", f"{path}{order}; print({names}, sorted(plugin.FEATURES))")
    assert found.returncode == 0, found.stderr
    assert all(found.stdout.count(f"'{name}'") == 2 for name in ("use_flash_attn", "use_fused_adamw"))
