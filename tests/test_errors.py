"""Every error is one of ours, can be caught by kind, and survives the way between processes."""

from __future__ import annotations

import inspect
import pickle

import pytest

from hwbackends import errors
from hwbackends.errors import ArgumentError, HwBackendsError, MissingPackageError, OutOfSlotsError, SlotError

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_a_subclass_of_ours_and_says_when_it_is_raised(kind: type[Exception]) -> None:
    assert issubclass(kind, HwBackendsError)
    assert inspect.getdoc(kind)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if issubclass(kind, ArgumentError)])
def test_an_argument_error_names_everything_and_survives_pickling(kind: type[ArgumentError]) -> None:
    error = kind("conv_decode", "x", 3, "a tensor", "pass one")
    assert str(error) == "conv_decode: x: got 3, wanted a tensor; pass one"
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.parameter) == (kind, str(error), "x")


def test_an_argument_error_without_a_hint_ends_with_what_it_wants() -> None:
    assert str(ArgumentError("conv_decode", "x", 3, "a tensor")) == "conv_decode: x: got 3, wanted a tensor"


def test_a_missing_package_is_an_import_error_and_survives_pickling() -> None:
    error = MissingPackageError("hwbackends demo", "torch", "transformers")
    assert isinstance(error, ImportError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_running_out_of_slots_is_a_slot_error() -> None:
    assert issubclass(OutOfSlotsError, SlotError)
