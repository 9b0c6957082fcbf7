"""All files together: modules by import path, classes with their MRO over every tree, members and descendants."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from .model import DISPLAY, Binding, Expr, FileFacts, Guard, Scope

# A definition's address: the index of its file, then of its scope in that file.
Ref = tuple[int, int]
# What an expression can be; ``infer`` says how one is written.
Value = tuple[Any, ...]
Values = frozenset[Value]

_PLAIN_BASES = frozenset(
    {"metaclass=ABCMeta", "object", "ABC", "Protocol", "Generic", "Module", "Enum", "Exception", "NamedTuple"}
)
_BARE_BASES = frozenset({"metaclass=ABCMeta", "object", "ABC", "Protocol", "Generic"})
_TEST_PARTS = frozenset({"test", "tests", "testing", "benchmark", "benchmarks"})


class SourceFile(NamedTuple):
    """One file of the trees; ``parts`` is its absolute path without ``.py`` or ``/__init__.py``."""

    path: str
    parts: tuple[str, ...]
    is_package: bool
    facts: FileFacts

    @property
    def is_test(self) -> bool:
        name = self.parts[-1]
        return (
            bool(_TEST_PARTS & set(self.parts[-6:])) or name.startswith(("test_", "conftest")) or name.endswith("_test")
        )


class Member(NamedTuple):
    """One way in which a class provides a name: where it is written, and the binding."""

    owner: Ref
    binding: Binding


class Patch(NamedTuple):
    """An attribute of a class or module that is assigned from outside."""

    place: Ref  # the scope that assigns
    value: Expr | None
    line: int
    functions: frozenset[Ref]  # what it assigns, as far as that can be seen
    conditional: bool
    replaces: bool = False  # surely in force, behind what the class body has


class Program:
    """Facts of all files with the questions that cross files. Values of expressions are ``infer``'s business."""

    def __init__(self, files: Iterable[tuple[str, FileFacts]], checked: int | None = None) -> None:
        self.files: list[SourceFile] = []
        self._modules: dict[str, list[int]] = defaultdict(list)
        self._resolved: dict[tuple[str, int], int | None] = {}
        self._packages: dict[int, tuple[str, ...]] = {}
        self._overloads: dict[int, dict[tuple[int, str], list[Ref]]] = {}
        given = list(files)
        templates = _templates(given)
        # Files behind these are read for their definitions only.
        self.checked = 0
        for number, (path, facts) in enumerate(given):
            if number not in templates:
                self._add(path, facts)
                self.checked += checked is None or number < checked
        self.dead: dict[int, frozenset[int]] = {}  # by file: guards that no run of these trees can meet
        self.classes: list[Ref] = []
        self.functions_named: dict[str, list[Ref]] = defaultdict(list)
        self.methods_named: dict[str, list[Ref]] = defaultdict(list)
        for index, file in enumerate(self.files):
            for number, scope in enumerate(file.facts.scopes):
                if scope.kind == "c":
                    self.classes.append((index, number))
                elif scope.kind == "f":
                    kind = file.facts.scopes[scope.parent].kind
                    (self.methods_named if kind == "c" else self.functions_named)[scope.name].append((index, number))
        self.bases: dict[Ref, list[Ref]] = {}
        self.external: dict[Ref, frozenset[str]] = {}
        self.base_order: dict[Ref, tuple[Ref | str, ...]] = {}  # as written; what is not in the trees by its name
        self.alternative_bases: set[Ref] = set()  # classes with a base that is one of several, by configuration
        self.patched_into: dict[Ref, set[Ref]] = defaultdict(set)  # functions that become methods of classes
        self._hidden: dict[tuple[Ref, Ref, Ref | None, bool], bool] = {}
        self.children: dict[Ref, list[Ref]] = defaultdict(list)
        self._mro: dict[Ref, tuple[Ref, ...]] = {}
        self._descendants: dict[Ref, tuple[Ref, ...]] = {}
        self.class_patches: dict[tuple[Ref, str], list[Patch]] = defaultdict(list)
        self.module_patches: dict[tuple[int, str], list[Patch]] = defaultdict(list)

    def _add(self, path: str, facts: FileFacts) -> None:
        absolute = os.path.abspath(path)
        parts = tuple(part for part in absolute[:-3].split(os.sep) if part)
        is_package = parts[-1] == "__init__"
        parts = parts[:-1] if is_package else parts
        self._modules[parts[-1]].append(len(self.files))
        self.files.append(SourceFile(path, parts, is_package, facts))

    def scope(self, ref: Ref) -> Scope:
        return self.files[ref[0]].facts.scopes[ref[1]]

    def guards(self, file: int, guard: int) -> Iterator[tuple[Expr | None, bool]]:
        """The conditions that hold under a guard, innermost first."""
        table: list[Guard] = self.files[file].facts.guards
        while guard >= 0:
            test, holds, guard = table[guard]
            yield test, holds

    def overloads(self, ref: Ref) -> list[Ref]:
        """The ``@overload`` declarations of a function."""
        file = ref[0]
        if file not in self._overloads:
            found: dict[tuple[int, str], list[Ref]] = defaultdict(list)
            for number, scope in enumerate(self.files[file].facts.scopes):
                if scope.kind == "f" and any(d is not None and d[-1] == "overload" for d in scope.decorators):
                    found[(scope.parent, scope.name)].append((file, number))
            self._overloads[file] = dict(found)
        scope = self.scope(ref)
        return self._overloads[file].get((scope.parent, scope.name), [])

    def name_of(self, ref: Ref) -> str:
        return self.scope(ref).qualname

    # -- modules ------------------------------------------------------------------------------------------------

    def module(self, name: str, importer: int) -> int | None:
        """The file of a dotted module name: the one whose path ends with it, nearest to the importing file."""
        key = (name, importer if self._modules.get(name.rpartition(".")[2]) else -1)
        if key not in self._resolved:
            self._resolved[key] = self._find_module(tuple(name.split(".")), importer)
        return self._resolved[key]

    def _find_module(self, wanted: tuple[str, ...], importer: int) -> int | None:
        matches = [
            index for index in self._modules.get(wanted[-1], ()) if self.files[index].parts[-len(wanted) :] == wanted
        ]
        here = self.files[importer].parts
        # Beside backend/numpy/random.py, and inside of it, ``numpy.random`` is the package of that name.
        matches = [index for index in matches if self._starts_at_a_root(index, len(wanted))]
        if len(wanted) == 1:
            matches = [index for index in matches if self._is_top_level(index)]
        if not matches:
            return None
        return max(matches, key=lambda index: (_common(self.files[index].parts, here), -len(self.files[index].parts)))

    def _starts_at_a_root(self, index: int, length: int) -> bool:
        """Whether a dotted name of this length starts at a package, or module, that lies in no other."""
        parts = self.files[index].parts
        return length == 1 or self.is_root(parts[: len(parts) - length + 1])

    def _is_top_level(self, index: int) -> bool:
        """A one-part import names a root package or a script's neighbour, not any module of that name deep down."""
        parts = self.files[index].parts
        parent = self._modules.get(parts[-2], ()) if len(parts) > 1 else ()
        return not any(self.files[other].is_package and self.files[other].parts == parts[:-1] for other in parent)

    def relative(self, file: int, level: int, module: str) -> int | None:
        """The file that ``from ..module import`` means in ``file``."""
        source = self.files[file]
        drop = level - 1 if source.is_package else level
        base = source.parts[: len(source.parts) - drop] if drop else source.parts
        wanted = base + tuple(part for part in module.split(".") if part)
        for index in self._modules.get(wanted[-1], ()) if wanted else ():
            if self.files[index].parts == wanted:
                return index
        return None

    def is_root(self, folder: tuple[str, ...]) -> bool:
        """Whether a folder is a package that lies in no other."""
        parents = self._modules.get(folder[-2], ()) if len(folder) > 1 else ()
        return not any(self.files[index].is_package and self.files[index].parts == folder[:-1] for index in parents)

    def package(self, file: int) -> tuple[str, ...]:
        """The top package that a file lies in, as a path; the file's own path where it lies in none."""
        if file not in self._packages:
            folder = self.files[file].parts
            while len(folder) > 1 and not self.is_root(folder):
                folder = folder[:-1]
            self._packages[file] = folder
        return self._packages[file]

    def submodule(self, file: int, name: str) -> int | None:
        wanted = (*self.files[file].parts, name)
        for index in self._modules.get(name, ()):
            if self.files[index].parts == wanted:
                return index
        return None

    def exports(self, file: int, name: str) -> bool:
        """Whether ``from module import *`` brings a name along."""
        listed = self.files[file].facts.scopes[0].bindings.get("__all__", ())
        if not listed:
            return not name.startswith("_")
        value = listed[0][2]
        if len(listed) > 1 or value is None or value[0] != "t" or len(value[1]) >= DISPLAY:
            return True  # put together, or too long to be kept whole
        return ("s", name) in value[1] or any(item is None or item[0] != "s" for item in value[1])

    def import_target(self, file: int, level: int, module: str) -> int | None:
        return self.relative(file, level, module) if level else self.module(module, file)

    # -- classes ------------------------------------------------------------------------------------------------

    def link(self, bases: dict[Ref, list[Ref]], external: dict[Ref, frozenset[str]]) -> None:
        """Set every class's bases; afterwards MRO and descendants can be asked."""
        self.bases, self.external = bases, external
        for memo in (self._mro, self._descendants, self._hidden):
            memo.clear()  # what was asked on the way here knew no bases
        for ref, parents in bases.items():
            for parent in parents:
                self.children[parent].append(ref)

    def mro(self, ref: Ref) -> tuple[Ref, ...]:
        if ref not in self._mro:
            self._mro[ref] = (ref,)  # a cycle of bases ends here
            merged = _merge(
                [list(self.mro(base)) for base in self.bases.get(ref, ())] + [list(self.bases.get(ref, ()))]
            )
            self._mro[ref] = (ref, *(item for item in merged if item != ref))
        return self._mro[ref]

    def descendants(self, ref: Ref) -> tuple[Ref, ...]:
        """The class itself and everything below it."""
        if ref not in self._descendants:
            seen: dict[Ref, None] = {ref: None}
            stack = [ref]
            while stack:
                for child in self.children.get(stack.pop(), ()):
                    if child not in seen:
                        seen[child] = None
                        stack.append(child)
            self._descendants[ref] = tuple(seen)
        return self._descendants[ref]

    def unknown_base(self, ref: Ref) -> bool:
        """Whether a base outside the trees could provide any member."""
        return any(self.external.get(item, frozenset()) - _PLAIN_BASES for item in self.mro(ref))

    def hidden(self, owner: Ref, provider: Ref, name: str, after: Ref | None = None) -> bool:
        """Whether a base outside the trees stands before ``provider`` and may have the member instead of it."""
        constructor = name in ("__init__", "__new__")
        key = (owner, provider, after, constructor)
        if key not in self._hidden:
            self._hidden[key] = self._is_hidden(owner, provider, after, _BARE_BASES if constructor else _PLAIN_BASES)
        return self._hidden[key]

    def _is_hidden(self, owner: Ref, provider: Ref, after: Ref | None, plain: frozenset[str]) -> bool:
        order = self.mro(owner)
        start = order.index(after) if after in order else 0
        shared = {name for item in self.mro(provider) for name in self.external.get(item, ())}
        for item in order[start:]:
            if item == provider:
                return False
            seen = False
            for base in self.base_order.get(item, ()):
                if isinstance(base, str):
                    if not seen and base not in plain and base not in shared:
                        return True
                elif provider in self.mro(base):
                    seen = True  # what stands behind it is asked later
        return False

    def unknown_base_or_module(self, ref: Ref) -> bool:
        """Whether instances may be called through ``forward``: a torch module, or a base that cannot be seen."""
        return any(self.external.get(item, frozenset()) - {"object", "ABC", "Generic"} for item in self.mro(ref))

    def has_alternative_bases(self, ref: Ref) -> bool:
        """Whether a class, or one above it, derives from one of several classes; which of them is decided elsewhere."""
        return not self.alternative_bases.isdisjoint(self.mro(ref))

    def is_interface(self, ref: Ref) -> bool:
        """Whether a class only declares what others provide, as zope's do: calling it adapts, methods have no self."""
        return any("Interface" in self.external.get(item, ()) for item in self.mro(ref))

    def is_enum(self, ref: Ref) -> bool:
        return any(name.endswith(("Enum", "Flag")) for item in self.mro(ref) for name in self.external.get(item, ()))

    def own_members(self, ref: Ref, name: str) -> list[Member]:
        """Every binding of ``name`` in the class body that can be in force, patches from outside included."""
        found = self.written_members(ref, name)
        for patch in self.class_patches.get((ref, name), ()):
            if patch.replaces:
                found = [member for member in found if member.owner[0] != ref[0]]
            found.append(Member(patch.place, (patch.line, -1, patch.value)))
        return found

    def written_members(self, ref: Ref, name: str) -> list[Member]:
        """The bindings of ``name`` that the class body leaves behind."""
        bindings = self.scope(ref).bindings.get(name)
        if bindings and ref[0] in self.dead:
            bindings = [binding for binding in bindings if binding[1] not in self.dead[ref[0]]]
        return [Member(ref, binding) for binding in final(bindings)] if bindings else []

    def is_replaced(self, ref: Ref) -> bool:
        """Whether a method of a class body is assigned anew behind it, so that no call by its name runs it."""
        scope = self.scope(ref)
        patches = self.class_patches.get(((ref[0], scope.parent), scope.name), ())
        return any(patch.replaces and ref not in patch.functions for patch in patches)

    def members(self, ref: Ref, name: str, after: Ref | None = None) -> list[Member]:
        """The first class of the MRO that binds ``name`` (behind ``after``, for ``super()``), with its bindings."""
        order = self.mro(ref)
        if after is not None and after in order:
            order = order[order.index(after) + 1 :]
        for item in order:
            found = self.own_members(item, name)
            if found:
                return found
        return []


