"""Binding holds every hook against the contract: each kind of drift is refused with the definition and the parameters,
and what fits is handed out as the plain function that the plugin defined."""

from __future__ import annotations

import dataclasses
import logging
import types

import pytest

from hwbackends.contract.hookspecs.conv import ConvHooks
from hwbackends.contract.hookspecs.ssm import SsmHooks
from hwbackends.contract.hookspecs.step import StepHooks
from hwbackends.contract.reader import installed
from hwbackends.errors import BrokenPluginError, HookNotImplementedError, SignatureDriftError
from hwbackends.registry.binding import Backend, bind, inspect_plugin
from hwbackends.registry.candidates import Candidate, discover, import_plugin
from tests.registry.fake_plugins import NAMED, Site, definition, parameters_of, plugin_source

COMMIT = "update_mamba_state_after_mtp_verify"
HOOKS = installed().only(NAMED).hooks
OPTIONAL = [name for name, hook in HOOKS.items() if hook.optional]


def vendor(site: Site, source: str) -> Candidate:
    site.install("vendor", source=source)
    (found,) = discover()
    return found


def without(hook: str, *names: str) -> list[str]:
    return [text for text in parameters_of(HOOKS[hook]) if text.partition("=")[0] not in names]


def with_default(hook: str, name: str, default: str) -> list[str]:
    return [f"{name}={default}" if text == name else text for text in parameters_of(HOOKS[hook])]


COMMIT_ALL = parameters_of(HOOKS[COMMIT])
CONV = parameters_of(HOOKS["conv_decode"])
DRIFTS = {
    "one parameter fewer": (COMMIT, without(COMMIT, "req_pool_indices"), "missing", ["req_pool_indices"]),
    "several parameters fewer": (
        COMMIT,
        without(COMMIT, "mamba_track_indices", "mamba_steps_to_track", "draft_indices"),
        "missing",
        ["mamba_track_indices", "mamba_steps_to_track", "draft_indices"],
    ),
    "a renamed parameter": (
        "conv_decode",
        [text.replace("metadata", "meta") for text in CONV],
        "renamed",
        ["'metadata'", "'meta'"],
    ),
    "an extra required parameter": (
        "clear_slots",
        ["pool", "cache_indices", "stream"],
        "extra-required",
        ["stream"],
    ),
    "a default that hides a missing argument": (
        COMMIT,
        ["pool", "req_pool_indices=None", "last_correct_step_indices=None", *COMMIT_ALL[3:]],
        "hiding-default",
        ["req_pool_indices", "last_correct_step_indices"],
    ),
    "a default that was lost": ("probe", ["device"], "lost-default", ["device", "None"]),
    "another default": (
        "conv_decode",
        [text.replace("residual=False", "residual=True") for text in CONV],
        "other-default",
        ["residual", "True", "False"],
    ),
    "a default of another type": (
        "conv_decode",
        [text.replace("residual=False", "residual=0") for text in CONV],
        "other-default",
        ["residual"],
    ),
    "another order": (
        "copy_slots",
        ["pool", "destination_indices", "source_indices"],
        "order",
        ["pool, destination_indices, source_indices"],
    ),
    "a private parameter in the middle": (
        "probe",
        ["_block=7", "device=None"],
        "order",
        ["_block"],
    ),
    "a catch-all for names": ("copy_slots", ["pool", "**kwargs"], "catch-all", ["**kwargs"]),
    "a catch-all for positions": ("conv_extend", ["*args"], "catch-all", ["*args"]),
    "a catch-all behind all parameters": (COMMIT, [*COMMIT_ALL, "**kwargs"], "catch-all", ["**kwargs"]),
    "a parameter by name only": ("clear_slots", ["pool", "*", "cache_indices"], "keyword-only", ["cache_indices"]),
    "a parameter by position only": ("clear_slots", ["pool", "/", "cache_indices"], "positional-only", ["pool"]),
}


@pytest.mark.parametrize(("hook", "parameters", "kind", "named"), DRIFTS.values(), ids=DRIFTS.keys())
def test_a_drifted_definition_is_refused_with_its_line_and_every_parameter(
    site: Site, hook: str, parameters: list[str], kind: str, named: list[str]
) -> None:
    source = plugin_source({hook: definition(hook, parameters)})
    candidate = vendor(site, source)
    line = 1 + source.splitlines().index(f"def {hook}({', '.join(parameters)}):")
    with pytest.raises(SignatureDriftError) as caught:
        bind(candidate)
    message = str(caught.value)
    assert f"plugin.py:{line}: {hook}: " in message
    assert f"def {hook}({', '.join(parameters)})" in message
    assert "backend 'vendor' (vendor-dist 3.1)" in message
    for text in named:
        assert text in message
    assert kind in {drift.kind for drift in inspect_plugin(import_plugin(candidate), installed()).drifts}


