"""Patches of Megatron, one feature per module; `_shared` holds what several features use."""

if __name__ != "mindspeed_lite.patches":
    raise ImportError(
        f"Import this package as mindspeed_lite.patches, not as {__name__!r}: a second copy would have a catalogue "
        "of its own."
    )
