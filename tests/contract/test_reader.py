"""The contract files and what is held equal to them: schema errors with file, line and path; hookspecs and contracts in
step, so that a change of either side alone turns a test red."""

from __future__ import annotations

import copy
import inspect
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from hwbackends.contract.document import read_document
from hwbackends.contract.hookspecs import protocol_name
from hwbackends.contract.model import Contract, Contracts
from hwbackends.contract.reader import contracts_folder, installed, read
from hwbackends.errors import ContractError

CONTRACTS = installed()
Signatures = dict[str, list[tuple[str, object, bool]]]


def signatures_of_contract(contract: Contract) -> Signatures:
    """Name, default and whether it may be None of each parameter, by hook, as the contract says."""
    empty = inspect.Parameter.empty
    return {
        hook.name: [
            (p.name, empty if p.required else p.default, p.optional and p.default is None) for p in hook.parameters
        ]
        for hook in contract.hooks.values()
    }


def hookspecs_of(name: str) -> ModuleType:
    """The readable form of a contract."""
    return import_module(f"hwbackends.contract.hookspecs.{name}")


def signatures_of_hookspecs(module: Any, name: str) -> Signatures:
    """The same, as the hookspecs say; hooks as the family's class lists them."""
    members = getattr(module, f"{name.capitalize()}Hooks").__annotations__
    found: Signatures = {}
    for hook, annotation in members.items():
        assert annotation == protocol_name(hook), f"{hook} is typed as {annotation}"
        _self, *parameters = inspect.signature(getattr(module, annotation).__call__).parameters.values()
        found[hook] = [(p.name, p.default, p.annotation.endswith("| None")) for p in parameters]
    return found


@pytest.mark.parametrize("name", CONTRACTS)
def test_hookspecs_have_the_names_order_defaults_and_optionality_of_the_contract(name: str) -> None:
    wanted, found = signatures_of_contract(CONTRACTS[name]), signatures_of_hookspecs(hookspecs_of(name), name)
    assert list(found) == list(wanted)
    assert found == wanted


@pytest.mark.parametrize("name", CONTRACTS)
def test_hookspecs_have_the_types_of_the_contract(name: str) -> None:
    for hook in CONTRACTS[name].hooks.values():
        call = getattr(hookspecs_of(name), protocol_name(hook.name)).__call__
        _self, *parameters = inspect.signature(call).parameters.values()
        types = [p.annotation.removesuffix(" | None") for p in parameters]
        assert types == [p.type for p in hook.parameters], hook.name
        assert inspect.signature(call).return_annotation == hook.returns["type"], hook.name


@pytest.mark.parametrize("name", CONTRACTS)
def test_every_hookspec_is_documented_and_takes_no_catch_all(name: str) -> None:
    for hook in CONTRACTS[name].hooks:
        protocol = getattr(hookspecs_of(name), protocol_name(hook))
        assert protocol.__doc__, hook
        kinds = {p.kind for p in inspect.signature(protocol.__call__).parameters.values()}
        assert kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}, hook


# In C where PyYAML was built with it: the contracts are read and written some hundred times here.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
DATA = {name: yaml.load(contract.path.read_text(), LOADER) for name, contract in CONTRACTS.items()}


def every_parameter() -> list[tuple[str, int, int, str]]:
    """Contract, hook number, parameter number and name; hooks that share one list of parameters count once."""
    seen: list[object] = []
    found = []
    for contract, data in DATA.items():
        for number, hook in enumerate(data["hooks"]):
            if hook["parameters"] not in seen:
                seen.append(hook["parameters"])
                names = [p["name"] for p in hook["parameters"]]
                found += [(contract, number, index, f"{hook['name']}.{name}") for index, name in enumerate(names)]
    return found


