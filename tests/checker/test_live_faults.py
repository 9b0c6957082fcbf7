"""Drift mode on the shapes of faults that other checkers find in published releases."""

from __future__ import annotations

from pathlib import Path

from hwbackends.checker.engine import Options, run
from tests.checker.trees import brief, shown, write


def test_a_platform_inside_the_trees_is_asked_beside_one_outside(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "pkg/__init__.py": "",
            "pkg/musa/topk.py": "def route(weights, ids, renormalize=False):\n    return weights, ids, renormalize\n",
            "pkg/topk.py": """
                if is_xpu:
                    from other_package import route
                elif is_musa:
                    from pkg.musa.topk import route
                def select(weights, ids):
                    route(weights, ids, True, 2.5)
            """,
        },
    )
    assert brief(shown(tmp_path)) == {("HWB103", "route", ("4th positional",))}


def test_the_rest_of_the_package_around_a_tree_gives_definitions_and_no_findings_of_its_own(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "pkg/__init__.py": "",
            "pkg/ops/__init__.py": "from .rope import rotate\n",
            "pkg/ops/rope.py": "def rotate(q, k, *, is_neox):\n    return q, k, is_neox\n\nrotate(1)\n",
            "pkg/engine/layer.py": "from pkg.ops import rotate\n\nrotate(query=1, key=2, is_neox=True)\n",
        },
    )
    assert not shown(tmp_path / "pkg/engine")  # unless asked, nothing outside of a tree is opened
    (found,) = shown(tmp_path / "pkg/engine", package=True)
    assert (found.rule, found.missing) == ("HWB105", ("query", "key", "q", "k"))
    assert found.definition is not None
    assert found.definition.file == str(tmp_path / "pkg/ops/rope.py")
    assert found.call is not None
    assert found.call.file == str(tmp_path / "pkg/engine/layer.py")


def test_nothing_beside_a_tree_is_read_when_no_package_holds_it(tmp_path: Path) -> None:
    files = {"ops.py": "def rotate(q):\n    return q\n", "engine/layer.py": "from ops import rotate\n\nrotate(x=1)\n"}
    assert not shown(write(tmp_path, files) / "engine", package=True)


def test_a_link_out_of_the_package_is_not_followed_for_a_definition(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "other/rope.py": "def rotate(q):\n    return q\n",
            "pkg/__init__.py": "",
            "pkg/engine/layer.py": "from pkg.rope import rotate\n\nrotate(x=1)\n",
        },
    )
    (tmp_path / "pkg/rope.py").symlink_to(tmp_path / "other/rope.py")
    assert not shown(tmp_path / "pkg/engine", package=True)


PLATFORM_IMPORTS = """
    from pkg.flags import is_cuda, is_hip
    if is_cuda:
        from pkg.dequantize import dequantize
    elif is_hip:
        from pkg.dequantize import dequantize
    def load(weight, on_cuda):
        if is_cuda or is_hip:
            return dequantize(weight)
        return dequantize(weight, 0, 0)
"""


def test_a_function_is_not_asked_where_its_import_did_not_happen(tmp_path: Path) -> None:
    files = {
        "pkg/__init__.py": "",
        "pkg/flags.py": "is_cuda = detect()\nis_hip = detect()\n",
        "pkg/dequantize.py": "def dequantize(weight):\n    return weight\n",
        "pkg/model.py": PLATFORM_IMPORTS,
    }
    assert not shown(write(tmp_path / "guarded", files))
    files["pkg/model.py"] = PLATFORM_IMPORTS.replace("if is_cuda or is_hip", "if on_cuda")
    assert {f.rule for f in shown(write(tmp_path / "open", files))} == {"HWB103"}


VISION = """
    from runners import Runner, NpuRunner
    class Vision:
        def __init__(self, npu):
            self.runner = NpuRunner() if npu else Runner()
        def forward(self, x):
            if is_npu:
                return self.forward_here(x)
            return self.forward_there(x)
        def forward_here(self, x):
            return self.runner.replay(x=x)
        def forward_there(self, x):
            return self.runner.replay(x=x, windows=3)
    class Other:
        def forward(self, x):
            return self.forward_there(x)
        def forward_there(self, x):
            return x
"""
RUNNERS = """
    class Runner:
        def replay(self, x, windows=None): return x, windows
    class NpuRunner(Runner):
        def replay(self, x): return x
"""


def test_a_method_that_other_hardware_alone_calls_is_not_held_against_this_one(tmp_path: Path) -> None:
    assert not shown(write(tmp_path / "guarded", {"vision.py": VISION, "runners.py": RUNNERS}))
    everywhere = VISION.replace("if is_npu:", "if x:")
    found = shown(write(tmp_path / "open", {"vision.py": everywhere, "runners.py": RUNNERS}))
    assert brief(found) == {("HWB101", "NpuRunner.replay", ("windows",))}


