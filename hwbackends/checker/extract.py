"""One parsed file to its facts (``model.FileFacts``): scopes, bindings, guards and calls. Nothing across files."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterable
from typing import Any

from . import keywords
from .model import DISPLAY, Assignment, Expr, FileFacts, Guard, Scope, Signature

_IGNORE = re.compile(rb"#\s*hwbackends:\s*ignore(?:\[([A-Za-z0-9_.:,\s-]*)\])?")
_GENERATED = re.compile(rb"(?i)\bgenerated\b[^.]{0,80}?\bfrom\b[\s#*'\"`:<]*([\w./\\-]+\.py)\b")
_HEAD = 4096
_TYPE_ERRORS = frozenset({"TypeError", "Exception", "BaseException"})
# What a test wraps around a call that is meant to fail.
_EXPECTS = frozenset({"raises", "assertRaises", "assertRaisesRegex", "suppress", "assert_raises"})
# Marks of a test that is meant to fail, or that never runs.
_FAILING = frozenset({"xfail", "XFAIL", "expectedFailure", "skip", "SKIP"})
_OVERLOADS = frozenset({"overload"})
_MAX_DEPTH = 12
_CONSTANTS = (bool, int, float, type(None))
# Methods of strings, containers and tensors, and builtins: most calls of a tree, and never what a check is about.
_COMMON_METHODS = frozenset(
    [
        "append",
        "extend",
        "items",
        "keys",
        "values",
        "split",
        "strip",
        "join",
        "startswith",
        "endswith",
        "encode",
        "decode",
        "lower",
        "upper",
        "isdigit",
        "numpy",
        "tolist",
        "item",
        "unsqueeze",
        "squeeze",
        "view",
        "reshape",
        "permute",
        "transpose",
        "contiguous",
    ]
)
_BUILTINS = frozenset(
    [
        "len",
        "print",
        "range",
        "str",
        "int",
        "float",
        "isinstance",
        "issubclass",
        "hasattr",
        "getattr",
        "setattr",
        "min",
        "max",
        "sum",
        "abs",
        "tuple",
        "list",
        "dict",
        "set",
        "frozenset",
        "sorted",
        "enumerate",
        "zip",
        "bool",
        "id",
        "repr",
        "type",
        "ValueError",
        "RuntimeError",
        "TypeError",
        "KeyError",
        "NotImplementedError",
        "AssertionError",
        "Exception",
    ]
)


class Extractor:
    """Walks one tree once. Use :func:`extract`."""

    def __init__(self, external: Callable[[str], bool]) -> None:
        self.scopes: list[Scope] = []
        self.calls: list[tuple[Any, ...]] = []
        self.guards: list[Guard] = []
        self.patches: list[Assignment] = []
        self.external = external
        self.scope = 0
        self.guard = -1
        self.lambdas: dict[int, int] = {}
        self.reads: list[set[str]] = [set()]
        self.edits: list[set[str]] = [set()]
        self.popped: list[dict[str, set[str]]] = [{}]
        self.globals: list[frozenset[str]] = [frozenset()]
        self.external_names: set[str] = set()  # imported, and always from outside the trees
        self.own_names: set[str] = set()  # imported from the trees
        self._seen: dict[Expr, Expr] = {}
        self.function = -1
        self.klass: list[int] = []
        self.self_name: list[str | None] = [None]
        self.handed_on: list[list[tuple[int, ast.Call, str]]] = [[]]  # calls with **name: number, node, name
        self.added_under: dict[int, int] = {}  # the guards of lines that may add a key to a dict
        self.made: list[set[str]] = [set()]  # names for what a __new__ makes of its own class
        self._stmt = self._statement_handlers()
        self._walk = self._expression_handlers()

    def _statement_handlers(self) -> dict[type, Callable[[Any], None]]:
        handlers: dict[type, Callable[[Any], None]] = {
            ast.FunctionDef: self._function,
            ast.AsyncFunctionDef: self._function,
            ast.ClassDef: self._class,
            ast.Assign: self._assign,
            ast.AnnAssign: self._ann_assign,
            ast.AugAssign: self._aug_assign,
            ast.Import: self._import,
            ast.ImportFrom: self._import_from,
            ast.If: self._if,
            ast.For: self._for,
            ast.AsyncFor: self._for,
            ast.While: self._while,
            ast.With: self._with,
            ast.AsyncWith: self._with,
            ast.Try: self._try,
            ast.Return: self._return,
            ast.Expr: self._expr_statement,
            ast.Assert: self._assert,
            ast.Global: self._global,
            ast.Nonlocal: self._ignore,
            ast.Delete: self._delete,
            ast.Pass: self._ignore,
            ast.Break: self._ignore,
            ast.Continue: self._ignore,
        }
        if hasattr(ast, "TryStar"):
            handlers[ast.TryStar] = self._try
        return handlers

    def _expression_handlers(self) -> dict[type, Callable[[Any], None] | None]:
        return {
            ast.Constant: None,
            ast.Name: self._name,
            ast.Attribute: self._attribute,
            ast.Subscript: self._subscript,
            ast.BinOp: self._binary,
            ast.Compare: self._compare,
            ast.Tuple: self._elements,
            ast.List: self._elements,
            ast.Call: self._call,
            ast.Lambda: self._lambda,
            ast.IfExp: self._ifexp,
            ast.BoolOp: self._boolop,
            ast.NamedExpr: self._named,
            ast.Yield: self._yield,
            ast.YieldFrom: self._yield,
            ast.ListComp: self._comprehension,
            ast.SetComp: self._comprehension,
            ast.GeneratorExp: self._comprehension,
            ast.DictComp: self._comprehension,
        }

    # -- scopes -------------------------------------------------------------------------------------------------

    def module(self, tree: ast.Module) -> None:
        self.scopes.append(Scope("m", "", "", -1, 1, -1, {}, ()))
        self._body(tree.body)

    def _bind(self, name: str, line: int, value: Expr | None) -> None:
        scope = 0 if name in self.globals[-1] else self.scope
        self.scopes[scope].bindings.setdefault(name, []).append((line, self.guard, value))

    def _qualname(self, name: str) -> str:
        parent = self.scopes[self.scope]
        return f"{parent.qualname}.{name}" if parent.qualname else name

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        decorators = tuple(self.expr(d) for d in node.decorator_list)
        for decorator in node.decorator_list:
            self.walk(decorator)
        self._walk_arguments(node.args)
        overload = any(d is not None and d[-1] in _OVERLOADS for d in decorators)
        index = self._open_function(node, node.name, decorators)
        if not overload:
            self._bind(node.name, node.lineno, ("F", index))
        self._function_body(index, node.args, node.body, any(self._may_fail(d) for d in decorators))

    def _may_fail(self, decorator: Expr | None, depth: int = 0) -> bool:
        """``@pytest.mark.xfail(...)`` and its kin, also by a name that this module has given to one."""
        while decorator is not None and decorator[0] in "ca":
            if decorator[0] == "a" and decorator[2] in _FAILING:
                return True
            decorator = decorator[1]
        if decorator is None or decorator[0] != "n":
            return False
        given = self.scopes[0].bindings.get(decorator[1], ())
        return decorator[1] in _FAILING or (not depth and any(self._may_fail(value, 1) for _, _, value in given))

    def _open_function(self, node: Any, name: str, decorators: tuple[Expr | None, ...]) -> int:
        index = len(self.scopes)
        body = node.body if isinstance(node.body, list) else []
        returns = getattr(node, "returns", None)
        scope = Scope(
            "f", name, self._qualname(name), self.scope, node.lineno, self.guard, {}, decorators,
            signature=_signature(node.args), returns=[],
            return_annotation=self.annotation(returns) if returns is not None else None,
            stub=_is_stub(body), is_async=isinstance(node, ast.AsyncFunctionDef),
            raises=bool(body) and isinstance(body[-1], ast.Raise),
        )  # fmt: skip
        self.scopes.append(scope)
        return index

    def _function_body(
        self, index: int, arguments: ast.arguments, body: list[ast.stmt], may_fail: bool = False, inside: int = -1
    ) -> None:
        saved = self.scope, self.guard, self.function
        in_class = self.scopes[self.scope].kind == "c"
        self.scope, self.guard, self.function = index, -1, index
        self._bind_parameters(arguments)
        self.guard = inside
        if may_fail:
            self._opaque("try-type", self.scopes[index].line, True)
        self.reads.append(set())
        self.edits.append(set())
        self.popped.append({})
        self.globals.append(frozenset())
        self.made.append(set())
        self.handed_on.append([])
        first = (arguments.posonlyargs + arguments.args)[:1]
        self.self_name.append(first[0].arg if in_class and first else (None if in_class else self.self_name[-1]))
        self._body(body)
        self._spell_out(index, body)
        self._close_function(index)
        self.scope, self.guard, self.function = saved

    def _spell_out(self, index: int, body: list[ast.stmt]) -> None:
        """``kw = {"a": 1}``, then ``f(**kw)``: the call passes ``a``."""
        nodes: list[ast.AST] = []
        for number, node, name in self.handed_on.pop():
            bindings = self.scopes[index].bindings.get(name, ())
            if name in self.globals[-1] or not any(_may_write_out(value) for _, _, value in bindings):
                continue  # not worth a look at the whole function
            nodes = nodes or [inner for statement in body for inner in ast.walk(statement)]
            passed = keywords.handed_on(body, nodes, name, node)
            if passed is not None:
                call = self.calls[number]
                given = tuple(dict.fromkeys(call[5] + passed.keys))
                self.calls[number] = (*call[:5], given, call[6], None if passed.complete else "", *call[8:])
                self._spell_out_conditions(self.calls[number], passed.perhaps)

    def _spell_out_conditions(self, call: tuple[Any, ...], perhaps: tuple[tuple[str, int], ...]) -> None:
        """``if flag: kw["b"] = 2``, then ``f(**kw)``: under the flag, the call passes ``b`` too."""
        under: dict[int, list[str]] = {}
        for key, line in perhaps:
            if key not in call[5]:
                under.setdefault(self.added_under.get(line, -1), []).append(key)
        for guard, keys in under.items():
            both = self._both(call[2], guard)
            if both is not None:
                more = tuple(dict.fromkeys((*call[5], *keys)))
                self.calls.append((*call[:2], both, *call[3:5], more, call[6], "", call[8], tuple(keys)))

    def _both(self, guard: int, other: int) -> int | None:
        """A guard that holds where two others do; None where they exclude each other."""
        chain: list[Guard] = []
        while other >= 0:
            chain.append(self.guards[other])
            other = self.guards[other][2]
        known, above = {}, guard
        while above >= 0:
            test, holds, above = self.guards[above]
            known[test] = holds
        for test, holds, _ in reversed(chain):
            if test is not None and known.get(test, holds) != holds:
                return None
            if test is None or test not in known:
                self.guards.append((test, holds, guard))
                guard = len(self.guards) - 1
        return guard

    def _close_function(self, index: int) -> None:
        scope = self.scopes[index]
        signature = scope.signature
        assert signature is not None
        reads, edits, popped = self.reads.pop(), self.edits.pop(), self.popped.pop()
        self.globals.pop()
        self.self_name.pop()
        self.made.pop()
        self.reads[-1] |= reads
        names = [*signature.positional, *signature.kwonly]
        names += [name for name in (signature.vararg, signature.kwarg) if name]
        kwarg = signature.kwarg
        self.scopes[index] = scope._replace(
            unread=tuple(name for name in names if name not in reads),
            kwarg_edited=kwarg is not None and kwarg in edits,
            kwarg_popped=tuple(sorted(popped.get(kwarg, ()))) if kwarg else (),
        )

    def _bind_parameters(self, arguments: ast.arguments) -> None:
        line = self.scopes[self.scope].line
        for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            self._bind(arg.arg, line, ("p", self.annotation(arg.annotation)))
        for variadic in (arguments.vararg, arguments.kwarg):
            if variadic is not None:
                self._bind(variadic.arg, line, None)

    def _walk_arguments(self, arguments: ast.arguments) -> None:
        for default in (*arguments.defaults, *arguments.kw_defaults):
            if default is not None:
                self.walk(default)

    def _lambda(self, node: ast.Lambda) -> None:
        self._lambda_scope(node)

    def _lambda_scope(self, node: ast.Lambda) -> int:
        if id(node) in self.lambdas:
            return self.lambdas[id(node)]
        self._walk_arguments(node.args)
        index = self.lambdas[id(node)] = self._open_function(node, "<lambda>", ())
        body = ast.Return(value=node.body, lineno=node.lineno, col_offset=0)
        self._function_body(index, node.args, [body], inside=self.guard)  # what holds here holds when it is run
        return index

    def _class(self, node: ast.ClassDef) -> None:
        for part in (*node.decorator_list, *node.bases, *(k.value for k in node.keywords)):
            self.walk(part)
        index = len(self.scopes)
        keywords = tuple(_class_keyword(keyword) for keyword in node.keywords)
        self.scopes.append(
            Scope(
                "c",
                node.name,
                self._qualname(node.name),
                self.scope,
                node.lineno,
                self.guard,
                {},
                tuple(self.expr(d) for d in node.decorator_list),
                bases=tuple(self.annotation(b) for b in node.bases),
                class_keywords=keywords,
                attributes={},
                fields=_fields(node.body),
            )
        )
        self._bind(node.name, node.lineno, ("K", index))
        saved = self.scope, self.guard
        self.scope, self.guard = index, -1
        self.klass.append(index)
        self._body(node.body)
        self.klass.pop()
        self.scope, self.guard = saved

    # -- statements ---------------------------------------------------------------------------------------------

    def _body(self, body: Iterable[ast.stmt]) -> bool:
        """Walk statements; returns whether the end is never reached. A branch that leaves guards the rest."""
        ends = False
        saved = self.guard
        for statement in body:
            handler = self._stmt.get(type(statement))
            if handler is None:
                self._generic(statement)
                ends = ends or isinstance(statement, ast.Raise)
            else:
                handler(statement)
                ends = ends or type(statement) in (ast.Return, ast.Continue, ast.Break)
            if ends:
                break  # nothing reaches what stands behind it
        self.guard = saved
        return ends

    def _generic(self, node: ast.AST) -> None:
        for field in node._fields:
            value = getattr(node, field, None)
            if isinstance(value, list):
                if value and isinstance(value[0], ast.stmt):
                    self._body(value)
                else:
                    for item in value:
                        if isinstance(item, ast.AST):
                            self._generic_item(item)
            elif isinstance(value, ast.AST):
                self._generic_item(value)

    def _generic_item(self, node: ast.AST) -> None:
        if isinstance(node, ast.expr):
            self.walk(node)
        else:
            self._generic(node)

    def _ignore(self, node: ast.stmt) -> None:
        pass

    def _global(self, node: ast.Global) -> None:
        self.globals[-1] = self.globals[-1] | frozenset(node.names)

    def push(self, test: ast.expr, holds: bool) -> None:
        """Add what ``test`` being ``holds`` says about the statements that follow."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self.push(test.operand, not holds)
        elif isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == holds:
            for value in test.values:
                self.push(value, holds)
        else:
            self.guards.append((self.condition(test), holds, self.guard))
            self.guard = len(self.guards) - 1

    def _opaque(self, tag: str, line: int, holds: bool) -> None:
        self.guards.append(((tag, line), holds, self.guard))
        self.guard = len(self.guards) - 1

    def _if(self, node: ast.If) -> None:
        self.walk(node.test)
        saved = self.guard
        self.push(node.test, True)
        body_ends = self._body(node.body)
        self.guard = saved
        self.push(node.test, False)
        else_guard = self.guard
        else_ends = self._body(node.orelse) if node.orelse else False
        self.guard = saved
        if body_ends and not else_ends:
            self.guard = else_guard
        elif else_ends and not body_ends:
            self.push(node.test, True)

    def _assert(self, node: ast.Assert) -> None:
        self.walk(node.test)
        self.push(node.test, True)

    def _for(self, node: ast.For | ast.AsyncFor) -> None:
        self.walk(node.iter)
        self._target(node.target, ("e", value) if (value := self.expr(node.iter)) else None, node.lineno)
        saved = self.guard
        self._opaque("loop", node.lineno, True)
        self._body(node.body)
        self.guard = saved
        self._body(node.orelse)

    def _while(self, node: ast.While) -> None:
        self.walk(node.test)
        saved = self.guard
        self.push(node.test, True)
        self._body(node.body)
        self.guard = saved
        self._body(node.orelse)

    def _with(self, node: ast.With | ast.AsyncWith) -> None:
        saved = self.guard
        expected = any(_expects_type_error(item.context_expr) for item in node.items)
        for item in node.items:
            self.walk(item.context_expr)
            if item.optional_vars is not None:
                manager = self.expr(item.context_expr)
                entered = ("w", manager, isinstance(node, ast.AsyncWith)) if manager is not None else None
                self._target(item.optional_vars, entered, node.lineno)
        if expected:
            self._opaque("try-type", node.lineno, True)
        # A with block runs its body once: what it binds and asserts holds behind it too.
        for statement in node.body:
            handler = self._stmt.get(type(statement))
            if handler is None:
                self._generic(statement)
            else:
                handler(statement)
        if expected:
            self.guard = saved

    def _try(self, node: ast.Try) -> None:
        saved = self.guard
        caught = frozenset(name for handler in node.handlers for name in _caught(handler))
        tag = "try-type" if caught & {"TypeError"} else "try"
        self._opaque(tag, node.lineno, True)
        body_ends = self._body(node.body)
        if node.orelse:
            body_ends = self._body(node.orelse) or body_ends
        self.guard = saved
        all_end = bool(node.handlers)
        for handler in node.handlers:
            self.guard = saved
            self._opaque("try", node.lineno, False)
            if "TypeError" in _caught(handler):
                self._opaque("try-type", node.lineno, False)  # what is tried next is meant for other definitions
            if handler.type is not None:
                self.walk(handler.type)
            if handler.name:
                self._bind(handler.name, handler.lineno, None)
            all_end = self._body(handler.body) and all_end
        self.guard = saved
        self._body(node.finalbody)

    def _return(self, node: ast.Return) -> None:
        if node.value is None:
            return
        if self.function >= 0:
            self.scopes[self.function].returns.append((self.guard, self.expr(node.value)))
        self.walk(node.value)

    def _yield(self, node: ast.Yield | ast.YieldFrom) -> None:
        """A generator returns a container of what it yields."""
        if node.value is None:
            return
        self.walk(node.value)
        value = self.expr(node.value)
        if self.function >= 0 and value is not None:
            item = value if isinstance(node, ast.Yield) else ("e", value)
            self.scopes[self.function].returns.append((self.guard, ("d", (item,))))

    def _expr_statement(self, node: ast.Expr) -> None:
        self.added_under[node.lineno] = self.guard
        self.walk(node.value)

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            root = alias.name.partition(".")[0]
            module = alias.name if alias.asname else root
            name = alias.asname or root
            self._note_origin(name, self.external(alias.name))
            self._bind(name, node.lineno, ("m", 0, module, None))
            if not alias.asname and "." in alias.name:
                # The submodule is loaded too; a plain name binds only the root.
                self._bind(f"import {alias.name}", node.lineno, None)

    def _import_from(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        outside = node.level == 0 and self.external(module)
        for alias in node.names:
            name = alias.asname or alias.name
            self._note_origin(name, outside)
            self._bind(name, node.lineno, ("m", node.level, module, alias.name))

    def _note_origin(self, name: str, outside: bool) -> None:
        """A name that one platform imports from another package may come from the trees on the next one."""
        if outside and name not in self.own_names:
            self.external_names.add(name)
        elif not outside:
            self.own_names.add(name)
            self.external_names.discard(name)

    def _assign(self, node: ast.Assign) -> None:
        self.walk(node.value)
        for target in node.targets:
            self._assign_target(target, node.value, node.lineno)
            if isinstance(target, ast.Name) and self._makes_own(node.value):
                self.made[-1].add(target.id)

    def _makes_own(self, value: ast.expr) -> bool:
        """``super().__new__(cls)`` and ``object.__new__(cls)``."""
        if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.args):
            return False
        first, own = value.args[0], self.self_name[-1]
        return value.func.attr == "__new__" and isinstance(first, ast.Name) and first.id == own

    def _assign_target(self, target: ast.expr, value: ast.expr, line: int) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            same = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
            starred = any(isinstance(item, ast.Starred) for item in target.elts)
            whole = None if same else self.expr(value)
            for position, item in enumerate(target.elts):
                if same and not starred:
                    self._assign_target(item, value.elts[position], line)  # type: ignore[attr-defined]
                else:
                    self._target(item, ("x", whole, position) if whole and not starred else None, line)
            return
        self._target(target, self.expr(value), line)

    def _ann_assign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.walk(node.value)
        annotation = self.annotation(node.annotation)
        value = self.expr(node.value) if node.value is not None else None
        declared: Expr | None = ("T", annotation)
        if value is not None and value[0] not in ("k", "n"):
            declared = ("|", declared, value) if annotation is None or value[0] in "cFKn" else declared
        self._target(node.target, declared, node.lineno)

    def _delete(self, node: ast.Delete) -> None:
        """``del kw["a"]`` takes one keyword out."""
        for target in node.targets:
            self.walk(target)
            if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                if isinstance(target.slice, ast.Constant):
                    self.popped[-1].setdefault(target.value.id, set()).add(str(target.slice.value))
                else:
                    self.edits[-1].add(target.value.id)

    def _aug_assign(self, node: ast.AugAssign) -> None:
        self.walk(node.value)
        if isinstance(node.target, ast.Name):
            self.reads[-1].add(node.target.id)
            self._bind(node.target.id, node.lineno, None)
        else:
            self.walk(node.target)

    def _target(self, target: ast.expr, value: Expr | None, line: int) -> None:
        if isinstance(target, ast.Name):
            self._bind(target.id, line, value)
            self.edits[-1].add(target.id)
        elif isinstance(target, ast.Attribute):
            self._attribute_target(target, value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for position, item in enumerate(target.elts):
                self._target(item, ("x", value, position) if value else None, line)
        elif isinstance(target, ast.Starred):
            self._target(target.value, None, line)
        elif isinstance(target, ast.Subscript):
            self._subscript_target(target, value)

    def _attribute_target(self, target: ast.Attribute, value: Expr | None) -> None:
        self.walk(target.value)
        owner = target.value
        own = isinstance(owner, ast.Name) and owner.id in (self.self_name[-1], *self.made[-1])
        if own and self.klass and self.function >= 0:
            attributes = self.scopes[self.klass[-1]].attributes
            attributes.setdefault(target.attr, []).append((self.scope, self.guard, value, target.lineno))
            return
        described = self.expr(owner)
        if described is not None:
            self.patches.append((self.scope, self.guard, described, target.attr, value, target.lineno))

    def _subscript_target(self, target: ast.Subscript, value: Expr | None) -> None:
        if isinstance(target.value, ast.Name):
            # kwargs["x"] = ... only adds; the forwarded call then passes more than it was given.
            self.edits[-1].add(target.value.id)
            self.reads[-1].add(target.value.id)
            self.added_under[target.lineno] = self.guard
            if value is not None:
                self._bind(target.value.id, target.lineno, ("d", (value,)))
        else:
            owner = target.value
            if isinstance(owner, ast.Attribute) and isinstance(owner.value, ast.Name) and value is not None:
                self._attribute_target(owner, ("d", (value,)))
            else:
                self.walk(owner)
        self.walk(target.slice)

    # -- expressions --------------------------------------------------------------------------------------------

    def walk(self, node: ast.expr) -> None:
        """Visit every call, name and binding inside an expression."""
        handler = self._walk.get(type(node), self._any_expression)
        if handler is not None:
            handler(node)

    def _any_expression(self, node: ast.expr) -> None:
        for field in node._fields:
            value = getattr(node, field, None)
            if isinstance(value, ast.expr):
                self.walk(value)
            elif isinstance(value, list):
                for item in value:
                    if isinstance(item, ast.expr):
                        self.walk(item)
                    elif isinstance(item, ast.AST):
                        self._generic(item)

    def _subscript(self, node: ast.Subscript) -> None:
        self.walk(node.value)
        self.walk(node.slice)

    def _binary(self, node: ast.BinOp) -> None:
        self.walk(node.left)
        self.walk(node.right)

    def _compare(self, node: ast.Compare) -> None:
        self.walk(node.left)
        for comparator in node.comparators:
            self.walk(comparator)

    def _elements(self, node: ast.Tuple | ast.List) -> None:
        for element in node.elts:
            self.walk(element)

    def _name(self, node: ast.Name) -> None:
        self.reads[-1].add(node.id)

    def _attribute(self, node: ast.Attribute) -> None:
        self.walk(node.value)

    def _ifexp(self, node: ast.IfExp) -> None:
        self.walk(node.test)
        saved = self.guard
        self.push(node.test, True)
        self.walk(node.body)
        self.guard = saved
        self.push(node.test, False)
        self.walk(node.orelse)
        self.guard = saved

    def _boolop(self, node: ast.BoolOp) -> None:
        saved = self.guard
        holds = isinstance(node.op, ast.And)
        for value in node.values:
            self.walk(value)
            self.push(value, holds)
        self.guard = saved

    def _named(self, node: ast.NamedExpr) -> None:
        self.walk(node.value)
        self._bind(node.target.id, node.lineno, self.expr(node.value))

    def _comprehension(self, node: Any) -> None:
        saved = self.guard
        for generator in node.generators:
            self.walk(generator.iter)
            value = self.expr(generator.iter)
            self._target(generator.target, ("e", value) if value else None, node.lineno)
            for test in generator.ifs:
                self.walk(test)
                self.push(test, True)
        if isinstance(node, ast.DictComp):
            self.walk(node.key)
            self.walk(node.value)
        else:
            self.walk(node.elt)
        self.guard = saved

    def _call(self, node: ast.Call) -> None:
        func = node.func
        names: list[str] = []
        kwstar: str | None = None
        for keyword in node.keywords:
            if keyword.arg is None:
                kwstar = self._kwstar(keyword.value, names, kwstar)
            else:
                names.append(keyword.arg)
        saved = self.guard
        if _expects_type_error(node):  # raises(TypeError, lambda: f(1))
            self._opaque("try-type", node.lineno, True)
        npos, star, argnames = 0, None, []
        for arg in node.args:
            if isinstance(arg, ast.Starred):
                star = arg.value.id if isinstance(arg.value, ast.Name) else ""
                self.walk(arg.value)
                continue
            npos += 1
            argnames.append(_argument_name(arg))
            self.walk(arg)
        for keyword in node.keywords:
            self.walk(keyword.value)
        self.guard = saved
        self.walk(func)
        self._note_pop(node)
        if isinstance(func, ast.Name) and func.id in ("type", "setattr") and len(node.args) == 3:
            self._note_made(func.id, node.args)
        if self._wanted(func, bool(node.keywords)):
            described = self.expr(func)
            if described is not None:
                self.calls.append(
                    (node.lineno, self.scope, self.guard, described, npos, tuple(names), star, kwstar,
                     tuple(argnames), ())
                )  # fmt: skip
                if kwstar:
                    self.handed_on[-1].append((len(self.calls) - 1, node, kwstar))

    def _kwstar(self, value: ast.expr, names: list[str], kwstar: str | None) -> str | None:
        """``**{"a": 1}`` passes plain keywords; anything else is named or unknown."""
        keys = keywords.written(value)
        if keys is not None:
            names += keys
            return kwstar
        return value.id if isinstance(value, ast.Name) and kwstar is None else ""

    def _note_made(self, name: str, args: list[ast.expr]) -> None:
        """``setattr(X, "m", f)`` and the members of ``type("X", bases, {"m": f})``."""
        if name == "setattr":
            owner, key = self.expr(args[0]), args[1]
            if owner is not None and isinstance(key, ast.Constant) and isinstance(key.value, str):
                self.patches.append((self.scope, self.guard, owner, key.value, self.expr(args[2]), key.lineno))
        elif isinstance(args[2], ast.Dict):
            for key_node, value in zip(args[2].keys, args[2].values, strict=True):
                if isinstance(key_node, ast.Constant) and isinstance(key_node.value, str):
                    self.patches.append(
                        (self.scope, self.guard, ("?",), key_node.value, self.expr(value), key_node.lineno)
                    )

    def _note_pop(self, node: ast.Call) -> None:
        func = node.func
        if not (isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name)):
            return
        if func.attr == "pop" and node.args and isinstance(node.args[0], ast.Constant):
            self.popped[-1].setdefault(func.value.id, set()).add(str(node.args[0].value))
        elif func.attr in ("update", "clear", "setdefault", "popitem", "pop"):
            self.edits[-1].add(func.value.id)

    def _wanted(self, func: ast.expr, keywords: bool) -> bool:
        """False for callees that cannot be defined in the trees: builtins' methods and names of other packages."""
        if isinstance(func, ast.Name):
            return func.id not in _BUILTINS and func.id not in self.external_names
        if not isinstance(func, ast.Attribute):
            return isinstance(func, ast.Call)
        if func.attr in _COMMON_METHODS and not keywords:
            own = isinstance(func.value, ast.Name) and func.value.id == self.self_name[-1]
            if not own and not isinstance(func.value, ast.Call):
                return False
        root: ast.expr = func.value
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name):
            return root.id not in self.external_names
        return not isinstance(root, (ast.Constant, ast.JoinedStr))

    def expr(self, node: ast.expr | None, depth: int = 0) -> Expr | None:
        """What is kept of an expression; None where nothing can be said."""
        kind = type(node)
        if node is None or depth > _MAX_DEPTH:
            return None
        if kind is ast.Name:
            return self._one(("n", node.id))  # type: ignore[attr-defined]
        if kind is ast.Attribute:
            base = self.expr(node.value, depth + 1)  # type: ignore[attr-defined]
            return self._one(("a", base or ("?",), node.attr))  # type: ignore[attr-defined]
        if kind is ast.Call:
            return self._described_call(node, depth)  # type: ignore[arg-type]
        if kind is ast.Constant:
            value = node.value  # type: ignore[attr-defined]
            if isinstance(value, str):
                return ("s", value) if len(value) < 200 else None
            return ("k", value) if isinstance(value, _CONSTANTS) else None
        handler = _DESCRIBE.get(kind)
        return handler(self, node, depth + 1) if handler is not None else None

    def _one(self, described: Expr) -> Expr:
        """The same object for equal expressions: a file says ``self.x`` a thousand times."""
        return self._seen.setdefault(described, described)

    def _described_call(self, node: ast.Call, depth: int) -> Expr | None:
        func = self.expr(node.func, depth + 1)
        if func is None:
            return None
        args = tuple(self.expr(a.value if isinstance(a, ast.Starred) else a, depth + 2) for a in node.args[:3])
        if len(args) == 2 and func[-1] == "cast" and isinstance(node.args[0], ast.Constant):
            args = (self.annotation(node.args[0]), args[1])
        keywords = tuple(k.arg or "**" for k in node.keywords)
        if any(isinstance(a, ast.Starred) for a in node.args):
            keywords += ("*",)
        return ("c", func, args, len(node.args), keywords)

    def condition(self, node: ast.expr, depth: int = 0) -> Expr | None:
        """A guard's test, with ``not``, ``and``, ``or`` and comparisons kept."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self.condition(node.operand, depth + 1)
            return ("!", inner) if inner is not None else None
        if isinstance(node, ast.BoolOp):
            tag = "&" if isinstance(node.op, ast.And) else "V"
            return (tag, tuple(self.condition(value, depth + 1) for value in node.values))
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = self.expr(node.left, depth + 1), self.expr(node.comparators[0], depth + 1)
            if left is None or right is None:
                return None
            return ("=", type(node.ops[0]).__name__, left, right)
        return self.expr(node, depth)

    def annotation(self, node: ast.expr | None) -> Expr | None:
        """A type: as an expression; a string annotation is parsed."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                node = ast.parse(node.value, mode="eval").body
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                return None
        if isinstance(node, ast.Subscript):
            base = self.annotation(node.value)
            items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return ("i", base, tuple(self.annotation(item) for item in items))
        if isinstance(node, ast.BinOp):
            return ("|", self.annotation(node.left), self.annotation(node.right))
        return self.expr(node)