@pytest.mark.parametrize("change", ["remove", "rename", "add", "default"])
@pytest.mark.parametrize(("name", "number", "index", "label"), every_parameter(), ids=lambda value: str(value))
def test_a_change_of_one_parameter_in_the_contract_alone_is_seen(
    tmp_path: Path, change: str, name: str, number: int, index: int, label: str
) -> None:
    data = copy.deepcopy(DATA[name])
    parameters = data["hooks"][number]["parameters"]
    if change == "remove":
        del parameters[index]
    elif change == "rename":
        parameters[index]["name"] += "_2"
    elif change == "add":
        parameters.insert(index, {**parameters[index], "name": "added"})
    else:
        for later in parameters[index:]:
            later |= {"default": "changed", "optional": True}
    for other, contract in CONTRACTS.items():
        (tmp_path / f"{other}.yaml").write_text(contract.path.read_text())
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.dump(data, Dumper=DUMPER, sort_keys=False), encoding="utf-8")
    assert signatures_of_contract(read(path)[name]) != signatures_of_hookspecs(hookspecs_of(name), name)


CHANGES = {"remove": "", "rename": "{0}_2: {1},", "add": "added: {1}, {0}: {1},"}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("name", "protocol", "parameter"),
    [
        ("step", "UpdateMambaStateAfterMtpVerify", "req_pool_indices: Tensor,"),
        ("conv", "Conv", "metadata: StepMetadata,"),
        ("step", "CopySlots", "source_indices: Tensor,"),
        ("conv", "ConvAddRmsnorm", "norm_weight: Tensor,"),
    ],
)
def test_a_change_of_one_parameter_in_the_hookspecs_alone_is_seen(
    name: str, protocol: str, parameter: str, change: str
) -> None:
    source = inspect.getsource(hookspecs_of(name))
    start = source.index("def __call__", source.index(f"class {protocol}(Protocol)"))
    new = CHANGES[change].format(*parameter.rstrip(",").split(": "))
    changed = ModuleType("changed_hookspecs")
    exec(source[:start] + source[start:].replace(parameter, new, 1), vars(changed))
    found = signatures_of_hookspecs(changed, name)
    assert list(found) == list(CONTRACTS[name].hooks)
    assert found != signatures_of_contract(CONTRACTS[name])


# --- schema -------------------------------------------------------------------------------------------------------

SMALL = """\
contract: small
version: "1.2"
dtype_sets: {index: [int32, int64]}
dimensions: {B: requests}
layouts: {}
types: {}
hooks:
  - name: clear
    since: "1.0"
    optional: false
    role: slots
    summary: Clears.
    recordable: true
    may_synchronise: false
    may_allocate: output
    parameters:
      - {name: pool, type: int, optional: false, since: "1.0"}
      - {name: slots, type: Tensor, dtypes: index, shape: [B + 1, "3"], optional: true, default: null, since: "1.1"}
    returns: {type: "None"}
    clauses:
      - {id: SM-CLEAR-01, text: Clears them.}
"""


def load_text(tmp_path: Path, text: str) -> Contract:
    path = tmp_path / "small.yaml"
    path.write_text(text, encoding="utf-8")
    return read(path)["small"]


def test_a_small_contract_is_read_whole(tmp_path: Path) -> None:
    contract = load_text(tmp_path, SMALL)
    (hook,) = contract.hooks.values()
    pool, slots = hook.parameters
    assert (contract.name, contract.version) == ("small", "1.2")
    assert (pool.required, pool.optional, pool.dtypes) == (True, False, ())
    assert (slots.required, slots.default, slots.dtypes, slots.shape) == (
        False,
        None,
        ("int32", "int64"),
        ("B + 1", "3"),
    )
    assert (hook.may_allocate, hook.recordable, hook.may_synchronise) == ("output", True, False)
    assert [clause.id for clause in hook.clauses] == ["SM-CLEAR-01"]


