"""Every error that hwbackends raises on purpose. A message says which hook, which parameter, what it got, what it
wants and what to do; code that catches by kind uses the subclasses. Nothing here imports torch."""

from __future__ import annotations


class HwBackendsError(Exception):
    """Base of all named errors."""


class ArgumentError(HwBackendsError, ValueError):
    """A hook was called with an argument that the contract does not allow.

    Args:
        hook: contract name of the hook, or of the object that checks (`StatePool`, `ConvStateSidecar`).
        parameter: name of the offending parameter, as in the contract.
        got: what was passed, in words.
        wanted: what the contract asks for.
        hint: what the caller can do about it.

    Attributes:
        rule: name of the rule that was broken, as docs/checks.md lists it; empty where no rule stands behind the error.
    """

    rule: str = ""

    def __init__(self, hook: str, parameter: str, got: object, wanted: str, hint: str = "") -> None:
        self.hook, self.parameter, self.got, self.wanted, self.hint = hook, parameter, got, wanted, hint
        tail = f"; {hint}" if hint else ""
        super().__init__(f"{hook}: {parameter}: got {got}, wanted {wanted}{tail}")

    def __reduce__(self) -> tuple[type, tuple[str, str, object, str, str]]:
        return type(self), (self.hook, self.parameter, str(self.got), self.wanted, self.hint)


class MissingArgumentError(ArgumentError):
    """A parameter that this call needs was left out."""


class ShapeError(ArgumentError):
    """A tensor has the wrong number of dimensions or the wrong extent."""


class DtypeError(ArgumentError):
    """A tensor has a dtype, or a pair of tensors has dtypes, that the hook does not take."""


class DeviceError(ArgumentError):
    """A tensor lies on another device than the pool, or the device is not there."""


class StrideError(ArgumentError):
    """A tensor has a memory layout that the hook does not take."""


class OverlapError(ArgumentError):
    """Memory that a hook writes belongs to another of its arguments as well."""


class WidthError(ArgumentError):
    """The weights' width is not the width that the state pool was made for."""


class SlotError(ArgumentError):
    """A slot or request row is out of range, reserved, foreign, duplicated, or freed twice."""


class OutOfSlotsError(SlotError):
    """More slots were asked for than are free; nothing was allocated."""


class TreeDraftsError(ArgumentError):
    """More than one draft per position: a conv state follows one chain of tokens only."""


class UnsupportedError(ArgumentError):
    """A setting that this backend, model or version does not support."""


class GraphError(HwBackendsError):
    """A rule for captured graphs was broken: a limit, a moved address, a buffer that would grow after capture."""


class GraphLimitError(GraphError, ArgumentError):
    """A batch, token or draft count beyond the limits that the graph-static buffers were made for."""


class SyncError(GraphError):
    """A host synchronisation where the contract forbids one."""


class AllocationError(GraphError):
    """A device allocation where the contract forbids one."""


class RequestError(HwBackendsError, RuntimeError):
    """A request of a runner failed and gives no more tokens; others are not touched.

    Args:
        request_id: the request's.
        reason: what went wrong, an exception or words.
        tokens: how many tokens it had been given.
    """

    def __init__(self, request_id: int, reason: object, tokens: int) -> None:
        self.request_id, self.reason, self.tokens = request_id, reason, tokens
        words = f"{type(reason).__name__}: {reason}" if isinstance(reason, BaseException) else str(reason)
        super().__init__(f"request {request_id} failed after {tokens} tokens: {words}; add it again")

    def __reduce__(self) -> tuple[type, tuple[int, str, int]]:
        return type(self), (self.request_id, str(self.reason), self.tokens)


class ContractError(HwBackendsError):
    """A contract file is malformed; the message gives file, line and path inside the document."""


class MissingPackageError(HwBackendsError, ImportError):
    """Something was asked for that needs a package which is not installed.

    Args:
        wanted_by: what needs it, in words.
        package: the package that could not be imported.
        extra: extra of hwbackends that brings it, if one does.
    """

    def __init__(self, wanted_by: str, package: str, extra: str = "") -> None:
        self.wanted_by, self.package, self.extra = wanted_by, package, extra
        way = f"pip install 'hwbackends[{extra}]'" if extra else f"pip install {package}"
        super().__init__(f"{wanted_by}: package {package!r} is not installed; install it with: {way}")

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.wanted_by, self.package, self.extra)


class PluginError(HwBackendsError):
    """A backend plugin cannot be used."""


class BackendNotFoundError(PluginError, LookupError):
    """No such backend, or none that fits."""


class BackendUnavailableError(PluginError):
    """The backend exists but its probe says that it cannot run here."""


class BackendTieError(PluginError):
    """Several backends fit equally well; the message lists them and says how to choose."""


class BrokenPluginError(PluginError):
    """Importing the plugin failed; the original error is the cause."""


class IncompatiblePluginError(PluginError):
    """The plugin was written for another contract version."""


class SignatureDriftError(PluginError):
    """A hook implementation cannot accept what the contract passes."""


class HookNotImplementedError(PluginError, NotImplementedError):
    """The backend does not have this hook."""
