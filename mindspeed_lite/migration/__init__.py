"""Migration from MindSpeed: translates its flags by `flags.tsv`; standard library only."""

from .shell import Script, read_script
from .suggest import unrecognized
from .table import FlagRow, flags
from .translate import TranslatedFlag, Translation, translate

__all__ = ["FlagRow", "Script", "TranslatedFlag", "Translation", "flags", "read_script", "translate", "unrecognized"]
