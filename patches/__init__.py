"""What is swapped in Megatron, one feature a file; the only room that speaks Megatron.

Modules with a leading underscore are not features: they hold what features share or where flags come in.
"""

if __name__ != "mindspeed_lite.patches":
    raise ImportError(
        f"Import this package as mindspeed_lite.patches, not as {__name__!r}: a second copy would have a catalogue "
        "of its own."
    )
