"""The contract file and what is held equal to it: schema errors with file, line and path; hookspecs and contract in
step, so that a change of either side alone turns a test red."""

from __future__ import annotations

import copy
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hwbackends.contract import hookspecs
from hwbackends.contract.reader import Contract, contracts_folder, load_contract, read_document
from hwbackends.errors import ContractError

CONTRACT = contracts_folder() / "conv_state.yaml"


def signatures_of_contract(contract: Contract) -> dict[str, list[tuple[str, object]]]:
    """Name and default of each parameter, by hook, as the contract says."""
    return {
        hook.name: [(p.name, inspect.Parameter.empty if p.required else p.default) for p in hook.parameters]
        for hook in contract.hooks.values()
    }


def signatures_of_hookspecs(functions: dict[str, Any]) -> dict[str, list[tuple[str, object]]]:
    """The same, as the hookspecs say."""
    return {
        name: [(p.name, p.default) for p in inspect.signature(function).parameters.values()]
        for name, function in functions.items()
    }


def hookspec_functions() -> dict[str, Any]:
    return {name: value for name, value in vars(hookspecs).items() if hasattr(value, "hwbackends_spec")}


def optionality_of_hookspecs(functions: dict[str, Any]) -> dict[tuple[str, str], bool]:
    """Whether each parameter may be None, by its annotation."""
    return {
        (name, p.name): p.annotation.endswith("| None")
        for name, function in functions.items()
        for p in inspect.signature(function).parameters.values()
    }


def test_hookspecs_have_the_names_order_and_defaults_of_the_contract() -> None:
    wanted = signatures_of_contract(load_contract())
    found = signatures_of_hookspecs(hookspec_functions())
    assert list(found) == list(wanted)
    assert found == wanted


def test_hookspecs_have_the_optionality_of_the_contract() -> None:
    contract = load_contract()
    wanted = {
        (hook.name, p.name): p.optional and p.default is None
        for hook in contract.hooks.values()
        for p in hook.parameters
    }
    assert optionality_of_hookspecs(hookspec_functions()) == wanted


def test_every_hookspec_is_documented_and_takes_no_catch_all() -> None:
    for name, function in hookspec_functions().items():
        assert inspect.getdoc(function), name
        kinds = {p.kind for p in inspect.signature(function).parameters.values()}
        assert kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}, name


# In C where PyYAML was built with it: the contract is read and written some hundred times here.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
DATA = yaml.load(CONTRACT.read_text(), LOADER)


def every_parameter() -> list[tuple[int, int, str]]:
    """Hook number, parameter number and name; hooks that share one list of parameters count once."""
    seen: list[object] = []
    found = []
    for number, hook in enumerate(DATA["hooks"]):
        if hook["parameters"] not in seen:
            seen.append(hook["parameters"])
            found += [(number, index, f"{hook['name']}.{p['name']}") for index, p in enumerate(hook["parameters"])]
    return found


@pytest.mark.parametrize("change", ["remove", "rename", "add", "default"])
@pytest.mark.parametrize(("number", "index", "name"), every_parameter(), ids=lambda value: str(value))
def test_a_change_of_one_parameter_in_the_contract_alone_is_seen(
    tmp_path: Path, change: str, number: int, index: int, name: str
) -> None:
    data = copy.deepcopy(DATA)
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
    path = tmp_path / "changed.yaml"
    path.write_text(yaml.dump(data, Dumper=DUMPER, sort_keys=False), encoding="utf-8")
    assert signatures_of_contract(load_contract(path)) != signatures_of_hookspecs(hookspec_functions())


def changed_source(name: str, parameter: str, change: str) -> str:
    """The source of hookspecs.py with one parameter of one hook removed, renamed or added."""
    source = inspect.getsource(hookspecs)
    start = source.index(f"def {name}(")
    end = source.index('"""', start)
    head = source[start:end]
    pattern = rf"(?<=[(\s]){parameter}(: [^,()]*(?:\[[^]]*\])?)?(, *|,\n *)?(?=[^,]*)"
    new = {"rename": rf"{parameter}_2\1\2", "add": rf"added\1, {parameter}\1\2"}
    replacement = new.get(change, "")
    changed, count = re.subn(pattern, replacement, head, count=1)
    assert count == 1
    return source[:start] + changed + source[end:]


