"""Swaps attributes of another package, the host, by declaration, and undoes every swap. The way of a flag:

catalogue.py     finds the features of a package
feature.py       what a feature declares: Feature, Option, Around, Override, Provide; the Settings read from flags
options.py       its flags in the host's argument parser
plan.py          settings + host -> which features apply, and why the others do not
fingerprints.py  compares a target with the verified releases; source.py reads it
target.py        "pkg.mod:Class.attr" -> its owner and its raw attribute
swaps.py         applies all patches of a plan or none; removes them in any order
session.py       what a running patch may use
report.py        what was swapped, what not and why, as data, JSON and text
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
from .plan import FeatureOutcome as FeatureOutcome
from .plan import Plan as Plan
from .plan import automatic_reasons as automatic_reasons
from .plan import make_plan as make_plan
from .report import Entry as Entry
from .report import Report as Report
from .report import Verification as Verification
from .session import Session as Session
from .swaps import Swap as Swap
from .swaps import change as change
from .target import resolve as resolve
