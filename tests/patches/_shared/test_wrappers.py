"""Code around a method, and switches that a feature turns off when it ends."""

from __future__ import annotations

import copy
import gc
import types

from mindspeed_lite.engine import Context, Report, Session, Settings
from mindspeed_lite.patches._shared.wrappers import config_field, switch_off


class Configuration:
    fused = True


def session():
    context = Context(Settings({}), "cpu", {})
    return Session(context.settings, context, Report({}, "cpu"))


def test_a_switch_goes_off_with_the_feature_unless_megatron_has_the_form_itself():
    for is_there in (False, True):
        layer, own = Configuration(), session()
        switch_off(layer, "fused", own, lambda is_there=is_there: is_there)
        assert layer.fused is True
        assert own.end() == [] and layer.fused is is_there


def test_what_is_off_or_gone_is_left_alone():
    layer, own = Configuration(), session()
    layer.fused = False
    switch_off(layer, "fused", own, lambda: False)
    switch_off(Configuration(), "fused", own, lambda: False)
    gc.collect()
    assert own.end() == [] and vars(layer) == {"fused": False}


def test_every_configuration_a_module_is_built_with_is_followed_once():
    own, built = session(), []
    make = config_field("fused", lambda: False).make(lambda self, config: built.append(config), own)
    config = Configuration()
    other = copy.copy(config)
    for each in (config, other, config):
        make(types.SimpleNamespace(), each)
    assert built == [config, other, config] and len(own._ends) == 2
    own.end()
    assert config.fused is other.fused is False
