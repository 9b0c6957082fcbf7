"""The rules: one record each, from which ``--explain`` and ``docs/checker.md`` are printed."""

from __future__ import annotations

from typing import NamedTuple


class Rule(NamedTuple):
    """A rule's id, what it finds, why that matters, and one bad and one good example."""

    id: str
    title: str
    severity: str
    default: bool
    text: str
    bad: str
    good: str

    @property
    def modes(self) -> str:
        """In which of the two modes the rule finds anything."""
        return "contract mode only" if self.id in _CONTRACT_ONLY else "contract and drift mode"


_CONTRACT_ONLY = frozenset({"HWB104", "HWB107", "HWB110"})


RULES: dict[str, Rule] = {
    rule.id: rule
    for rule in (
        Rule(
            "HWB101", "definition lacks a keyword", "error", True,
            "A call passes a keyword that this definition does not take, while another definition that the same call "
            "can reach does (or, in contract mode, the contract lists it). The call works until it meets this "
            "definition, usually on other hardware, and ends there with TypeError.",
            "class Base:\n"
            "    def commit(self, steps, req_pool_indices=None): ...\n"
            "    def step(self):\n"
            "        self.commit(steps=1, req_pool_indices=2)\n\n"
            "class Npu(Base):\n"
            "    def commit(self, steps): ...  # HWB101: lacks 'req_pool_indices'",
            "class Npu(Base):\n    def commit(self, steps, req_pool_indices=None): ...",
        ),
        Rule(
            "HWB102", "definition requires an extra parameter", "error", True,
            "A definition requires a parameter that a call omits, while another definition that the same call can "
            "reach does without it (or the contract lets callers omit it).",
            "class Base:\n"
            "    def matmul(self, x): ...\n"
            "    def run(self):\n"
            "        self.matmul(x=1)\n\n"
            "class Cpu(Base):\n"
            "    def matmul(self, x, offset): ...  # HWB102: requires 'offset'",
            "class Cpu(Base):\n    def matmul(self, x, offset=None): ...",
        ),
        Rule(
            "HWB103", "positional arguments do not fit", "error", True,
            "A call passes more positional arguments than a definition takes, fills one parameter twice, or, in "
            "contract mode, the definition has the contract's parameters in another order while callers pass them by "
            "position.",
            "class Base:\n"
            "    def load(self, name, revision, patterns): ...\n"
            "    def run(self):\n"
            "        self.load('m', None, [])\n\n"
            "class Quantized(Base):\n"
            "    def load(self, name, revision): ...  # HWB103: takes 2, gets 3",
            "class Quantized(Base):\n    def load(self, name, revision, patterns): ...",
        ),
        Rule(
            "HWB104", "default differs from the contract", "warning", True,
            "A parameter has another default than the contract writes, so that the same call means "
            "different things on different backends.",
            "# the contract writes default: false\n"
            "class Npu:\n"
            "    def init_forward_metadata_out_graph(self, forward_batch, in_capture=True): ...  # HWB104",
            "class Npu:\n    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False): ...",
        ),
        Rule(
            "HWB105", "call passes an unknown keyword", "error", True,
            "No definition that the call can reach takes the keyword (or the contract does not list it).",
            "def fuse(x, gate): ...\n\nfuse(1, gate=2, quant=3)  # HWB105: nobody takes 'quant'",
            "fuse(1, gate=2)",
        ),
        Rule(
            "HWB106", "call omits a required parameter", "error", True,
            "Every definition that the call can reach requires a parameter that the call does not pass (or the "
            "contract requires it).",
            "def gather(batch, tp_size, cp_size): ...\n\ngather(batch=1, tp_size=2)  # HWB106: omits 'cp_size'",
            "gather(batch=1, tp_size=2, cp_size=1)",
        ),
        Rule(
            "HWB107", "parameter accepted but never read", "warning", False,
            "A definition takes a parameter of the contract and never looks at "
            "it. The call succeeds and silently does something else.",
            "class Npu:\n"
            "    def update_mamba_state_after_mtp_verify(self, steps, req_pool_indices=None):\n"
            "        return self.metadata.slots[steps]  # HWB107: 'req_pool_indices' is never read",
            "class Npu:\n"
            "    def update_mamba_state_after_mtp_verify(self, steps, req_pool_indices=None):\n"
            "        return self.mapping[req_pool_indices][steps]",
        ),
        Rule(
            "HWB108", "catch-all never read", "warning", True,
            "A definition takes *args or **kwargs and never looks at them. In drift mode: a call passes a keyword that "
            "ends there, while another definition, otherwise alike, names and reads it: no TypeError, but the argument "
            "is lost. In contract mode: every future parameter of the hook would be lost.",
            "class Base:\n"
            "    def replay(self, bs, rows, track=None): return bs, rows, track\n"
            "    def run(self):\n"
            "        self.replay(1, 2, track=3)\n\n"
            "class Npu(Base):\n"
            "    def replay(self, bs, rows, **kwargs): return bs, rows  # HWB108: loses 'track'",
            "class Npu(Base):\n    def replay(self, bs, rows, track=None): return bs, rows, track",
        ),
        Rule(
            "HWB109", "hook missing in a family member", "error", True,
            "In contract mode: a module marks functions as hooks of the contract, or a class writes several of its "
            "hooks, and a hook that the contract requires (optional: false) is left out. In drift mode: a class is the "
            "only one of its family without a method that is called on the family, and the base does not declare it, "
            "or only as abstract or with NotImplementedError. That has medium confidence for a class that is written "
            "for one kind of hardware and for an abstract method, where nothing else is lacking; else low.",
            "@hookimpl\ndef probe(device=None): ...\n@hookimpl\ndef conv_decode(x): ...\n"
            "# HWB109: conv_extend, which the contract requires, is not defined",
            "@hookimpl\ndef conv_extend(x): ...",
        ),
        Rule(
            "HWB110", "definition that the contract does not allow", "error", True,
            "An implementation would hide a drift, or is none: a default where the contract has none (an argument that "
            "was left out is not noticed), *args or **kwargs, a coroutine or generator, a name that is bound to no "
            "function, a function with a hook's name and without the mark, a marked one that no hook is called. The "
            "registry refuses all of these when it binds the plugin. Only for contracts that name every parameter, as "
            "our own do; definitions of an engine's hooks need only accept what their callers pass.",
            "# the contract: conv_decode(x, weight, bias, state, metadata, ...)\n"
            "@hookimpl\n"
            "def conv_decode(x, weight, bias=None, state=None, metadata=None): ...  # HWB110: hides a gap",
            "@hookimpl\ndef conv_decode(x, weight, bias, state, metadata): ...",
        ),
        Rule(
            "HWB201", "file not readable", "error", True,
            "A file or folder of the tree was not checked: syntax error, encoding, size, nesting so deep that the "
            "parser gives up, a link out of the tree or in a circle, or no permission. The rest of the tree is still "
            "checked. It cannot be ignored inline; exclude the file if it is meant to be so.",
            "def broken(:  # HWB201: syntax error",
            "def repaired(): ...",
        ),
        Rule(
            "HWB202", "internal error of the checker", "error", True,
            "The checker itself failed on one file or call. Everything else was checked and is reported; here the "
            "report is incomplete. The exit status is 3. It is shown whatever is selected, and neither a comment nor "
            "a baseline hides it.",
            "# HWB202: internal error while checking a call: IndexError: ...",
            "# report the line, exclude the file meanwhile",
        ),
    )
}  # fmt: skip


DECLARATIONS = (
    "A body that only documents, passes (`...`, `pass`) or raises `NotImplementedError` is a declaration: it may\n"
    "accept a call, but it is no finding. In the examples `...` stands for a body that does something."
)


def explain(rule: Rule) -> str:
    """A rule as one section of Markdown."""
    state = "on by default" if rule.default else "off unless selected"
    return (
        f"## {rule.id}: {rule.title}\n\n{rule.text}\n\nSeverity: {rule.severity}; {state}; {rule.modes}.\n\n"
        f"Bad:\n\n```python\n{rule.bad}\n```\n\nGood:\n\n```python\n{rule.good}\n```\n"
    )


def expand(names: tuple[str, ...]) -> frozenset[str]:
    """Rule ids of a selection; ``ALL`` and prefixes such as ``HWB1`` are allowed.

    Raises:
        ValueError: a name matches no rule.
    """
    found: set[str] = set()
    for name in names:
        matching = {rule for rule in RULES if rule.startswith(name)} if name != "ALL" else set(RULES)
        if not name or not matching:
            raise ValueError(f"no rule is called {name!r}; rules are {', '.join(RULES)}")
        found |= matching
    return frozenset(found)