def test_every_drift_of_a_plugin_is_in_one_message(site: Site) -> None:
    replaced = {"clear_slots": definition("clear_slots", ["pool"]), "probe": definition("probe", [])}
    with pytest.raises(SignatureDriftError) as caught:
        bind(vendor(site, plugin_source(replaced)))
    assert "clear_slots: parameters missing: cache_indices" in str(caught.value)
    assert "probe: parameters missing: device" in str(caught.value)


def test_an_unknown_hook_name_offers_the_nearest_one(site: Site) -> None:
    extra = "\n@hookimpl\ndef conv_decde(x):\n    return x\n"
    with pytest.raises(SignatureDriftError, match=r"no such hook in the contract; did you mean 'conv_decode'\?"):
        bind(vendor(site, plugin_source(extra=extra)))


def test_a_function_with_a_hooks_name_but_without_the_mark_is_refused(site: Site) -> None:
    unmarked = definition("conv_extend").replace("@hookimpl\n", "")
    with pytest.raises(SignatureDriftError, match="conv_extend: has the name of a hook but no @hookimpl"):
        bind(vendor(site, plugin_source({"conv_extend": unmarked})))


def test_a_hook_that_a_failed_import_left_as_none_is_refused_by_name(site: Site) -> None:
    with pytest.raises(SignatureDriftError, match=r"conv_extend: is None, wanted a function; was a failed import"):
        bind(vendor(site, plugin_source({"conv_extend": "conv_extend = None"})))


def test_a_hook_that_is_no_function_is_refused_by_name(site: Site) -> None:
    with pytest.raises(SignatureDriftError, match="conv_extend: is a int, wanted a function"):
        bind(vendor(site, plugin_source({"conv_extend": "conv_extend = 5"})))


@pytest.mark.parametrize("body", ["async def", "def with a yield"])
def test_a_coroutine_or_generator_is_refused_by_name(site: Site, body: str) -> None:
    source = definition("clear_slots", body="yield" if "yield" in body else "")
    source = source.replace("def ", "async def ", 1) if "async" in body else source
    with pytest.raises(SignatureDriftError, match="clear_slots: is a coroutine or generator"):
        bind(vendor(site, plugin_source({"clear_slots": source})))


def test_a_hook_without_a_readable_signature_is_refused(site: Site) -> None:
    odd = "class Odd:\n    hwbackends_impl = {}\n    __signature__ = 'text'\n    def __call__(self): ...\n"
    odd += "clear_slots = Odd()\n"
    with pytest.raises(SignatureDriftError, match="clear_slots: has no readable signature"):
        bind(vendor(site, plugin_source({"clear_slots": odd})))


def test_private_parameters_with_defaults_behind_the_contracts_are_allowed(site: Site) -> None:
    tuned = definition("clear_slots", ["pool", "cache_indices", "_block=128"])
    assert bind(vendor(site, plugin_source({"clear_slots": tuned}))).clear_slots(1, 2) == "clear_slots"


def test_a_wrapper_is_judged_by_its_own_parameters(site: Site) -> None:
    source = "import functools\n" + plugin_source(
        {
            "clear_slots": "def plain(pool, cache_indices): ...\n"
            "@hookimpl\n@functools.wraps(plain)\ndef clear_slots(*args, **kwargs): ..."
        }
    )
    with pytest.raises(SignatureDriftError, match=r"catch-all \*args"):
        bind(vendor(site, source))


def test_a_bound_hook_is_the_plugins_own_function(site: Site) -> None:
    candidate = vendor(site, plugin_source())
    backend = bind(candidate)
    plugin = import_plugin(candidate)
    for hook in HOOKS:
        assert getattr(backend, hook) is getattr(plugin, hook)
        assert isinstance(getattr(backend, hook), types.FunctionType)


def test_a_backend_tells_where_each_hook_comes_from(site: Site) -> None:
    source = plugin_source()
    backend = bind(vendor(site, source))
    line = 1 + source.splitlines().index("def clear_slots(pool, cache_indices):")
    assert str(backend.hook_origins["clear_slots"]).startswith("vendor ")
    assert backend.hook_origins["clear_slots"].location.endswith(f"plugin.py:{line}")
    assert (backend.name, backend.distribution, backend.version) == ("vendor", "vendor-dist", "3.1")
    assert (backend.device_types, backend.contracts) == (("cpu",), {"step": "1.0", "conv": "1.0"})


def test_a_backend_has_one_typed_attribute_per_hook_of_the_contracts() -> None:
    typed = [name for base in (StepHooks, ConvHooks, SsmHooks) for name in base.__annotations__]
    assert typed == list(installed().hooks)
    assert {StepHooks, ConvHooks, SsmHooks} < set(Backend.__mro__)


