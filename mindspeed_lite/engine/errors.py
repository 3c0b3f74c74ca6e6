"""Every way the engine refuses; when one of these is raised, nothing has been changed."""

from __future__ import annotations


class EngineError(Exception):
    """Root of all errors of the engine."""


class OptionError(EngineError, ValueError):
    """A flag carries a value it cannot have."""


class TargetError(EngineError, ValueError):
    """A target does not lead to an attribute that may be patched."""


class FingerprintError(EngineError):
    """A target has no definition in the source at hand."""


class CatalogueError(EngineError):
    """The folder of features contradicts itself."""


class PlanError(EngineError):
    """The features asked for cannot be put in place."""


class ConflictError(PlanError):
    """Two features exclude each other."""


class RequirementError(PlanError):
    """A feature needs another one that is off."""


class ApplyError(EngineError):
    """A patch could not be applied, that of `feature`; nothing has been changed."""

    def __init__(self, text: str, feature: str = "") -> None:
        super().__init__(text)
        self.feature = feature


class FallbackError(EngineError):
    """A feature fell back although fallbacks are forbidden."""


class VerifyError(EngineError):
    """A replaced operator is further from the original than its class allows, which strict mode forbids."""