def _describe_subscript(ex: Extractor, node: ast.Subscript, depth: int) -> Expr | None:
    base = ex.expr(node.value, depth)
    if isinstance(node.slice, ast.Tuple) and _callee_name(node.value) == "Union":
        return ex.annotation(node)  # an alias of a type
    index = ex.expr(node.slice, depth) if isinstance(node.slice, (ast.Constant, ast.Name, ast.Attribute)) else None
    return ("i", base, index) if base is not None else None


def _describe_ifexp(ex: Extractor, node: ast.IfExp, depth: int) -> Expr | None:
    test, body, orelse = node.test, node.body, node.orelse
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, body, orelse = test.operand, orelse, body
    return ("|", ex.expr(body, depth), ex.expr(orelse, depth), ex.condition(test, depth))


def _describe_boolop(ex: Extractor, node: ast.BoolOp, depth: int) -> Expr | None:
    result = ex.expr(node.values[0], depth)
    for value in node.values[1:]:
        result = ("|", result, ex.expr(value, depth))
    return result


def _describe_display(ex: Extractor, node: ast.Tuple | ast.List | ast.Set, depth: int) -> Expr | None:
    return ("t", tuple(ex.expr(item, depth) for item in node.elts[:DISPLAY]))


def _describe_dict(ex: Extractor, node: ast.Dict, depth: int) -> Expr | None:
    return ("d", tuple(ex.expr(value, depth) for value in node.values[:80]))