def test_a_backend_is_frozen(site: Site) -> None:
    backend = bind(vendor(site, plugin_source()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        backend.conv_decode = print  # type: ignore[misc]


def test_an_object_can_be_the_plugin(site: Site) -> None:
    source = "from hwbackends.contract.hookspecs import hookimpl\nclass Plugin:\n" + "".join(
        f"    @hookimpl\n    def {name}(self, {', '.join(parameters_of(hook))}): return '{name}'\n"
        for name, hook in HOOKS.items()
    )
    site.install("vendor", source=source + "plugin = Plugin()\n", value="plugin_vendor.plugin:plugin")
    (candidate,) = discover()
    backend = bind(candidate)
    assert backend.clear_slots(1, 2) == "clear_slots"
    assert backend.hook_origins["clear_slots"].location.rpartition(":")[0].endswith("plugin.py")


def test_a_missing_optional_hook_is_told_and_raises_when_called(site: Site) -> None:
    backend = bind(vendor(site, plugin_source(optional=False)))
    for hook in OPTIONAL:
        assert not backend.has(hook)
        with pytest.raises(HookNotImplementedError, match=rf"{hook}: backend 'vendor' does not have this hook"):
            getattr(backend, hook)(1)
    assert backend.has("conv_decode")


def test_a_missing_required_hook_stops_the_binding_and_says_the_way_out(site: Site) -> None:
    source = plugin_source({"conv_extend": "", "clear_slots": ""})
    with pytest.raises(HookNotImplementedError, match=r"does not have: clear_slots, conv_extend; .*fallback=True"):
        bind(vendor(site, source))


def test_a_hook_that_fails_to_load_is_named_with_its_original_error(site: Site) -> None:
    source = plugin_source(
        {"conv_extend": ""}, extra="\ndef __getattr__(name):\n    raise ImportError('no vendor_ops')\n"
    )
    source = source.replace("raise", "if name != 'conv_extend': raise AttributeError(name)\n    raise")
    with pytest.raises(HookNotImplementedError, match=r"conv_extend \(ImportError: no vendor_ops\)") as caught:
        bind(vendor(site, source))
    assert isinstance(caught.value.__cause__, ImportError)


def test_a_hook_that_a_module_makes_on_demand_is_bound(site: Site) -> None:
    source = plugin_source({"clear_slots": ""}) + (
        "\n@hookimpl\ndef _lazy(pool, cache_indices): return 'made'\ndel _lazy.hwbackends_impl\n"
        "def __getattr__(name):\n    if name != 'clear_slots': raise AttributeError(name)\n"
        "    return hookimpl(_lazy)\n"
    )
    assert bind(vendor(site, source)).clear_slots(1, 2) == "made"


def test_an_attribute_that_cannot_be_read_does_not_hide_the_hooks(site: Site) -> None:
    source = plugin_source(extra="\ndef __dir__(): return [*globals(), 'conv_decode_2']\n")
    assert bind(vendor(site, source)).has("conv_decode")


def test_a_hook_may_carry_another_name_in_the_source(site: Site) -> None:
    named = "@hookimpl(specname='clear_slots')\ndef zero(pool, cache_indices):\n    return 'zeroed'\n"
    assert bind(vendor(site, plugin_source({"clear_slots": named}))).clear_slots(1, 2) == "zeroed"


def test_a_partial_binding_leaves_missing_hooks_as_named_errors(site: Site) -> None:
    backend = bind(vendor(site, plugin_source({"conv_extend": ""})), partial=True)
    with pytest.raises(HookNotImplementedError, match="conv_extend"):
        backend.conv_extend()
    assert not backend.has("conv_extend")


def test_the_fallback_lends_exactly_the_missing_hooks_and_the_origin_says_so(site: Site) -> None:
    site.install("vendor", source=plugin_source({"conv_extend": ""}))
    site.install("lender", source=plugin_source())
    lender, vendor = discover()
    backend = bind(vendor, fallback=lender)
    assert backend.hook_origins["conv_extend"].backend == "lender"
    assert backend.conv_extend is import_plugin(lender).conv_extend
    assert {origin.backend for name, origin in backend.hook_origins.items() if name != "conv_extend"} == {"vendor"}


def test_a_plugin_that_does_not_import_is_refused_with_the_cause(site: Site) -> None:
    with pytest.raises(BrokenPluginError, match=r"none of its hooks can be used: ZeroDivisionError") as caught:
        bind(vendor(site, "1 / 0"))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_tracing_writes_one_line_per_call_and_changes_no_result(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    backend = bind(vendor(site, plugin_source()), traced=True)
    with caplog.at_level(logging.INFO, logger="hwbackends.registry.binding"):
        assert backend.clear_slots(1, cache_indices=2) == "clear_slots"
        assert backend.conv_decode(1, 2, 3, 4, 5) == "conv_decode"
    assert [record.message for record in caplog.records] == [
        "vendor clear_slots [hook]",
        "vendor conv_decode [hook]",
    ]
