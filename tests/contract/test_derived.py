"""What is written beside the contracts, held equal to them: the classes that hooks take, phases, layouts, dtypes, tail
values, and the schema that editors read."""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

import jsonschema
import pytest
import torch
import yaml

from hwbackends.contract import claims, schema
from hwbackends.contract.hookspecs import ProbeResult
from hwbackends.contract.reader import contracts_folder, installed
from hwbackends.conv.layouts import LAYOUTS
from hwbackends.conv.state import STATE_DTYPES, ConvState, ConvStream
from hwbackends.step import checks
from hwbackends.step.batch import ForwardMode, StepBatch
from hwbackends.step.handle import HostMirrors, LayerHandle
from hwbackends.step.metadata import MetadataBuffers, MetadataLimits, StepMetadata
from hwbackends.step.pool import StatePool
from hwbackends.step.rules import BATCH_TENSORS, MODE_OF_HOOK, RECORDED_MODES, TAIL_VALUES
from hwbackends.step.sidecar import CONV_HOOKS, FUSED_HOOKS, PREPARE_HOOKS

CONTRACTS = installed()
KEPT = {"handles", "host_mirrors", "engine", "cache"}
"""What the sidecar, the engine and the backend keep in these classes for themselves."""


def names(type_name: str) -> list[str]:
    return [p.name for p in CONTRACTS.fields(type_name)]


@pytest.mark.parametrize("cls", [StepBatch, StepMetadata, ConvState])
def test_a_class_has_the_fields_defaults_and_types_of_the_contract(cls: Any) -> None:
    scope = {"LayerHandle": LayerHandle, "HostMirrors": HostMirrors}
    hints = get_type_hints(cls, localns=scope)
    fields = [field for field in dataclasses.fields(cls) if field.name not in KEPT]
    assert [field.name for field in fields] == names(cls.__name__)
    for field, wanted in zip(fields, CONTRACTS.fields(cls.__name__), strict=True):
        hint = str(hints[field.name])
        assert ("None" in hint) == wanted.optional, field.name
        if field.default is not dataclasses.MISSING and field.default is not None:
            assert field.default == wanted.default, field.name
        if wanted.type == "Tensor":
            assert "Tensor" in hint, field.name
        elif wanted.type in ("int", "bool"):
            assert hints[field.name].__name__ == wanted.type, field.name


def test_a_probe_result_has_the_fields_of_the_contract() -> None:
    assert list(ProbeResult._fields) == names("ProbeResult")


def test_a_pool_has_every_field_of_the_step_and_of_its_family() -> None:
    pool = StatePool([ConvStream("k", 5)], num_slots=3, width=4, layers=2, draft_token_num=3, ssm_shape=(7,))
    for field in CONTRACTS.fields("StatePool"):
        assert hasattr(pool, field.name), field.name
    assert {p.name for p in CONTRACTS["step"].types["StatePool"]} < set(names("StatePool"))


def test_fresh_metadata_has_the_dtypes_shapes_and_paddings_of_the_contract() -> None:
    extents = {"B": 3, "B + 1": 4, "T": 11}
    for index_dtype in (torch.int32, torch.int64):
        view = MetadataBuffers(MetadataLimits(3, 11, 2), "cpu", index_dtype).view(ForwardMode.DECODE, 3, 11)
        for name, tensor in view.tensors().items():
            field = next(p for p in CONTRACTS.fields("StepMetadata") if p.name == name)
            assert str(tensor.dtype).removeprefix("torch.") in field.dtypes, name
            assert tuple(tensor.shape) == tuple(extents[extent] for extent in field.shape), name
            assert set(tensor.tolist()) == {field.padding or 0}, name


def test_tail_values_are_the_paddings_of_every_tensor_by_request() -> None:
    wanted = {p.name: int(p.padding) for p in CONTRACTS.fields("StepMetadata") if p.shape == ("B",)}
    assert wanted == TAIL_VALUES
    assert len(wanted) == 9


def test_a_batch_may_bring_every_tensor_by_request_that_the_contract_lists() -> None:
    tensors = [p for p in CONTRACTS.fields("StepBatch") if p.type == "Tensor" and p.shape == ("B",)]
    assert {p.name: tuple(getattr(torch, dtype) for dtype in p.dtypes) for p in tensors} == BATCH_TENSORS
    assert BATCH_TENSORS["mamba_track_mask"] == (torch.bool,)


def test_phases_are_those_of_the_contract_and_each_has_its_hooks() -> None:
    assert {mode.value for mode in ForwardMode} == set(CONTRACTS["step"].forward_modes)
    assert set(PREPARE_HOOKS) == set(CONV_HOOKS) == set(ForwardMode)
    assert set(FUSED_HOOKS) == {ForwardMode.DECODE, ForwardMode.IDLE, ForwardMode.TARGET_VERIFY}
    assert set(ForwardMode) - {ForwardMode.EXTEND} == RECORDED_MODES
    assert MODE_OF_HOOK["conv_decode"] == (ForwardMode.DECODE, ForwardMode.IDLE)


def test_layouts_and_dtypes_are_those_of_the_contract() -> None:
    conv = CONTRACTS["conv"]
    assert list(LAYOUTS) == list(claims.LAYOUTS) == list(conv.layouts)
    assert [str(dtype).removeprefix("torch.") for dtype in STATE_DTYPES] == list(conv.dtype_sets["state"])
    assert [str(dtype).removeprefix("torch.") for dtype in checks.ACTIVATION_DTYPES] == list(
        conv.dtype_sets["activation"]
    )
    assert list(claims.DTYPES) == list(conv.dtype_sets["activation"])


def test_the_schema_for_editors_is_what_the_reader_takes() -> None:
    """After a change of the reader's keys: python -m hwbackends.contract.schema."""
    assert (contracts_folder() / "schema.json").read_text(encoding="utf-8") == schema.text()


@pytest.mark.parametrize("name", CONTRACTS)
def test_the_schema_takes_each_contract_and_refuses_a_key_that_the_reader_refuses(name: str) -> None:
    data = yaml.safe_load(CONTRACTS[name].path.read_text(encoding="utf-8"))
    jsonschema.validate(data, schema.schema())
    data["hooks"][0]["sumary"] = "x"
    with pytest.raises(jsonschema.ValidationError, match="sumary"):
        jsonschema.validate(data, schema.schema())