@pytest.mark.parametrize("change", ["remove", "rename", "add"])
@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("update_mamba_state_after_mtp_verify", "req_pool_indices"),
        ("conv_decode", "metadata"),
        ("copy_slots", "source_indices"),
        ("fused_decode_add_rmsnorm", "norm_weight"),
    ],
)
def test_a_change_of_one_parameter_in_the_hookspecs_alone_is_seen(name: str, parameter: str, change: str) -> None:
    scope: dict[str, Any] = {"__name__": "changed_hookspecs"}
    exec(compile(changed_source(name, parameter, change), "changed_hookspecs.py", "exec"), scope)
    functions = {key: value for key, value in scope.items() if hasattr(value, "hwbackends_spec")}
    assert list(functions) == list(hookspec_functions())
    assert signatures_of_hookspecs(functions) != signatures_of_contract(load_contract())


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
    return load_contract(path)


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
    assert contract.clauses["SM-CLEAR-01"] is hook


BAD = {
    "a missing key": ("    optional: false\n", "", r":8: hooks.0: key 'optional' is missing"),
    "an unknown key": ("summary:", "sumary:", r":11: hooks.0.sumary: unknown key; did you mean 'summary'\?"),
    "an unknown key of a parameter": ("type: int,", "typ: int,", r":16: hooks.0.parameters.0.typ: unknown key"),
    "another kind": ("recordable: true", "recordable: maybe", r":12: hooks.0.recordable: got 'maybe', wanted true or"),
    "no mapping": ('returns: {type: "None"}', "returns: []", r":18: hooks.0.returns: got a list, wanted a mapping"),
    "an unknown type": ("type: int", "type: Pool", r":16: hooks.0.parameters.0.type: unknown type 'Pool'"),
    "an unknown dtype set": ("dtypes: index", "dtypes: indx", r":17: .*dtypes: unknown dtype set 'indx'; did you mean"),
    "an unknown dimension": ("[B + 1", "[Q + 1", r":17: hooks.0.parameters.1.shape.0: unknown dimension 'Q'"),
    "a name that Python does not take": (
        "name: pool",
        "name: 2pool",
        r":16: .*name: got '2pool', wanted a Python name",
    ),
    "a hook name that Python does not take": (
        "name: clear",
        "name: c-r",
        r":8: hooks.0.name: got 'c-r', wanted a Python",
    ),
    "a parameter twice": ("name: slots", "name: pool", r":17: hooks.0.parameters.1.name: 'pool' is there twice"),
    "an allocation word": ("may_allocate: output", "may_allocate: some", r":14: .*wanted true, false or output"),
    "a clause id": ("SM-CLEAR-01", "clear1", r":20: .*id: got 'clear1', wanted an id such as CS-VERIFY-03"),
    "a version": ('version: "1.2"', 'version: "1"', r":2: version: got '1', wanted a version such as 1.0"),
    "a version from the future": ('since: "1.1"', 'since: "1.3"', r":17: .*since: version 1.3 is newer than .* 1.2"),
    "a null default of what is not optional": (
        "optional: true, default",
        "optional: false, default",
        r":17: .*optional: true",
    ),
    "a default before a parameter without": (
        'since: "1.1"}',
        'since: "1.1"}\n      - {name: late, type: int, optional: false, since: "1.0"}',
        r":18: hooks.0.parameters.2: 'late' has no default but follows 'slots'",
    ),
    "a clause twice": (
        "text: Clears them.}",
        "text: Clears them.}\n      - {id: SM-CLEAR-01, text: Again.}",
        r":21: hooks.0.clauses.1.id: clause SM-CLEAR-01 is also in clear",
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
    with pytest.raises(ContractError, match=r":21: hooks.1.name: hook 'clear' is there twice"):
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
        (folder / "conv_state.yaml").write_text("")
        assert contracts_folder() == folder


def test_every_index_tensor_states_its_padding_value() -> None:
    contract = load_contract()
    fields = [(name, p) for name, fields in contract.types.items() for p in fields]
    fields += [(hook.name, p) for hook in contract.hooks.values() for p in hook.parameters]
    slots = [(owner, p) for owner, p in fields if p.dtypes and p.unit in ("slots", "request rows", "draft rows")]
    assert len(slots) >= 15
    assert not [f"{owner}.{p.name}" for owner, p in slots if p.padding is None]


def test_every_index_tensor_takes_both_integer_widths_or_names_its_one() -> None:
    for hook in load_contract().hooks.values():
        for p in hook.parameters:
            if p.unit in ("slots", "request rows", "draft rows", "steps"):
                assert p.dtypes == ("int32", "int64"), f"{hook.name}.{p.name}"


def test_every_hook_has_clauses_and_the_sections_of_a_contract() -> None:
    contract = load_contract()
    assert len(contract.clauses) >= 60
    assert all(hook.clauses and hook.summary for hook in contract.hooks.values())
    assert set(contract.layouts) == {"window", "ring", "lazy"}
