"""The `rocm` backend's probe, and the choice between `rocm` and `cuda`: every answer, with its way out, on machines
that a test makes up. No torch is imported for it."""

from __future__ import annotations

import os
import re
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from hwbackends import doctor
from hwbackends.cuda import probe as cuda_module
from hwbackends.registry.candidates import State, discover
from hwbackends.registry.candidates import probe as probe_candidate
from hwbackends.registry.selection import Request, Selection, select
from hwbackends.rocm import architectures
from hwbackends.rocm import probe as module
from hwbackends.triton_ops import wheel

ROCM = "__version__ = '2.13.0+rocm7.1'\ncuda: Optional[str] = None\nhip: Optional[str] = '7.1.25424'\n"
CUDA = "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
CPU = "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"
MI300X, RX7900, RX9070, VEGA = 90402, 110000, 120001, 90000


class Machine:
    """What the test says is installed and plugged in."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.packages = root, {"torch", "triton"}
        self.nvidia: list[tuple[int, int]] = []
        (root / "backends" / "amd").mkdir(parents=True)
        for found in (module, cuda_module, wheel):
            monkeypatch.setattr(found, "find_spec", self.find_spec)
        monkeypatch.setattr(module, "DRIVER", root / "kfd")
        monkeypatch.setattr(cuda_module, "AMD_DRIVER", root / "kfd")
        monkeypatch.setattr(module, "TOPOLOGY", root / "nodes")
        monkeypatch.setattr(cuda_module, "capabilities", lambda: self.nvidia)
        self.triton("3.9.0")
        limits = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "HSA_OVERRIDE_GFX_VERSION")
        for name in ("TRITON_INTERPRET", *limits):
            monkeypatch.delenv(name, raising=False)

    def find_spec(self, name: str) -> ModuleSpec | None:
        return ModuleSpec(name, None, origin=str(self.root / "__init__.py")) if name in self.packages else None

    def torch(self, text: str) -> None:
        (self.root / "version.py").write_text(text)

    def triton(self, version: str) -> None:
        (self.root / "__init__.py").write_text(f"__version__ = '{version}'\n")

    def amd(self, *versions: int) -> None:
        """An AMD driver, a processor as node 0, and GPUs of these `gfx_target_version`s."""
        (self.root / "kfd").touch()
        for index, version in enumerate((0, *versions)):
            node = self.root / "nodes" / str(index)
            node.mkdir(parents=True)
            count = 304 if version else 0
            (node / "properties").write_text(f"cpu_cores_count 8\nsimd_count {count}\ngfx_target_version {version}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def chosen(name: str | None = None, device: str | None = "cuda") -> Selection:
    """What `load(name, device)` would take of the backends of this package."""
    ours = [c for c in discover() if c.name in ("cuda", "rocm", "reference")]
    return select(Request(name, device), [probe_candidate(c, device) for c in ours])


def test_a_rocm_torch_on_an_amd_machine_is_served_by_rocm(machine: Machine) -> None:
    machine.torch(ROCM)
    machine.amd(MI300X, MI300X)
    assert module.probe() == (True, "torch 2.13.0+rocm7.1, built for ROCm 7.1.25424, gfx942, gfx942", "")
    assert module.probe("cuda:1").available


@pytest.mark.parametrize(("text", "wanted"), [(ROCM, "rocm"), (CUDA, "cuda")], ids=["rocm", "cuda"])
@pytest.mark.parametrize("device", ["cuda", "cuda:0", None])
def test_the_build_of_torch_decides_which_backend_serves_device_cuda(
    machine: Machine, text: str, wanted: str, device: str | None
) -> None:
    machine.torch(text)
    machine.amd(MI300X)
    machine.nvidia = [(9, 0)]
    assert chosen(device=device).candidate.name == wanted


@pytest.mark.parametrize(("text", "other"), [(ROCM, "cuda"), (CUDA, "rocm")], ids=["rocm", "cuda"])
def test_an_explicit_name_holds_and_is_refused_with_the_build_of_torch(machine: Machine, text: str, other: str) -> None:
    machine.torch(text)
    machine.amd(MI300X)
    machine.nvidia = [(9, 0)]
    with pytest.raises(Exception, match=r"torch 2\.13\.0\+[\w.]+, built for (ROCm|CUDA)") as raised:
        chosen(other)
    assert other in str(raised.value)
    mine = "rocm" if other == "cuda" else "cuda"
    assert chosen(mine).candidate.name == mine


def test_a_cuda_torch_on_an_amd_machine_is_told_by_both(machine: Machine) -> None:
    machine.torch(CUDA)
    machine.amd(MI300X)
    theirs, ours = cuda_module.probe("cuda"), module.probe("cuda")
    assert not theirs.available
    assert "no CUDA device is visible, and this machine has an AMD GPU driver" in theirs.reason
    assert theirs.hint.startswith("install a ROCm build of torch")
    assert not ours.available
    assert "built for CUDA 13.0; this machine has an AMD GPU driver" in ours.reason
    assert ours.hint == "install a ROCm build of torch"


def test_a_cpu_torch_on_an_amd_machine_is_told_what_to_install(machine: Machine) -> None:
    machine.torch(CPU)
    machine.amd(MI300X)
    assert "built for the CPU alone; this machine has an AMD GPU driver" in module.probe().reason
    assert cuda_module.probe().reason == "torch 2.13.0+cpu, built for the CPU alone"


def test_a_rocm_torch_is_told_by_cuda_too(machine: Machine) -> None:
    machine.torch(ROCM)
    machine.nvidia = [(9, 0)] * 4
    found = cuda_module.probe("cuda")
    assert found[:2] == (False, "torch 2.13.0+rocm7.1, built for ROCm 7.1.25424")
    assert found.hint.startswith("load the rocm backend")


def test_a_rocm_torch_without_a_driver_is_told(machine: Machine) -> None:
    machine.torch(ROCM)
    found = module.probe()
    assert not found.available
    assert "but there is no AMD GPU driver" in found.reason
    assert "--device=" in found.hint


def test_a_driver_that_this_user_may_not_open_is_told(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.torch(ROCM)
    machine.amd(MI300X)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = module.probe()
    assert (found.available, "may not be opened" in found.reason, "render" in found.hint) == (False, True, True)


def test_a_driver_without_a_gpu_is_told(machine: Machine) -> None:
    machine.torch(ROCM)
    machine.amd()
    assert module.probe()[:2] == (False, f"no AMD GPU: {module.TOPOLOGY} names none")


@pytest.mark.parametrize(("version", "name"), [(VEGA, "gfx900"), (100300, "gfx1030"), (100100, "gfx1010")])
def test_an_architecture_that_triton_does_not_know_is_named(machine: Machine, version: int, name: str) -> None:
    machine.torch(ROCM)
    machine.amd(version)
    found = module.probe()
    assert found[:2] == (False, f"{name}: an architecture that triton 3.9.0 does not know")
    assert "gfx942" in found.hint


def test_an_architecture_that_another_triton_knows_is_refused_with_that_release(machine: Machine) -> None:
    machine.torch(ROCM)
    machine.triton("3.6.0")
    machine.amd(90006)
    found = module.probe()
    assert found[:2] == (False, "gfx906: an architecture that triton 3.6.0 does not know")
    assert found.hint.startswith("install triton 3.8, or 3.9; it knows gfx908, ")
    machine.triton("3.9.1")
    assert module.probe().available


@pytest.mark.parametrize("release", architectures.KNOWN)
def test_every_release_compiles_for_the_architectures_that_are_shown(release: str) -> None:
    assert set(architectures.SHOWN) <= set(architectures.KNOWN[release])


def test_a_release_that_is_not_listed_is_taken_for_the_newest_one(machine: Machine) -> None:
    machine.triton("4.0.0")
    assert architectures.known() == list(architectures.KNOWN.values())[-1]


def told_by_the_doctor() -> dict[str, str]:
    """What `hwbackends doctor --device cuda` says of each of the two backends, and of the choice between them."""
    report = doctor.report("cuda")
    said = {b["name"]: f"{b['reason']}; {b['hint']}" for b in report["backends"] if b["name"] in ("cuda", "rocm")}
    return said | {"chosen": str(report["selection"]["name"])}


@pytest.mark.parametrize(
    ("torch", "amd", "nvidia", "rocm", "cuda"),
    [
        (ROCM, None, [], "there is no AMD GPU driver.*a container needs --device=", "built for ROCm .*load the rocm"),
        (ROCM, None, [(9, 0)], "there is no AMD GPU driver", "built for ROCm .*install a CUDA build of torch"),
        (CUDA, MI300X, [], "has an AMD GPU driver.*install a ROCm build", "has an AMD GPU driver.*install a ROCm"),
        (CPU, MI300X, [], "has an AMD GPU driver.*install a ROCm build", "built for the CPU.*install a CUDA build"),
        (ROCM, VEGA, [], "gfx900: an architecture that triton 3.9.0 does not know; it knows", "built for ROCm"),
        (CUDA, None, [(7, 5)], "built for CUDA 13.0; install a ROCm build", "compute capability 7.5: older than"),
        (CUDA, None, [(6, 1), (7, 0)], "built for CUDA", "capability 6.1, compute capability 7.0: older than triton"),
    ],
    ids=["no driver", "ROCm on NVIDIA", "CUDA on AMD", "CPU on AMD", "gfx900", "sm_75", "sm_61 and sm_70"],
)
def test_the_doctor_explains_every_mismatch_by_name_with_a_way_out(
    machine: Machine, torch: str, amd: int | None, nvidia: list[tuple[int, int]], rocm: str, cuda: str
) -> None:
    machine.torch(torch)
    machine.nvidia = nvidia
    if amd is not None:
        machine.amd(amd)
    said = told_by_the_doctor()
    assert re.search(rocm, said["rocm"]), said
    assert re.search(cuda, said["cuda"]), said
    assert said["chosen"] not in ("rocm", "cuda")


def test_beside_a_new_nvidia_gpu_an_old_one_hides_nothing(machine: Machine) -> None:
    machine.torch(CUDA)
    machine.nvidia = [(7, 0), (9, 0)]
    assert cuda_module.probe("cuda").available


def test_beside_a_known_gpu_an_unknown_one_is_refused_by_its_index_only(machine: Machine) -> None:
    machine.torch(ROCM)
    machine.amd(VEGA, RX7900)
    assert module.probe().available
    assert module.probe("cuda:1").available
    assert not module.probe("cuda:0").available


def test_an_override_of_the_architecture_counts(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.torch(ROCM)
    machine.amd(100302)
    monkeypatch.setenv("HSA_OVERRIDE_GFX_VERSION", "11.0.0")
    assert module.probe().reason.endswith("gfx1100")


@pytest.mark.parametrize(
    ("variables", "seen"),
    [
        ({}, ["gfx942", "gfx1100", "gfx1201"]),
        ({"HIP_VISIBLE_DEVICES": "2,0"}, ["gfx1201", "gfx942"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["gfx1100"]),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, ["gfx1201"]),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, ["gfx942"]),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
        ({"HIP_VISIBLE_DEVICES": "1,7,0"}, ["gfx1100"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-0123456789abcdef"}, ["gfx942"]),
    ],
    ids=str,
)
def test_the_environment_limits_the_devices(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], seen: list[str]
) -> None:
    machine.torch(ROCM)
    machine.amd(MI300X, RX7900, RX9070)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert module.visible() == seen
    found = module.probe()
    assert found.available is bool(seen)
    if not seen:
        assert "no AMD GPU is visible of 3: HIP_VISIBLE_DEVICES=" in found.reason
    assert not module.probe(f"cuda:{len(seen)}").available


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_missing_package_is_named(machine: Machine, name: str) -> None:
    machine.packages.remove(name)
    assert module.probe()[:2] == (False, f"{name} is not installed")


def test_a_triton_without_amd_s_backend_is_told(machine: Machine) -> None:
    machine.torch(ROCM)
    machine.amd(MI300X)
    (machine.root / "backends" / "amd").rmdir()
    assert module.probe().reason == "the installed triton has no AMD backend"


def test_another_device_is_refused_by_name(machine: Machine) -> None:
    assert module.probe("npu:0")[:2] == (False, "serves ROCm devices, which torch calls cuda, not npu:0")


def test_in_the_interpreter_both_run_and_the_one_that_is_named_is_taken(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.torch(CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert [chosen(name, None).candidate.name for name in ("rocm", "cuda", None)] == ["rocm", "cuda", "cuda"]
    assert not module.probe("cuda").available


def test_probing_says_available_for_each_backend_in_the_doctor_s_list(machine: Machine) -> None:
    machine.torch(ROCM)
    machine.amd(MI300X)
    states = {c.name: probe_candidate(c, "cuda").state for c in discover() if c.name in ("cuda", "rocm")}
    assert states == {"cuda": State.UNAVAILABLE, "rocm": State.AVAILABLE}


@pytest.mark.parametrize(
    ("version", "name", "lanes"),
    [(90402, "gfx942", 64), (90010, "gfx90a", 64), (110501, "gfx1151", 32), (120001, "gfx1201", 32)],
)
def test_the_driver_s_number_names_the_architecture_and_its_waves(version: int, name: str, lanes: int) -> None:
    assert architectures.of_target_version(version) == name
    assert architectures.lanes(f"{name}:sramecc+:xnack-") == lanes
