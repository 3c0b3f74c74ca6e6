"""Swaps attributes of a package that it does not own, by declaration, and takes every swap back.

The package being patched is called the host; nothing here knows which one it is. In reading order:

feature.py       the language patches are written in: Feature, Option, Around, Override, Provide
target.py        "pkg.mod:Class.attr" -> the class or module that defines it, and what it holds there
source.py        what a target looks like in source and as loaded
fingerprints.py  what it looks like in each verified release; the judgement on the one here
plan.py          features + settings + versions -> what is applied, and why the rest is not
swaps.py         all patches of a change or none; in and out in any order
session.py       what a running patch may ask for
report.py        what was swapped, what not and why, as data, JSON and text
catalogue.py     finds the features of a package
options.py       their flags in the host's argument parser
hooks.py         waits for a module to be imported
errors.py        every way to refuse
"""

from .catalogue import Catalogue as Catalogue
from .errors import ApplyError as ApplyError
from .errors import CatalogueError as CatalogueError
from .errors import ConflictError as ConflictError
from .errors import EngineError as EngineError
from .errors import FallbackError as FallbackError
from .errors import FingerprintError as FingerprintError
from .errors import OptionError as OptionError
from .errors import PlanError as PlanError
from .errors import RequirementError as RequirementError
from .errors import TargetError as TargetError
from .errors import VerifyError as VerifyError
from .feature import Around as Around
from .feature import Context as Context
from .feature import Feature as Feature
from .feature import Option as Option
from .feature import Override as Override
from .feature import Patch as Patch
from .feature import Provide as Provide
from .feature import Relation as Relation
from .feature import Settings as Settings
from .feature import matches as matches
from .hooks import ImportHandle as ImportHandle
from .hooks import when_imported as when_imported
from .options import Collision as Collision
from .options import add_arguments as add_arguments
from .options import given_options as given_options
from .plan import Outcome as Outcome
from .plan import Plan as Plan
from .plan import PlannedPatch as PlannedPatch
from .plan import automatic_reasons as automatic_reasons
from .plan import make_plan as make_plan
from .report import Entry as Entry
from .report import Fallback as Fallback
from .report import PatchEntry as PatchEntry
from .report import Report as Report
from .report import Verification as Verification
from .session import Session as Session
from .swaps import Swap as Swap
from .swaps import change as change
from .target import Target as Target
from .target import resolve as resolve
