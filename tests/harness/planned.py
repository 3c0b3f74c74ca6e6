"""Reads, on import, what every plan compares Megatron with, so that forked processes find it in the caches.

A plan parses the sources of all targets and looks through the code of their classes, which takes longer than a short
training. The reading imports the modules of the targets and changes nothing in them.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace

from mindspeed_lite import runtime, startup
from mindspeed_lite.engine import Context, EngineError, Settings, make_plan
from mindspeed_lite.engine.fingerprints import Table
from mindspeed_lite.platform import megatron


def _read() -> None:
    context = Context(Settings.of(runtime.catalogue().options(), {}), "cpu", {})
    version = megatron.version()
    assert version is not None
    for features, table in ((runtime.catalogue(), runtime.fingerprints()), (megatron.ASSUMPTIONS, megatron._known())):
        for each in features:
            alone = replace(
                each,
                requires=(),
                conflicts=(),
                condition=None,
                conflicting_args={},
                enabled=lambda settings: True,
                arguments=None,
            )
            with contextlib.suppress(EngineError):
                make_plan([alone], context, host_version=version, fingerprints=table)
    for patch in (each for feature in startup._features(startup._CommandLine()) for each in feature.patches):
        if patch.target.partition(":")[0] in sys.modules:
            hook = megatron.without_flag("hook", "features by flag", patch)
            make_plan([hook], context, host_version=version, fingerprints=Table(), allow_unverified=True)


_read()
