"""The pytest plugin's front door, found through the `pytest11` entry point. Without `--hwbackend` it adds one option
and does nothing else; the rest of the kit is imported, and its other options are added, only when that is given."""

from __future__ import annotations

import pytest

PACKAGE = "hwbackends.conformance"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The one option that is always there: general names such as --device could meet another plugin's."""
    group = parser.getgroup("hwbackends", "conformance of a hardware backend (pytest --pyargs hwbackends.conformance)")
    group.addoption(
        "--hwbackend",
        metavar="NAME",
        help="backend to judge; adds --device DEV, --waivers FILE, --report OUT.json, --quick, --seed N, "
        "--hang-timeout SECONDS",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser, args: list[str]) -> None:
    """Add the kit's other options, when it is asked for."""
    if not any(arg.split("=")[0] == "--hwbackend" for arg in args):
        return
    group = parser.getgroup("hwbackends")
    group.addoption("--device", default="cpu", metavar="DEV", help="cpu, cuda, npu (emulated without torch_npu)")
    group.addoption("--waivers", metavar="FILE", help="YAML: id, clause, reason, url, expires")
    group.addoption("--report", metavar="FILE", help="write FILE and, beside it, a page with the suffix .html")
    group.addoption("--quick", action="store_true", help="a small subset; the run is PARTIAL")
    group.addoption("--seed", type=int, default=0, metavar="N", help="base of every test's seed")
    group.addoption("--hang-timeout", type=float, default=120.0, metavar="SECONDS", help="a slower test is a hang")


def pytest_configure(config: pytest.Config) -> None:
    """Hand over to the kit when a backend was named."""
    config.addinivalue_line("markers", "full: left out of the conformance kit's quick lane")
    if config.getoption("hwbackend", None):
        from hwbackends.conformance.session import Session

        config.pluginmanager.register(Session(config), "hwbackends-conformance")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The kit's tests mean nothing without a backend."""
    if config.getoption("hwbackend", None):
        return
    modules = [item.module.__name__ for item in items if isinstance(item, pytest.Function)]
    if any(name.startswith(f"{PACKAGE}.") and ".test_" in name for name in modules):
        raise pytest.UsageError(f"name the backend to judge: pytest --pyargs {PACKAGE} --hwbackend NAME")