BAD = {
    "a missing key": ("    optional: false\n", "", r":8: hooks.0: key 'optional' is missing"),
    "an unknown key": ("summary:", "sumary:", r":12: hooks.0.sumary: unknown key; did you mean 'summary'\?"),
    "an unknown key of a parameter": ("type: int,", "typ: int,", r":17: hooks.0.parameters.0.typ: unknown key"),
    "another kind": ("recordable: true", "recordable: maybe", r":13: hooks.0.recordable: got 'maybe', wanted true or"),
    "no mapping": ('returns: {type: "None"}', "returns: []", r":19: hooks.0.returns: got a list, wanted a mapping"),
    "an unknown type": ("type: int", "type: Pool", r":17: hooks.0.parameters.0.type: unknown type 'Pool'"),
    "an unknown dtype set": ("dtypes: index", "dtypes: indx", r":18: .*dtypes: unknown dtype set 'indx'; did you mean"),
    "an unknown dimension": ("[B + 1", "[Q + 1", r":18: hooks.0.parameters.1.shape.0: unknown dimension 'Q'"),
    "a name that Python does not take": (
        "name: pool",
        "name: 2pool",
        r":17: .*name: got '2pool', wanted a Python name",
    ),
    "a hook name that Python does not take": (
        "name: clear",
        "name: c-r",
        r":8: hooks.0.name: got 'c-r', wanted a Python",
    ),
    "a parameter twice": ("name: slots", "name: pool", r":18: hooks.0.parameters.1.name: 'pool' is there twice"),
    "an allocation word": ("may_allocate: output", "may_allocate: some", r":15: .*wanted true, false or output"),
    "a clause id": ("SM-CLEAR-01", "clear1", r":21: .*id: got 'clear1', wanted an id such as CS-VERIFY-03"),
    "a version": ('version: "1.2"', 'version: "1"', r":2: version: got '1', wanted a version such as 1.0"),
    "a version from the future": ('since: "1.1"', 'since: "1.3"', r":18: .*since: version 1.3 is newer than .* 1.2"),
    "a null default of what is not optional": (
        "optional: true, default",
        "optional: false, default",
        r":18: .*optional: true",
    ),
    "a default before a parameter without": (
        'since: "1.1"}',
        'since: "1.1"}\n      - {name: late, type: int, optional: false, since: "1.0"}',
        r":19: hooks.0.parameters.2: 'late' has no default but follows 'slots'",
    ),
    "a clause twice": (
        "text: Clears them.}",
        "text: Clears them.}\n      - {id: SM-CLEAR-01, text: Again.}",
        r":22: hooks.0.clauses.1.id: clause SM-CLEAR-01 is also in clear",
    ),
    "a key twice": ("layouts: {}", "layouts: {}\nlayouts: {}", r":6: key 'layouts' is there twice"),
    "a key that is no text": ("layouts: {}", "layouts: {1.5: x}", r":5: got a float as a key, wanted text"),
    "broken YAML": ("layouts: {}", "layouts: {", r"small.yaml:\d+: not YAML: "),
    "a control character": ("layouts: {}", "layouts: {a: \x07}", r"small.yaml: not YAML: "),
}


@pytest.mark.parametrize(("old", "new", "message"), BAD.values(), ids=BAD.keys())
def test_a_malformed_contract_is_refused_with_file_line_and_path(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in SMALL
    with pytest.raises(ContractError, match=message):
        load_text(tmp_path, SMALL.replace(old, new, 1))


def test_a_hook_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r":22: hooks.1.name: hook 'clear' is there twice"):
        load_text(tmp_path, SMALL + SMALL[SMALL.index("  - name: clear") :])


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"gone.yaml: cannot be read: No such file"):
        read_document(tmp_path / "gone.yaml")
    (tmp_path / "latin.yaml").write_bytes("é".encode("latin-1"))
    with pytest.raises(ContractError, match=r"latin.yaml: not UTF-8 at byte 0"):
        read_document(tmp_path / "latin.yaml")


def test_a_file_that_is_nested_too_deep_or_contains_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deep.yaml").write_text("[" * 5000 + "]" * 5000)
    (tmp_path / "self.yaml").write_text("a: &a [*a]")
    with pytest.raises(ContractError, match=r"deep.yaml.*(nested too deep|exceeded maximum nesting depth)"):
        read_document(tmp_path / "deep.yaml")
    with pytest.raises(ContractError, match=r"self.yaml: nested too deep, or a value that contains itself"):
        read_document(tmp_path / "self.yaml")


def test_an_error_points_at_the_nearest_line_above_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "some.yaml").write_text("a:\n  b: 3\n")
    document = read_document(tmp_path / "some.yaml")
    assert str(document.error(("a", "b", "c"), "odd")) == f"{tmp_path / 'some.yaml'}:2: a.b.c: odd"
    assert str(document.error((), "odd")) == f"{tmp_path / 'some.yaml'}:1: the document: odd"


