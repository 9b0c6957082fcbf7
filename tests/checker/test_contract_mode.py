"""Contract mode: every form in which a hook is defined or called is held to the contract file."""

from __future__ import annotations

from pathlib import Path

import pytest

from hwbackends.checker.suppress import Selection
from hwbackends.contract.reader import installed, read
from hwbackends.errors import ContractError
from tests.checker.trees import brief, line_of, shown, write

CONTRACT = """
    contract: sample
    version: "1"
    hooks:
      - name: update_state_after_verify
        parameters:
          - {name: steps}
          - {name: track_indices, optional: true, default: null}
          - {name: req_pool_indices, optional: true, default: null}
      - name: init_metadata_out_graph
        parameters:
          - {name: batch, any_name: true}
          - {name: in_capture, optional: true, default: false}
"""
GOOD = "steps, track_indices=None, req_pool_indices=None"
LACKING = "steps, track_indices=None"


@pytest.fixture
def contract(tmp_path: Path) -> Path:
    return write(tmp_path / "contracts", {"sample.yaml": CONTRACT}) / "sample.yaml"


FORMS = {
    "a method": "class Npu:\n    def update_state_after_verify(self, {p}):\n        return {r}\n",
    "a class nested in a function": (
        "def make():\n    class Npu:\n        def update_state_after_verify(self, {p}):\n            return {r}\n    return Npu\n"  # noqa: E501
    ),
    "a class built in __new__": (
        "class Outer:\n    def __new__(cls):\n        class Npu:\n            def update_state_after_verify(self, {p}):\n"  # noqa: E501
        "                return {r}\n        return Npu()\n"
    ),
    "an async method": "class Npu:\n    async def update_state_after_verify(self, {p}):\n        return {r}\n",
    "a decorated method": (
        "import functools\nclass Npu:\n    @functools.lru_cache\n    def update_state_after_verify(self, {p}):\n        return {r}\n"  # noqa: E501
    ),
    "an assignment that replaces a method": (
        "class Npu:\n    pass\ndef other(self, {p}):\n    return {r}\nNpu.update_state_after_verify = other\n"
    ),
    "an assignment in the class body": (
        "def other(self, {p}):\n    return {r}\nclass Npu:\n    update_state_after_verify = other\n"
    ),
    "setattr": "class Npu:\n    pass\ndef other(self, {p}):\n    return {r}\nsetattr(Npu, 'update_state_after_verify', other)\n",  # noqa: E501
    "a class built by type()": (
        "def other(self, {p}):\n    return {r}\nNpu = type('Npu', (), {{'update_state_after_verify': other}})\n"
    ),
    "a partial": (
        "from functools import partial\ndef other(scale, {p}):\n    return scale, {r}\n"
        "class Npu:\n    def __init__(self):\n        self.update_state_after_verify = partial(other, 3)\n"
    ),
    "a forwarder": (
        "def other({p}):\n    return {r}\n"
        "class Npu:\n    def update_state_after_verify(self, *args, **kwargs):\n        return other(*args, **kwargs)\n"
    ),
    "a definition under a condition": (
        "import sys\nclass Npu:\n    if sys.platform == 'linux':\n        def update_state_after_verify(self, {p}):\n"
        "            return {r}\n"
    ),
    "a marked function": "from x import hookimpl\n@hookimpl\ndef update_state_after_verify({p}):\n    return {r}\n",
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_definition_is_found_when_it_lacks_a_parameter(tmp_path: Path, contract: Path, form: str) -> None:
    bad = FORMS[form].format(p=LACKING, r="steps, track_indices")
    good = FORMS[form].format(p=GOOD, r="steps, track_indices, req_pool_indices")
    (found,) = shown(write(tmp_path / "bad", {"npu.py": bad}), contract=contract)
    assert (found.rule, found.missing) == ("HWB101", ("req_pool_indices",))
    assert found.definition is not None
    assert found.definition.line == line_of(tmp_path / "bad/npu.py", LACKING)
    assert not shown(write(tmp_path / "good", {"npu.py": good}), contract=contract)


CALLS = {
    "unknown keyword": ("b.update_state_after_verify(steps=1, rows=2)", "HWB105", ("rows",)),
    "omitted parameter": ("b.update_state_after_verify(track_indices=2)", "HWB106", ("steps",)),
    "surplus position": ("b.update_state_after_verify(1, 2, 3, 4)", "HWB103", ("4th positional",)),
}


@pytest.mark.parametrize("case", CALLS)
def test_each_faulty_call_is_found(tmp_path: Path, contract: Path, case: str) -> None:
    call, rule, missing = CALLS[case]
    write(tmp_path / "tree", {"caller.py": f"def commit(b):\n    return {call}\n"})
    (found,) = shown(tmp_path / "tree", contract=contract)
    assert (found.rule, found.missing) == (rule, missing)
    assert found.call is not None
    assert (found.call.file, found.call.line) == (str(tmp_path / "tree/caller.py"), 2)


def test_calls_that_fit_are_silent(tmp_path: Path, contract: Path) -> None:
    source = """
        class Base:
            def update_state_after_verify(self, steps, track_indices=None, req_pool_indices=None):
                return steps, track_indices, req_pool_indices
        class Sub(Base):
            def update_state_after_verify(self, *args, **kwargs):
                return super().update_state_after_verify(*args, **kwargs)
        def commit(b, extra):
            b.update_state_after_verify(1)
            b.update_state_after_verify(1, 2, req_pool_indices=3)
            b.update_state_after_verify(*extra)
            b.update_state_after_verify(steps=1, **extra)
    """
    assert not shown(write(tmp_path / "tree", {"caller.py": source}), contract=contract)


def test_a_definition_may_not_require_what_callers_may_omit(tmp_path: Path, contract: Path) -> None:
    source = "class Npu:\n    def init_metadata_out_graph(self, forward_batch, in_capture):\n        return forward_batch, in_capture\n"  # noqa: E501
    found = shown(write(tmp_path / "tree", {"npu.py": source}), contract=contract)
    assert brief(found) == {("HWB102", "Npu.init_metadata_out_graph", ("in_capture",))}


def test_parameters_in_another_order_are_found(tmp_path: Path, contract: Path) -> None:
    source = (
        "class Npu:\n    def update_state_after_verify(self, track_indices, steps, req_pool_indices=None):\n"
        "        return track_indices, steps, req_pool_indices\n"
    )
    found = shown(write(tmp_path / "tree", {"npu.py": source}), contract=contract)
    assert {f.rule for f in found} & {"HWB102", "HWB103"}


def test_another_default_is_found(tmp_path: Path, contract: Path) -> None:
    source = (
        "class Npu:\n    def init_metadata_out_graph(self, batch, in_capture=True):\n        return batch, in_capture\n"
    )
    found = shown(write(tmp_path / "tree", {"npu.py": source}), contract=contract)
    assert brief(found) == {("HWB104", "Npu.init_metadata_out_graph", ("in_capture",))}


def test_a_parameter_only_swallowed_by_an_unread_catch_all_is_lacking(tmp_path: Path, contract: Path) -> None:
    source = (
        "class Npu:\n    def update_state_after_verify(self, steps, track_indices=None, *args, **kwargs):\n"
        "        return steps, track_indices\n"
    )
    found = shown(write(tmp_path / "tree", {"npu.py": source}), contract=contract)
    assert brief(found) == {("HWB101", "Npu.update_state_after_verify", ("req_pool_indices",))}


def test_an_unread_parameter_is_found_when_selected(tmp_path: Path, contract: Path) -> None:
    source = f"class Npu:\n    def update_state_after_verify(self, {GOOD}):\n        return self.metadata[steps], track_indices\n"  # noqa: E501
    tree = write(tmp_path / "tree", {"npu.py": source})
    assert not shown(tree, contract=contract)
    found = shown(tree, contract=contract, selection=Selection(select=("HWB107",)))
    assert brief(found) == {("HWB107", "Npu.update_state_after_verify", ("req_pool_indices",))}


def test_a_plugin_module_without_a_required_hook_is_found(tmp_path: Path, contract: Path) -> None:
    extra = "      - name: clear_all_slots\n        optional: false\n        parameters: []\n"
    longer = write(tmp_path / "contracts", {"longer.yaml": CONTRACT.rstrip() + "\n" + extra})
    source = (
        "from x import hookimpl\n@hookimpl\ndef update_state_after_verify(steps, track_indices=None, req_pool_indices=None):\n"  # noqa: E501
        "    return steps, track_indices, req_pool_indices\n"
        "@hookimpl\ndef init_metadata_out_graph(batch, in_capture=False):\n    return batch, in_capture\n"
    )
    tree = write(tmp_path / "tree", {"plugin.py": source})
    found = shown(tree, contract=longer / "longer.yaml")
    assert brief(found) == {("HWB109", "update_state_after_verify", ("clear_all_slots",))}


def test_a_class_without_a_required_hook_is_found_and_one_that_inherits_it_is_not(tmp_path: Path) -> None:
    text = """
        hooks:
          - {name: update_state_after_verify, optional: false, parameters: [{name: steps}]}
          - {name: init_metadata_out_graph, optional: false, parameters: [{name: batch}]}
          - {name: conv_state_metadata, optional: false, parameters: [{name: layer_id}]}
    """
    contract = write(tmp_path, {"three.yaml": text}) / "three.yaml"
    two = (
        "    def update_state_after_verify(self, steps):\n        return steps\n"
        "    def init_metadata_out_graph(self, batch):\n        return batch\n"
    )
    third = "    def conv_state_metadata(self, layer_id):\n        return layer_id\n"
    source = f"class Base:\n{third}class Cuda(Base):\n{two}class Npu:\n{two}"
    found = shown(write(tmp_path / "tree", {"backends.py": source}), contract=contract)
    assert brief(found) == {("HWB109", "Npu", ("conv_state_metadata",))}


def test_a_plain_helper_with_a_hooks_name_is_not_a_hook(tmp_path: Path, contract: Path) -> None:
    source = "def update_state_after_verify(a, b):\n    return a, b\nupdate_state_after_verify(1, 2)\n"
    assert not shown(write(tmp_path / "tree", {"helper.py": source}), contract=contract)


@pytest.mark.parametrize(
    "text", ["hooks: 3", "- 1", "hooks:\n  - {parameters: []}", "hooks: [", "hooks:\n  - {name: a, parameters: [3]}"]
)
def test_a_contract_that_cannot_be_used_is_a_named_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ContractError, match=r"broken\.yaml"):
        read(path)


def test_the_projects_own_tree_keeps_its_own_contract() -> None:
    root = Path(__file__).parents[2]
    assert list(installed()) == ["step", "conv", "ssm"]
    assert not shown(root / "hwbackends", contract=root / "contracts/conv.yaml")


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_engine_contracts_load_and_list_their_hooks_parameters(engine: str) -> None:
    contract = read(Path(__file__).parents[2] / f"contracts/engines/{engine}.yaml")
    assert list(contract) == [engine]
    assert all(len({p.name for p in hook.parameters}) == len(hook.parameters) for hook in contract.hooks.values())
