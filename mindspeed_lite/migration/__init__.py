"""Coming from MindSpeed: what becomes of each of its flags, in a command line, in a launch script and in a report.

Knows the standard library only: words in, words out. The table is `flags.tsv`.
"""

from .shell import Script, read_script
from .suggest import unrecognized
from .table import FlagRow, flags
from .translate import TranslatedFlag, Translation, translate

__all__ = ["FlagRow", "Script", "TranslatedFlag", "Translation", "flags", "read_script", "translate", "unrecognized"]
