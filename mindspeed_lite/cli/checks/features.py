"""Which features would apply, by the device and the source of Megatron."""

from __future__ import annotations

from typing import Any

from . import found
from .row import Row, note, ok


def check_features() -> list[Row]:
    """Which features would apply, as far as that shows before the model's arguments are known."""
    if found.torch()[0] is None:
        return [note("features", "cannot be read without torch", "see torch")]
    from mindspeed_lite import runtime
    from mindspeed_lite.engine import Context, Settings

    host, device = found.host(), found.device_name()
    options = (*runtime.GENERAL, *runtime.catalogue().options())
    versions = {"megatron-core": host.version if host is not None else "not found"}
    context = Context(Settings.of(options, {}), device, versions)
    applying, rows = [], []
    for feature in runtime.catalogue():
        reasons = list(feature.condition(context)) if feature.condition is not None else []
        reasons += _drift(feature, host)
        if reasons:
            rows.append(note(f"feature {feature.name}", f"would not apply: {'; '.join(reasons)}"))
            continue
        by = [f"{name}:{_backend(name, device)}" for name in feature.operators]
        applying.append(feature.name + (f" ({', '.join(by)})" if by else ""))
    text = f"{len(applying)} of {len(runtime.catalogue())} would apply on {device}, by what is known without "
    text += "the model's arguments"
    return [ok("features", f"{text}: {', '.join(applying)}" if applying else text), *rows]


def _backend(operator: str, device: str) -> str:
    from mindspeed_lite.ops import dispatch

    if device == "npu":  # asked where torch_npu may be imported
        return str(found.npu().facts["backends"][operator][0])
    return dispatch.selected(operator, device).backend


def _drift(feature: Any, host: found.Host | None) -> list[str]:
    """What of the feature's targets is not as it was verified, read from source."""
    from mindspeed_lite import runtime
    from mindspeed_lite.engine import FingerprintError
    from mindspeed_lite.engine.fingerprints import fingerprinted
    from mindspeed_lite.engine.source import fingerprint, reader_of

    if host is None:
        return []
    patches: list[Any]
    reasons: list[str]
    patches, reasons = feature.patches_for(host.version)
    known = runtime.fingerprints()
    for patch, target in fingerprinted(patches):
        try:
            live = fingerprint(reader_of(host.core.parent.parent), target)
        except (FingerprintError, SyntaxError, OSError):
            if not known.may_lack(patch, target):
                reasons.append(f"{target} is not found")
            continue
        objection = known.compare(patch, live, target)[1]
        if objection:
            reasons.append(f"{target} {objection}")
    return reasons