def test_a_forwarder_of_anything_does_not_excuse_what_every_definition_rejects(tmp_path: Path) -> None:
    source = """
        class Dispatcher:
            def combine(self, combine_input): ...
        class DeepEP(Dispatcher):
            def combine(self, combine_input): return combine_input
        class Mori(Dispatcher):
            def combine(self, combine_input): return combine_input
        class Both(Dispatcher):
            def combine(self, **kwargs): return self._run("combine", **kwargs)
        class Layer:
            def __init__(self, dispatcher: Dispatcher):
                self.dispatcher = dispatcher
            def combine(self, hidden, ids):
                return self.dispatcher.combine(hidden=hidden, ids=ids)
    """
    found = shown(write(tmp_path, {"layer.py": source}))
    assert {(f.rule, f.missing) for f in found} == {("HWB105", ("hidden", "ids", "combine_input"))}


def test_a_composite_that_calls_its_parts_by_its_own_name_does_not_meet_its_own_kind(tmp_path: Path) -> None:
    source = """
        class Worker:
            def alloc_memory_pool(self, config=None, layout=None):
                for runner in self.make_runners():
                    runner.alloc_memory_pool(config, layout=layout)
        class DraftWorker(Worker):
            def alloc_memory_pool(self, config=None): return config
    """
    assert not shown(write(tmp_path, {"worker.py": source}))


def test_another_protocol_under_the_same_name_is_told_by_its_renamed_parameters(tmp_path: Path) -> None:
    source = """
        class Runner:
            def execute(self, batch, proxy=None, timing=None): return batch, proxy, timing
            def run(self):
                self.execute(batch=1, proxy=2, timing=3)
        class DraftRunner(Runner):
            def execute(self, batch, timing, index): return batch, timing, index
    """
    assert not shown(write(tmp_path, {"runner.py": source}))


def test_a_cached_answer_ends_when_a_definition_around_the_tree_appears_or_changes(tmp_path: Path) -> None:
    write(tmp_path, {"pkg/__init__.py": "", "pkg/engine/layer.py": "from pkg.rope import rotate\n\nrotate(x=1)\n"})
    options = Options(cache_dir=str(tmp_path / "cache"), jobs=1, package=True)

    def rules() -> list[str]:
        return [found.rule for found in run([str(tmp_path / "pkg/engine")], options).findings]

    assert rules() == rules() == []
    write(tmp_path, {"pkg/rope.py": "def rotate(q):\n    return q\n"})
    assert rules() == rules() == ["HWB105"]
    write(tmp_path, {"pkg/rope.py": "def rotate(x):\n    return x\n"})
    assert rules() == []


def test_a_cached_answer_without_the_package_is_not_given_for_one_with_it(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "pkg/__init__.py": "",
            "pkg/rope.py": "def rotate(q):\n    return q\n",
            "pkg/engine/layer.py": "from pkg.rope import rotate\n\nrotate(x=1)\n",
        },
    )

    def rules(package: bool) -> list[str]:
        options = Options(cache_dir=str(tmp_path / "cache"), jobs=1, package=package)
        return [found.rule for found in run([str(tmp_path / "pkg/engine")], options).findings]

    assert [rules(package) for package in (False, True, False, True)] == [[], ["HWB105"], [], ["HWB105"]]


def test_a_stand_in_that_looks_at_nothing_does_not_excuse_the_real_function(tmp_path: Path) -> None:
    source = """
        def draft_context(group, *, owns_attention): return group, owns_attention
        def empty_context(*args, **kwargs): return None
        class Worker:
            def __init__(self, spread):
                self.context = draft_context if spread else empty_context
            def step(self):
                self.context(1, owns_attention=True)
            def step_later(self):
                self.context(1)
    """
    assert brief(shown(write(tmp_path, {"worker.py": source}))) == {("HWB106", "draft_context", ("owns_attention",))}


CONTROLLER = """
    class Params:
        def on_verify_complete(self, accepted, batch_size): return accepted, batch_size
    class Controller:
        def __init__(self): self.params = Params()
        def on_verify_complete(self, accepted, batch_size): return self.params.on_verify_complete(accepted, batch_size)
    class Worker:
        def __init__(self, controller): self.controller = controller
        def finish(self, accepted): self.controller.on_verify_complete(ACCEPTED)
"""


def test_an_untyped_call_that_names_what_it_passes_as_the_definitions_do_meets_them(tmp_path: Path) -> None:
    found = shown(write(tmp_path / "bad", {"worker.py": CONTROLLER.replace("ACCEPTED", "accepted")}))
    assert {(f.rule, f.missing) for f in found} == {("HWB106", ("batch_size",))}
    assert not shown(write(tmp_path / "other", {"worker.py": CONTROLLER.replace("ACCEPTED", "[7]")}))