def _templates(files: list[tuple[str, FileFacts]]) -> set[int]:
    """The files that generated ones name as their source: nothing runs them, and what they leave out is filled in."""
    named = [(path, facts.generated_from) for path, facts in files if facts.generated_from]
    if not named:
        return set()
    wanted: set[tuple[str, ...]] = set()
    for path, source in named:
        tail = tuple(part for part in source.split("/") if part not in ("", ".", ".."))
        wanted |= {tuple(path.split(os.sep)[:-1][-2:]) + tail[-1:]} | ({tail[-3:]} if len(tail) > 1 else set())
    found = set()
    for number, (path, facts) in enumerate(files):
        parts = tuple(path.split(os.sep))
        if not facts.generated_from and not wanted.isdisjoint((parts[-3:], parts[-2:])):
            found.add(number)
    return found


def final(bindings: Iterable[Binding]) -> list[Binding]:
    """Bindings that may be in force at the end of a block: back to the last unconditional one."""
    found: list[Binding] = []
    for binding in reversed(list(bindings)):
        found.append(binding)
        if binding[1] < 0:
            break
    return found


def _merge(sequences: list[list[Ref]]) -> list[Ref]:
    """C3 linearization; where it has no answer, the first remaining head wins."""
    result: list[Ref] = []
    sequences = [sequence for sequence in sequences if sequence]
    while sequences:
        head = next(
            (s[0] for s in sequences if not any(s[0] in other[1:] for other in sequences)),
            sequences[0][0],
        )
        result.append(head)
        sequences = [rest for s in sequences if (rest := [item for item in s if item != head])]
    return result


def _common(left: tuple[str, ...], right: tuple[str, ...]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count