def test_contracts_come_from_the_wheel_or_the_checkout_or_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hwbackends.contract.reader as module

    monkeypatch.setattr(module, "__file__", str(tmp_path / "hwbackends" / "contract" / "reader.py"))
    with pytest.raises(ContractError, match="the contract files are not installed"):
        contracts_folder()
    for folder in (tmp_path / "contracts", tmp_path / "hwbackends" / "_contracts"):
        folder.mkdir(parents=True)
        (folder / "step.yaml").write_text("")
        assert contracts_folder() == folder


def test_every_index_tensor_states_its_padding_value() -> None:
    types = {name for contract in CONTRACTS.values() for name in contract.types}
    fields = [(name, p) for name in types for p in CONTRACTS.fields(name)]
    fields += [(hook.name, p) for hook in CONTRACTS.hooks.values() for p in hook.parameters]
    slots = [(owner, p) for owner, p in fields if p.dtypes and p.unit in ("slots", "request rows", "draft rows")]
    assert len(slots) >= 15
    assert not [f"{owner}.{p.name}" for owner, p in slots if p.padding is None]


def test_every_index_tensor_takes_both_integer_widths_or_names_its_one() -> None:
    for hook in CONTRACTS.hooks.values():
        for p in hook.parameters:
            if p.unit in ("slots", "request rows", "draft rows", "steps"):
                assert p.dtypes == ("int32", "int64"), f"{hook.name}.{p.name}"


def test_every_hook_has_clauses_and_the_sections_of_a_contract() -> None:
    assert len(CONTRACTS.clauses) >= 60
    assert all(hook.clauses and hook.summary for hook in CONTRACTS.hooks.values())
    assert set(CONTRACTS["conv"].layouts) == {"window", "ring", "lazy"}


# --- several contracts --------------------------------------------------------------------------------------------


def a_family(folder: Path, name: str, text: str) -> Contracts:
    (folder / "small.yaml").write_text(SMALL, encoding="utf-8")
    (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return installed(folder)


FAMILY = """\
contract: family
version: "2.0"
imports: [small]
types: {}
hooks:
  - name: compute
    since: "2.0"
    optional: false
    role: compute
    summary: Computes.
    recordable: true
    may_synchronise: false
    may_allocate: false
    parameters: [{name: x, type: Tensor, dtypes: index, shape: [B], optional: false, since: "2.0"}]
    returns: {type: "None"}
    clauses: [{id: FA-COMPUTE-01, text: Computes.}]
"""


def test_a_family_uses_the_words_of_what_it_imports_and_comes_behind_it(tmp_path: Path) -> None:
    contracts = a_family(tmp_path, "family", FAMILY)
    assert list(contracts) == ["small", "family"]
    assert list(contracts.hooks) == ["clear", "compute"]
    assert contracts["family"].dimensions["B"] == "requests"
    assert (contracts.owners["compute"].name, contracts.clause_text("FA-COMPUTE-01")) == ("family", "Computes.")
    assert list(contracts.only(["small"]).hooks) == ["clear"]


SEVERAL_BAD = {
    "an import that is not there": ("[small]", "[smal]", r":3: imports.0: no contract 'smal' beside it; did you mean"),
    "an import of itself": ("[small]", "[family]", r":3: imports.0: contract 'family' imports this one"),
    "a word twice": ("types: {}", "types: {}\ndimensions: {B: x}", r":5: dimensions.B: an imported contract has this"),
    "a name that is not the file's": ("contract: family", "contract: fam", r":1: contract: got 'fam', wanted 'family'"),
    "a hook of another contract": ("name: compute", "name: clear", r"hook 'clear' is also in contract small"),
    "a clause of another contract": ("FA-COMPUTE-01", "SM-CLEAR-01", r"clause SM-CLEAR-01 is also in clear"),
}


@pytest.mark.parametrize(("old", "new", "message"), SEVERAL_BAD.values(), ids=SEVERAL_BAD.keys())
def test_contracts_that_do_not_hold_together_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in FAMILY
    with pytest.raises(ContractError, match=message):
        a_family(tmp_path, "family", FAMILY.replace(old, new, 1))


def test_a_family_adds_fields_to_a_type_of_the_step_and_takes_none_away() -> None:
    own = [p.name for p in CONTRACTS["step"].types["StatePool"]]
    both = [p.name for p in CONTRACTS["conv"].types["StatePool"]]
    assert both[: len(own)] == own
    assert {"conv_streams", "draft_rows"} == set(both) - set(own) - {"layout", "width"}
