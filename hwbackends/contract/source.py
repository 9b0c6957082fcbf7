"""A definition as its source says it, for judges that import nothing: the same `Definition` that `inspect` gives of the
imported function, as far as one file tells."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from inspect import Parameter
from typing import Any

from hwbackends.contract.signatures import SPECIAL, Definition, Parameters, Unknown

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

_MARKS = frozenset({"hookimpl", "hookspec"})
_TRANSPARENT = frozenset({*_MARKS, "wraps", "staticmethod", "override", "final"})
"""Decorators that leave the parameters as they are."""
_CATCHING = frozenset({"no_grad", "inference_mode", "enable_grad", "set_grad_enabled", "contextmanager", "compile"})
"""Decorators of well-known libraries whose wrapper takes `*args, **kwargs`."""
_UNREADABLE = frozenset({"lru_cache", "cache"})
"""Decorators that put an object without a Python signature in the function's place."""
_ANYTHING = (Parameter("args", Parameter.VAR_POSITIONAL), Parameter("kwargs", Parameter.VAR_KEYWORD))


def described(function: Function, module: ast.Module, path: str, skip: int = 0) -> Definition:
    """The definition at `function`, a node of `module`; the first `skip` positional parameters are the receiver's."""
    line = f"{path}:{function.lineno}"
    found = _Reader(module).definition(function)
    parameters = found.parameters[skip:]
    bare = inspect.Signature([p.replace(annotation=Parameter.empty) for p in parameters])
    text = f"def {getattr(function, 'name', '<lambda>')}{bare}"
    return replace(found, parameters=parameters, location=line, text=text)


def bound(definition: Definition, npos: int, keywords: tuple[str, ...]) -> Definition:
    """What `functools.partial` leaves of a definition: `npos` positions filled, and these names given a value."""
    rest = definition.parameters[npos:]
    named = next((i for i, p in enumerate(rest) if p.name in keywords), len(rest))
    later = [_filled(p, p.name in keywords) for p in rest[named:] if p.kind is not Parameter.VAR_POSITIONAL]
    return replace(definition, parameters=(*rest[:named], *later))


def _filled(parameter: Parameter, given: bool) -> Parameter:
    if parameter.kind is Parameter.VAR_KEYWORD:
        return parameter
    default = Unknown("...") if given else parameter.default
    return parameter.replace(kind=Parameter.KEYWORD_ONLY, default=default)


class _Reader:
    def __init__(self, module: ast.Module) -> None:
        self.functions = {n.name: n for n in module.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
        self.constants = {
            target.id: node.value
            for node in module.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    def definition(self, function: Function) -> Definition:
        """With its decorators, innermost first, as far as they are known."""
        fault = SPECIAL if _is_special(function) else ""
        found = Definition(self._parameters(function.args), fault)
        for decorator in reversed(getattr(function, "decorator_list", [])):
            found = self._decorated(found, decorator)
        return found

    def _decorated(self, found: Definition, decorator: ast.expr) -> Definition:
        name = _name(decorator)
        if name in _TRANSPARENT:
            return found
        if name in _CATCHING:
            return Definition(_ANYTHING, found.fault)
        if name in _UNREADABLE:
            return Definition((), "has no readable signature (a cache stands in its place)")
        inner = self._wrapper(decorator)
        return found if inner is None else self.definition(inner)

    def _wrapper(self, decorator: ast.expr) -> Function | None:
        """The function that a decorator of this module puts in place of what it gets; None where it is the same one."""
        function: Function | None = self.functions.get(_name(decorator))
        if function is not None and isinstance(decorator, ast.Call):  # @decorator(options)
            function = _returned(function)
        return None if function is None else _returned(function)

    def _parameters(self, arguments: ast.arguments) -> Parameters:
        positional = [*arguments.posonlyargs, *arguments.args]
        missing = len(positional) - len(arguments.defaults)
        defaults = [None] * missing + list(arguments.defaults)
        found = []
        for index, (argument, default) in enumerate(zip(positional, defaults, strict=True)):
            only = index < len(arguments.posonlyargs)
            kind = Parameter.POSITIONAL_ONLY if only else Parameter.POSITIONAL_OR_KEYWORD
            found.append(Parameter(argument.arg, kind, default=self._value(default)))
        if arguments.vararg:
            found.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            found.append(Parameter(argument.arg, Parameter.KEYWORD_ONLY, default=self._value(default)))
        if arguments.kwarg:
            found.append(Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD))
        return tuple(found)

    def _value(self, node: ast.expr | None, depth: int = 3) -> Any:
        """A default: a literal, or the module's constant of that name."""
        if node is None:
            return Parameter.empty
        if isinstance(node, ast.Name) and node.id in self.constants and depth:
            return self._value(self.constants[node.id], depth - 1)
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return Unknown(ast.unparse(node))


@dataclass(frozen=True, slots=True)
class Marked:
    """A name that a plugin's module binds: the hook it stands for, whether `hookimpl` marks it, and its function."""

    hook: str
    line: int
    marked: bool
    function: Function | None = None
    value: ast.expr | None = None


def bindings(module: ast.Module) -> Iterator[Marked]:
    """Functions and assignments of a module, those under `if` and `try` too."""
    pending: list[ast.stmt] = list(module.body)
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            mark = next((d for d in node.decorator_list if _name(d) == "hookimpl"), None)
            yield Marked(_specname(mark) or node.name, node.lineno, mark is not None, node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    marked = isinstance(node.value, ast.Call) and _name(node.value.func) == "hookimpl"
                    yield Marked(target.id, node.lineno, marked, value=node.value)
        elif not isinstance(node, ast.ClassDef):
            pending += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            pending += [s for handler in getattr(node, "handlers", ()) for s in handler.body]


def _specname(mark: ast.expr | None) -> str:
    """`clear_slots` of `hookimpl(specname="clear_slots")`."""
    for keyword in mark.keywords if isinstance(mark, ast.Call) else ():
        if keyword.arg == "specname" and isinstance(keyword.value, ast.Constant):
            return str(keyword.value.value)
    return ""


def node_at(module: ast.Module, line: int, name: str) -> Function | None:
    """The function of this name whose definition stands on this line; a lambda where the name says so."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.lineno, node.name) == (line, name):
            return node
        if isinstance(node, ast.Lambda) and (node.lineno, "<lambda>") == (line, name):
            return node
    return None


def _name(decorator: ast.expr) -> str:
    """`no_grad` of `torch.no_grad()`."""
    if isinstance(decorator, ast.Call):
        return _name(decorator.func)
    if isinstance(decorator, ast.Attribute):
        return decorator.attr
    return decorator.id if isinstance(decorator, ast.Name) else ""


def _returned(function: Function) -> Function | None:
    """The inner function that a decorator returns."""
    if isinstance(function, ast.Lambda):
        return function.body if isinstance(function.body, ast.Lambda) else None
    inner = {n.name: n for n in function.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in function.body:
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Lambda):
            return node.value
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Name):
            return inner.get(node.value.id)
    return None


def _is_special(function: Function) -> bool:
    """A coroutine, or a function whose own body yields."""
    return isinstance(function, ast.AsyncFunctionDef) or any(
        isinstance(node, ast.Yield | ast.YieldFrom) for node in _own(function)
    )


def _own(function: Function) -> Iterator[ast.AST]:
    """Nodes of a body without those of functions and classes inside it."""
    pending: list[ast.AST] = [function.body] if isinstance(function, ast.Lambda) else list(function.body)
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            pending += ast.iter_child_nodes(node)
