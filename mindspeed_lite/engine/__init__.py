"""Swaps attributes of a host package by declaration; every swap can be undone.

Order: feature (declarations, catalogue), options (parser), plan, fingerprints and source (verified releases), target
(owner and attribute), swaps (all or none), session (for running patches), report.
"""

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
from .feature import Catalogue as Catalogue
from .feature import Context as Context
from .feature import Feature as Feature
from .feature import Function as Function
from .feature import Option as Option
from .feature import Override as Override
from .feature import PartialArguments as PartialArguments
from .feature import Patch as Patch
from .feature import Provide as Provide
from .feature import Relation as Relation
from .feature import Settings as Settings
from .feature import given_flags as given_flags
from .feature import matches as matches
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