def _describe_comprehension(ex: Extractor, node: ast.ListComp, depth: int) -> Expr | None:
    return ("d", (ex.expr(node.elt, depth),))


def _describe_dictcomp(ex: Extractor, node: ast.DictComp, depth: int) -> Expr | None:
    return ("d", (ex.expr(node.value, depth),))


_DESCRIBE: dict[type, Callable[[Extractor, Any, int], Expr | None]] = {
    ast.Subscript: _describe_subscript,
    ast.IfExp: _describe_ifexp,
    ast.BoolOp: _describe_boolop,
    ast.Tuple: _describe_display,
    ast.List: _describe_display,
    ast.Set: _describe_display,
    ast.Dict: _describe_dict,
    ast.ListComp: _describe_comprehension,
    ast.GeneratorExp: _describe_comprehension,
    ast.DictComp: _describe_dictcomp,
    ast.Compare: lambda ex, node, depth: ex.condition(node, depth),
    ast.Await: lambda ex, node, depth: ex.expr(node.value, depth),
    ast.NamedExpr: lambda ex, node, depth: ex.expr(node.value, depth),
    ast.Lambda: lambda ex, node, depth: ("F", ex._lambda_scope(node)),
    ast.BinOp: lambda ex, node, depth: (
        ("|", ex.expr(node.left, depth), ex.expr(node.right, depth)) if _is_type(node) else None
    ),
    ast.UnaryOp: lambda ex, node, depth: (
        ("k", -node.operand.value)
        if isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant)
        and isinstance(node.operand.value, (int, float))
        else None
    ),
}  # fmt: skip


