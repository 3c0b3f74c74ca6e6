"""On import, computes once what forked processes would compute each: plans, help of flags, imports of operators.

A plan parses the sources of all targets and looks through the code of their classes, which takes longer than a short
training. The reading imports the modules of the targets; of Megatron only a cache for the help of flags is changed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import sys
from dataclasses import replace

from mindspeed_lite import runtime, startup
from mindspeed_lite.engine import Context, EngineError, Settings, make_plan
from mindspeed_lite.engine.fingerprints import Table
from mindspeed_lite.ops import discovery, dispatch
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
    for name in discovery.OPERATORS:
        if "cpu" in (backends := dispatch.operator(name).backends):
            importlib.import_module(backends["cpu"])
    with contextlib.suppress(ImportError):
        importlib.import_module("megatron.core.models.mimo.optimizer")  # as making an optimizer does


def _remember_help() -> None:
    """Cache the help of Megatron's flags, for which it parses the sources of its configurations with every parser."""
    arguments, utils = (sys.modules.get(f"megatron.training.{name}") for name in ("arguments", "argument_utils"))
    if arguments is not None and utils is not None:
        factory, own = utils.ArgumentGroupFactory, utils.ArgumentGroupFactory._get_field_docstrings
        known = functools.cache(lambda kind: own(factory.__new__(factory), kind))
        factory._get_field_docstrings = lambda self, kind: known(kind)
        arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


_read()
_remember_help()
