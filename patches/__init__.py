"""What is swapped in Megatron, one feature a file; the only room that speaks Megatron.

What has a leading underscore is no feature: `_shared` holds what several features need, and where flags come in.
"""

if __name__ != "mindspeed_lite.patches":
    raise ImportError(
        f"Import this package as mindspeed_lite.patches, not as {__name__!r}: a second copy would have a catalogue "
        "of its own."
    )
