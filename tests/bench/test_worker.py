"""Which features a run of an arm turns on in the parsed arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_lite import runtime
from mindspeed_lite.bench import worker
from mindspeed_lite.bench.plan import Arm


def chosen(arm: Arm, *given: str) -> tuple[set[str], bool]:
    """(features that are on, whether auto is) for a command that turns `given` on itself."""
    options = [option for feature in runtime.catalogue() for option in feature.options]
    args: Any = SimpleNamespace(**{option.dest: option.default for option in options})
    for name in given:
        setattr(args, name, True)
    assert worker._choose(args, SimpleNamespace(arm=arm)) == sorted(given)
    on = {feature.name for feature in runtime.catalogue() if feature.is_enabled(vars(args))}
    return on, bool(getattr(args, runtime.AUTO.dest, False))


@pytest.mark.parametrize("beside", [(), ("use_fused_rmsnorm", "use_fused_swiglu")])
def test_what_is_beside_is_on_in_every_arm(beside: tuple[str, ...]) -> None:
    def on(arm: Arm, *given: str) -> set[str]:
        return chosen(arm, *given)[0]

    assert on(Arm("off", "off", beside=beside), "use_flash_attn") == set(beside)
    only = Arm("x", "only", ("moe_grouped_gemm",), beside=beside)
    assert on(only, "use_flash_attn") == {"moe_grouped_gemm", *beside}
    assert on(Arm("as given", "given", beside=beside), "use_flash_attn") == {"use_flash_attn", *beside}
    assert chosen(Arm("all", "all", beside=beside)) == (set(beside), True)