def test_a_registered_function_is_not_mistaken_for_the_decorator_that_made_it(tmp_path: Path) -> None:
    source = """
        class Wrapped:
            def __init__(self, function): self.function = function
            def __call__(self, *args, **kwargs): return self.function(*args, **kwargs)
        def register(function=None):
            def decorator(function): return Wrapped(function)
            if function is not None:
                return decorator(function)
            return decorator
        norm = register(native)
        norm(q=1, k=2)
    """
    assert not shown(write(tmp_path, {"ops.py": source}))


def test_a_function_put_in_place_of_a_method_must_take_all_calls_however_many(tmp_path: Path) -> None:
    calls = "".join(f"    def load_{n}(self): return self.prepare('m', None, False, {n})\n" for n in range(7))
    loader = (
        "class Loader:\n    def prepare(self, name, revision, fall_back, patterns): return name, patterns\n" + calls
    )
    patch = """
        from loader import Loader
        def patch_loader():
            def prepare(self, name, revision, fall_back): return name, revision, fall_back
            setattr(Loader, "prepare", prepare)
    """
    found = shown(write(tmp_path, {"loader.py": loader, "clip.py": patch}))
    assert brief(found) == {("HWB103", "patch_loader.prepare", ("patterns (4th positional)",))}
    assert len(found) == 1


ADAPTERS = """
    from functools import partial
    class Real:
        @property
        def enabled(self): return True
        def graph(self, **kwargs): return kwargs
    class Noop(Real):
        @property
        def enabled(self): return False
        def graph(self, **kwargs): return kwargs
    class Runner:
        def __init__(self, adapter: Real):
            self.adapter = adapter
        def capture(self, graph):
            if self.adapter is not None and self.adapter.enabled:
                context = partial(self.adapter.graph, tag="graph")
            else:
                context = graph.capture
            return context(graph, pool=1)
"""


def test_what_is_bound_under_a_flag_is_called_where_the_flag_holds(tmp_path: Path) -> None:
    found = shown(write(tmp_path, {"runner.py": ADAPTERS}))
    assert brief(found) == {("HWB103", "Real.graph", ("graph (1st positional)",))}


def test_a_value_that_only_one_class_gives_keeps_the_others_from_the_call_that_needs_it(tmp_path: Path) -> None:
    source = """
        class Sender:
            def send(self, pages, event=None): return pages, event
        class Mooncake(Sender):
            waits_for_events = True
        class Fake(Sender):
            def send(self, pages): return pages
        def transfer(sender: Sender, pages):
            event = None
            if getattr(sender, "waits_for_events", False):
                event = make_event()
            if event is not None:
                sender.send(pages, event=event)
    """
    assert not shown(write(tmp_path / "guarded", {"sender.py": source}))
    found = shown(
        write(tmp_path / "open", {"sender.py": source.replace('getattr(sender, "waits_for_events", False)', "pages")})
    )
    assert brief(found) == {("HWB101", "Fake.send", ("event",))}


def test_an_attribute_holds_what_its_class_constructs_whatever_type_it_declares(tmp_path: Path) -> None:
    files = {
        "runners.py": RUNNERS,
        "vision.py": """
            from typing import Optional
            from runners import Runner
            class Vision:
                def __init__(self):
                    self.runner: Optional[Runner] = None
                    self.runner = Runner()
                def forward(self, x):
                    return self.runner.replay(x=x, windows=3)
        """,
    }
    assert not shown(write(tmp_path / "own", files))
    files["npu.py"] = "from runners import NpuRunner\ndef adapt(vision):\n    vision.runner = NpuRunner()\n"
    assert brief(shown(write(tmp_path / "adapted", files))) == {("HWB101", "NpuRunner.replay", ("windows",))}


def test_kin_that_takes_anything_does_not_make_an_untyped_receiver_of_the_family(tmp_path: Path) -> None:
    source = """
        class Strategy:
            def run_attention(self, q, k, v): ...
        class Interleave(Strategy):
            def run_attention(self, q, k, v, **kwargs): return q, k, v, kwargs
        class Zigzag(Strategy):
            def run_attention(self, q, k, v): return q, k, v
        class Plan:
            def run_attention(self, q, k, v, scale): return q, k, v, scale
        def attend(plan, q, k, v):
            return plan.run_attention(q, k, v, scale=2)
    """
    assert not shown(write(tmp_path, {"plan.py": source}))


def test_a_member_of_an_enumeration_is_an_instance_of_it(tmp_path: Path) -> None:
    source = """
        from enum import Enum
        class Backend(Enum):
            FLASH = "flash"
            def path(self, checked): return self.value, checked
        def select(name):
            return Backend[name].path(True)
        def select_later(name):
            return Backend[name].path()
    """
    assert brief(shown(write(tmp_path, {"registry.py": source}))) == {("HWB106", "Backend.path", ("checked",))}