def _is_type(node: ast.expr) -> bool:
    """What is written like a type, or like a union of them; ``a.x | a.y`` of two values is neither of the two."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.BitOr) and _is_type(node.left) and _is_type(node.right)
    if isinstance(node, ast.Constant):
        return node.value is None or isinstance(node.value, str)
    name = _callee_name(node.value if isinstance(node, ast.Subscript) else node)
    return name.lstrip("_")[:1].isupper() or name in _BUILTINS


def _may_write_out(value: Expr | None) -> bool:
    """Whether a binding can be a dict display or ``dict(...)``."""
    return value is not None and (value[0] in "dT|" or value[:2] == ("c", ("n", "dict")))


def _signature(arguments: ast.arguments) -> Signature:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: dict[str, str] = {}
    for arg, value in zip(reversed(positional), reversed(arguments.defaults), strict=False):
        defaults[arg.arg] = _rendered(value)
    for arg, keyword_default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if keyword_default is not None:
            defaults[arg.arg] = _rendered(keyword_default)
    return Signature(
        tuple(a.arg for a in arguments.posonlyargs),
        tuple(a.arg for a in arguments.args),
        tuple(a.arg for a in arguments.kwonlyargs),
        defaults,
        arguments.vararg.arg if arguments.vararg else None,
        arguments.kwarg.arg if arguments.kwarg else None,
    )


def _rendered(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return repr(node.value) if not isinstance(node.value, str) or len(node.value) < 40 else "..."
    if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant) and isinstance(node.op, ast.USub):
        return f"-{node.operand.value!r}"
    return "..."


def _is_stub(body: list[ast.stmt]) -> bool:
    """A body that only documents, passes or raises NotImplementedError: a declaration, not an implementation."""
    rest = body[1:] if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) else body
    if isinstance(body, list) and not rest:
        return bool(body)
    if len(rest) > 1:
        return False
    only = rest[0]
    if isinstance(only, ast.Raise):
        exc = only.exc.func if isinstance(only.exc, ast.Call) else only.exc
        return isinstance(exc, ast.Name) and exc.id == "NotImplementedError"
    return isinstance(only, ast.Pass) or (isinstance(only, ast.Expr) and isinstance(only.value, ast.Constant))


def _fields(body: list[ast.stmt]) -> tuple[tuple[str, bool, bool, str], ...]:
    """Annotated names of a class body in order: what a dataclass makes its parameters from."""
    found: list[tuple[str, bool, bool, str]] = []
    for statement in body:
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        head = statement.annotation
        while isinstance(head, ast.Subscript):
            head = head.value
        name = head.attr if isinstance(head, ast.Attribute) else getattr(head, "id", "")
        if isinstance(head, ast.Constant):
            name = str(head.value)
        has_default, init, kw_only = statement.value is not None, True, False
        if isinstance(statement.value, ast.Call):
            options = {k.arg: k.value for k in statement.value.keywords}
            init = not _is_false(options.get("init"))
            if _callee_name(statement.value.func) in ("field", "Field"):
                has_default = bool({"default", "default_factory", "factory"} & set(options))
                has_default = has_default or bool(statement.value.args)
            kw_only = isinstance(options.get("kw_only"), ast.Constant) and not _is_false(options.get("kw_only"))
        found.append((statement.target.id, has_default, init, "KW_ONLY" if kw_only else name))
    return tuple(found)


def _class_keyword(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        return "**"
    value = keyword.value.value if isinstance(keyword.value, ast.Constant) else _callee_name(keyword.value)
    return f"{keyword.arg}={value!s}"


def _is_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _callee_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _caught(handler: ast.ExceptHandler) -> list[str]:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return [_callee_name(kind) for kind in kinds if kind is not None]


def _expects_type_error(manager: ast.expr) -> bool:
    """``pytest.raises(TypeError)`` and its kin: the call inside is wrong on purpose."""
    if not isinstance(manager, ast.Call) or _callee_name(manager.func) not in _EXPECTS:
        return False
    named = [*manager.args[:1], *(k.value for k in manager.keywords if k.arg == "expected_exception")]
    kinds = {_callee_name(kind) for arg in named for kind in (arg.elts if isinstance(arg, ast.Tuple) else [arg])}
    return bool(kinds & ({"TypeError"} if _callee_name(manager.func) == "suppress" else _TYPE_ERRORS))


def _argument_name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def _ignores(source: bytes) -> dict[int, tuple[str, ...]]:
    """The rules that each line is to ignore, from comments; a string that looks like one is none."""
    if _IGNORE.search(source) is None:
        return {}
    found: dict[int, tuple[str, ...]] = {}
    try:
        for token in tokenize.tokenize(io.BytesIO(source).readline):
            match = _IGNORE.search(token.string.encode()) if token.type == tokenize.COMMENT else None
            if match:
                number = token.start[0]
                listed = (match.group(1) or b"").decode("ascii", "replace")
                rules = tuple(part.strip() for part in listed.split(",") if part.strip())
                found[number] = rules
                if token.line.lstrip().startswith("#"):  # a comment of its own speaks for the line below it
                    found.setdefault(number + 1, (*rules, f"^{number}"))  # and is itself the place to name
    except (tokenize.TokenError, SyntaxError, UnicodeError):
        pass  # what the parser could read and this cannot, has no ignores behind that place
    return found


def extract(tree: ast.Module, source: bytes, external: Callable[[str], bool]) -> FileFacts:
    """All facts of one file; ``external`` tells which modules lie outside the checked trees.

    Raises:
        RecursionError: the expression nesting is too deep to walk.
    """
    extractor = Extractor(external)
    extractor.module(tree)
    return FileFacts(
        extractor.scopes, extractor.calls, extractor.guards, extractor.patches, _ignores(source), _template(source)
    )  # fmt: skip


def _template(source: bytes) -> str:
    """What the head of a generated file names as the Python file that it was generated from."""
    match = _GENERATED.search(source[:_HEAD])
    return match.group(1).decode("ascii").replace("\\", "/") if match else ""
