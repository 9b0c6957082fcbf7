"""Drift mode: the hook that one class of a family lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from hwbackends.checker.suppress import Selection
from tests.checker.trees import brief, line_of, shown, write

LOW = Selection(select=("HWB109",), confidence="low")
HOOK = "    def commit(self, steps): return steps\n"
OTHER = "    def other(self): return 1\n"


def family(root: Path, declared: str, npu: str, caller: str = "        self.commit(1)\n") -> Path:
    """A base with a caller, two classes that define `commit`, and one for the NPU."""
    classes = {
        "cuda.py": f"from base import Backend\nclass Cuda(Backend):\n{HOOK}",
        "xpu.py": f"from base import Backend\nclass Xpu(Backend):\n{HOOK}",
        "npu.py": f"from base import Backend\nclass Npu(Backend):\n{npu}",
    }
    imports = "import npu\nfrom abc import abstractmethod\n"
    return write(root, {"base.py": f"{imports}class Backend:\n{declared}    def step(self):\n{caller}"} | classes)


DECLARED = {
    "not at all": "",
    "with NotImplementedError": "    def commit(self, steps): raise NotImplementedError\n",
    "abstract": "    @abstractmethod\n    def commit(self, steps): ...\n",
}


@pytest.mark.parametrize("declared", DECLARED.values(), ids=DECLARED.keys())
def test_a_hook_that_the_base_only_declares_is_missed_where_all_siblings_define_it(
    tmp_path: Path, declared: str
) -> None:
    (found,) = shown(family(tmp_path, declared, OTHER))
    assert (found.rule, found.missing, found.confidence) == ("HWB109", ("commit",), "medium")
    assert found.definition is not None
    assert found.call is not None
    assert (found.definition.name, found.definition.file) == ("Npu", str(tmp_path / "npu.py"))
    assert found.call.line == line_of(tmp_path / "base.py", "self.commit(1)")
    assert "the 2 other classes of the family" in found.message


def test_the_hook_is_missed_through_a_receiver_of_a_declared_type(tmp_path: Path) -> None:
    family(tmp_path, DECLARED["abstract"], OTHER, caller="        pass\n")
    assert not shown(tmp_path)
    write(tmp_path, {"use.py": "from base import Backend\ndef go(backend: Backend):\n    backend.commit(1)\n"})
    assert brief(shown(tmp_path)) == {("HWB109", "Npu", ("commit",))}


SILENT = {
    "the base does something by itself": ("    def commit(self, steps): return steps\n", OTHER),
    "the base has a default that does nothing": ("    def commit(self, steps): pass\n", OTHER),
    "the class defines the hook": ("", HOOK),
    "the class says that it has none": ("", "    def commit(self, steps): raise NotImplementedError\n"),
    "the class assigns the hook in its body": ("", "    commit = print\n"),
    "the class assigns the hook to itself": ("", "    def __init__(self): self.commit = print\n"),
    "the class answers for any name": ("", "    def __getattr__(self, name): return print\n"),
    "the class does not run the caller": ("", "    def step(self): return 1\n"),
}


@pytest.mark.parametrize(("declared", "npu"), SILENT.values(), ids=SILENT.keys())
def test_nothing_is_missed_where(tmp_path: Path, declared: str, npu: str) -> None:
    assert not shown(family(tmp_path, declared, npu), selection=LOW)


CALLERS = {
    "the attribute is asked for": "        if hasattr(self, 'commit'):\n            self.commit(1)\n",
    "the type is asked for": "        if not isinstance(self, npu.Npu):\n            self.commit(1)\n",
    "an error is expected": "        try:\n            self.commit(1)\n        except AttributeError: pass\n",
    "the platform is asked for": "        if not is_npu():\n            self.commit(1)\n",
}


@pytest.mark.parametrize("caller", CALLERS.values(), ids=CALLERS.keys())
def test_nothing_is_missed_by_a_call_where(tmp_path: Path, caller: str) -> None:
    assert not shown(family(tmp_path, "", OTHER, caller), selection=LOW)


def test_nothing_is_missed_where_the_family_is_open(tmp_path: Path) -> None:
    family(tmp_path, "", OTHER)
    write(
        tmp_path, {"npu.py": "from elsewhere import Mixin\nfrom base import Backend\nclass Npu(Mixin, Backend): pass\n"}
    )
    assert not shown(tmp_path, selection=LOW)


def test_a_class_for_hardware_that_is_a_marker_is_of_low_confidence(tmp_path: Path) -> None:
    family(tmp_path, DECLARED["abstract"], OTHER + "    def load(self): raise NotImplementedError\n")
    assert not shown(tmp_path)
    assert {f.confidence for f in shown(tmp_path, selection=LOW)} == {"low"}


def test_two_classes_without_a_hook_are_another_kind_of_class(tmp_path: Path) -> None:
    family(tmp_path, "", OTHER)
    write(tmp_path, {"tpu.py": f"from base import Backend\nclass Tpu(Backend):\n{OTHER}"})
    assert not shown(tmp_path, selection=LOW)


def test_a_class_that_lacks_several_hooks_is_of_low_confidence(tmp_path: Path) -> None:
    family(tmp_path, "", OTHER, caller="        self.commit(1)\n        self.prepare(1)\n")
    for name in ("cuda", "xpu"):
        path = tmp_path / f"{name}.py"
        path.write_text(path.read_text() + "    def prepare(self, batch): return batch\n")
    assert not shown(tmp_path)
    assert {f.missing for f in shown(tmp_path, selection=LOW)} == {("commit",), ("prepare",)}


SHARED = {
    "an abstract hook in a file of its own": ("abstract", OTHER, "medium"),
    "a hook that raises in the base": ("with NotImplementedError", OTHER, "low"),
    "an empty class": ("abstract", "    pass\n", "low"),
    "a class that is abstract itself": (
        "abstract",
        "    @abstractmethod\n    def other(self): ...\n    def more(self): return 1\n",
        "low",
    ),
}


@pytest.mark.parametrize(("declared", "body", "confidence"), SHARED.values(), ids=SHARED.keys())
def test_a_class_for_no_hardware_is_trusted_as_far_as_its_base_is_abstract(
    tmp_path: Path, declared: str, body: str, confidence: str
) -> None:
    family(tmp_path, DECLARED[declared], HOOK)
    imports = "from abc import abstractmethod\nfrom base import Backend\n"
    write(tmp_path, {"fast.py": f"{imports}class Fast(Backend):\n{body}"})
    (found,) = shown(tmp_path, selection=LOW)
    assert (found.definition and found.definition.name, found.confidence) == ("Fast", confidence)
