"""Drift mode: each way in which a real fault hid, as a small tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from hwbackends.checker.suppress import Selection
from tests.checker.trees import brief, line_of, shown, write


def test_a_self_call_in_a_base_meets_the_override_that_lacks_a_keyword(tmp_path: Path) -> None:
    base = """
        class Backend:
            def commit(self, steps, req_pool_indices=None):
                return steps, req_pool_indices
            def step(self):
                self.commit(steps=1, req_pool_indices=2)
    """
    bad = "from base import Backend\nclass Npu(Backend):\n    def commit(self, steps):\n        return steps\n"
    good = bad.replace("steps):", "steps, req_pool_indices=None):")
    write(tmp_path / "bad", {"base.py": base, "npu.py": bad})
    (found,) = shown(tmp_path / "bad")
    assert (found.rule, found.missing, found.confidence) == ("HWB101", ("req_pool_indices",), "high")
    assert found.definition is not None
    assert found.call is not None
    assert (found.definition.file, found.definition.line) == (str(tmp_path / "bad/npu.py"), 3)
    assert (found.call.file, found.call.line) == (
        str(tmp_path / "bad/base.py"),
        line_of(tmp_path / "bad/base.py", "req_pool_indices=2"),
    )
    assert not shown(write(tmp_path / "good", {"base.py": base, "npu.py": good}))


def test_a_call_in_a_subclass_meets_what_it_inherits(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "runner.py": "class Runner:\n    def key(self, x, cu_seqlens):\n        return x, cu_seqlens\n",
            "npu_runner.py": """
                from runner import Runner
                class NpuRunner(Runner):
                    def create(self, x):
                        return self.key(x)
            """,
        },
    )
    assert brief(shown(tmp_path)) == {("HWB106", "Runner.key", ("cu_seqlens",))}


def test_positional_arity_is_named_after_the_parameter_that_the_base_has_there(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "loader.py": """
                class Loader:
                    def prepare(self, name, revision, fall_back, patterns):
                        return name, revision, fall_back, patterns
                    def load(self, source):
                        return self.prepare(source.name, source.revision, source.fall_back, source.patterns)
                class Quantized(Loader):
                    def prepare(self, name, revision, fall_back):
                        return name, revision, fall_back
            """
        },
    )
    assert brief(shown(tmp_path)) == {("HWB103", "Quantized.prepare", ("patterns (4th positional)",))}


def test_an_override_that_requires_more_is_found(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "lora.py": """
                class Backend:
                    def run(self, x, weights, base_output=None, **kwargs):
                        return x, weights, base_output, kwargs
                class Torch(Backend):
                    def run(self, x, weights, output_offset_cpu, base_output=None, *args, **kwargs):
                        return x, weights, output_offset_cpu, base_output, args, kwargs
                class Layer:
                    def __init__(self, backend: Backend):
                        self.backend = backend
                    def apply(self, x):
                        return self.backend.run(x=x, weights=1, output_offset=2, base_output=3)
            """
        },
    )
    assert ("HWB102", "Torch.run", ("output_offset_cpu",)) in brief(shown(tmp_path))


def test_a_function_imported_inside_a_function_is_followed(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "pkg/ops.py": "def gather(batch, tp_size, cp_size):\n    return batch, tp_size, cp_size\n",
            "pkg/bench.py": """
                def main(batch):
                    from pkg.ops import gather
                    return gather(batch, tp_size=1)
            """,
        },
    )
    assert brief(shown(tmp_path)) == {("HWB106", "gather", ("cp_size",))}


def test_every_platform_alternative_of_an_import_must_accept(tmp_path: Path) -> None:
    files = {
        "pkg/cuda_ops.py": "def chunk(k, w, track_state=None):\n    return k, w, track_state\n",
        "pkg/xpu_ops.py": "def chunk(k, w):\n    return k, w\n",
        "pkg/kda.py": """
            from pkg.cuda_ops import chunk
            from pkg.device import is_xpu
            if is_xpu():
                from pkg.xpu_ops import chunk
            def forward(k):
                return chunk(k=k, w=1, track_state=2)
        """,
    }
    write(tmp_path, files)
    (found,) = shown(tmp_path)
    assert found.definition is not None
    assert found.definition.file.endswith("pkg/xpu_ops.py")
    assert (found.rule, found.missing) == ("HWB101", ("track_state",))


def test_an_attribute_bound_to_one_of_two_functions_is_checked_against_the_one_its_guard_leaves(tmp_path: Path) -> None:
    source = """
        def triton_attention(q, k, v, out, start, mask):
            return q, k, v, out, start, mask
        def naive_attention(q, k, v, start):
            return q, k, v, start
        class Impl:
            def __init__(self, flag):
                self.use_triton = flag
                if self.use_triton:
                    self.attn = triton_attention
                else:
                    self.attn = naive_attention
            def forward(self, q, k, v):
                if self.use_triton:
                    return self.attn(q, k, v, None, 0, None)
                return self.attn(q, k, v, 0, None)
    """
    write(tmp_path, {"impl.py": source})
    (found,) = shown(tmp_path)
    assert (found.rule, found.missing) == ("HWB103", ("5th positional",))
    assert found.definition is not None
    assert found.definition.name == "naive_attention"


def test_an_untyped_receiver_is_judged_by_a_telling_name_of_one_family(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "family.py": """
                class Base:
                    def update_verify_state(self, steps, rows=None):
                        return steps, rows
                class Cuda(Base):
                    def update_verify_state(self, steps, rows=None):
                        return rows, steps
                class Npu(Base):
                    def update_verify_state(self, steps):
                        return steps
            """,
            "caller.py": "def commit(runner):\n    runner.backend.update_verify_state(steps=1, rows=2)\n",
        },
    )
    (found,) = shown(tmp_path)
    assert found.definition is not None
    assert (found.definition.name, found.missing, found.confidence) == (
        "Npu.update_verify_state",
        ("rows",),
        "medium",
    )


def test_one_finding_lists_all_overrides_that_reject_an_untyped_call(tmp_path: Path) -> None:
    overrides = "\n".join(
        f"class C{n}(Base):\n    def update_verify_state(self, steps{', rows=None' if n > 2 else ''}):\n        return {n}\n"  # noqa: E501
        for n in range(7)
    )
    base = "class Base:\n    def update_verify_state(self, steps, rows=None):\n        return rows\n"
    caller = "def commit(runner):\n    runner.backend.update_verify_state(steps=1, rows=2)\n"
    write(tmp_path, {"family.py": base + overrides, "caller.py": caller})
    (found,) = shown(tmp_path)
    names = {place.name for place in (found.definition, *found.also) if place is not None}
    assert names == {f"C{n}.update_verify_state" for n in range(3)}


def test_a_duck_typed_family_is_held_together_by_what_returns_its_members(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "spec.py": """
                class Eagle:
                    def forward_batch(self, batch, on_publish=None, pp_proxy=None):
                        return batch, on_publish, pp_proxy
                class DSpark:
                    def forward_batch(self, batch, on_publish=None):
                        return batch, on_publish
                class Algorithm:
                    def create_worker(self):
                        if self.is_eagle():
                            return Eagle
                        return DSpark
            """,
            "scheduler.py": """
                from spec import Algorithm
                class Scheduler:
                    def __init__(self):
                        self.algorithm = Algorithm()
                        worker_class = self.algorithm.create_worker()
                        self.worker = worker_class()
                    def run(self, batch):
                        return self.worker.forward_batch(batch, pp_proxy=None)
            """,
        },
    )
    assert brief(shown(tmp_path)) == {("HWB101", "DSpark.forward_batch", ("pp_proxy",))}


def test_a_vendor_tree_is_checked_with_the_engine_whose_class_it_extends(tmp_path: Path) -> None:
    engine = write(
        tmp_path / "engine",
        {
            "engine/platforms/__init__.py": """
                from typing import TYPE_CHECKING
                from engine.platforms.interface import Platform
                if TYPE_CHECKING:
                    current_platform: Platform
                def __getattr__(name):
                    raise AttributeError(name)
            """,
            "engine/platforms/interface.py": """
                class Platform:
                    @classmethod
                    def get_backend(cls, name, head_size, attn_type):
                        return name, head_size, attn_type
                    @classmethod
                    def get_communicator(cls) -> str:
                        return "engine.comm.Communicator"
            """,
            "engine/comm.py": """
                class Communicator:
                    def __init__(self, group, device=None, use_all2all=False):
                        self.all = group, device, use_all2all
            """,
            "engine/selector.py": """
                def select(name):
                    from engine.platforms import current_platform
                    return current_platform.get_backend(name, 64, "decoder")
            """,
            "engine/state.py": """
                from engine.platforms import current_platform
                from engine.util import resolve_by_qualname
                def build(group):
                    made = resolve_by_qualname(current_platform.get_communicator())
                    return made(group=group, use_all2all=True)
            """,
        },
    )
    vendor = write(
        tmp_path / "vendor",
        {
            "vendor/__init__.py": "",
            "vendor/platform.py": """
                from engine.platforms.interface import Platform
                class TpuPlatform(Platform):
                    @classmethod
                    def get_backend(cls, name, head_size):
                        return name, head_size
                    @classmethod
                    def get_communicator(cls) -> str:
                        return "vendor.comm.TpuCommunicator"
            """,
            "vendor/comm.py": """
                from engine.comm import Communicator
                class TpuCommunicator(Communicator):
                    def __init__(self, group, device=None):
                        super().__init__(group, device)
            """,
        },
    )
    assert not shown(engine)
    assert brief(shown(vendor, engine)) == {
        ("HWB103", "TpuPlatform.get_backend", ("attn_type (3rd positional)",)),
        ("HWB101", "TpuCommunicator.__init__", ("use_all2all",)),
    }


GUARDS = {
    "isinstance": "if isinstance(backend, Cuda):\n        backend.update_verify_state(1, rows=2)",
    "capability flag": "if backend.takes_rows:\n        backend.update_verify_state(1, rows=2)",
    "signature": (
        "import inspect\n    if 'rows' in inspect.signature(backend.update_verify_state).parameters:\n"
        "        backend.update_verify_state(1, rows=2)"
    ),
    "signature by name": (
        "import inspect\n    taken = inspect.signature(backend.update_verify_state).parameters\n"
        "    if 'rows' in taken:\n        backend.update_verify_state(1, rows=2)"
    ),
    "platform": "if not is_npu():\n        backend.update_verify_state(1, rows=2)",
    "platform left early": "if is_npu():\n        return\n    backend.update_verify_state(1, rows=2)",
    "caught": "try:\n        backend.update_verify_state(1, rows=2)\n    except TypeError:\n        pass",
}


@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_that_keeps_the_override_away_silences_the_call(tmp_path: Path, guard: str) -> None:
    family = """
        class Base:
            takes_rows = False
            def update_verify_state(self, steps, rows=None):
                return steps, rows
        class Cuda(Base):
            takes_rows = True
        class NpuState(Base):
            def update_verify_state(self, steps):
                return steps
    """
    head = "from family import Base, Cuda\nfrom device import is_npu\ndef commit(backend: Base):\n    "
    write(tmp_path / "guarded", {"family.py": family, "caller.py": head + GUARDS[guard] + "\n"})
    write(tmp_path / "bare", {"family.py": family, "caller.py": head + "backend.update_verify_state(1, rows=2)\n"})
    assert not shown(tmp_path / "guarded")
    assert brief(shown(tmp_path / "bare")) == {("HWB101", "NpuState.update_verify_state", ("rows",))}


def test_super_with_arguments_calls_what_stands_behind_the_named_class(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "chain.py": """
                class A:
                    def go(self, x):
                        return x
                class B(A):
                    def go(self, x, y):
                        return x, y
                class C(B):
                    def go(self, x, y):
                        super().go(x, y)
                        return super(B, self).go(x, y)
            """
        },
    )
    assert brief(shown(tmp_path)) == {("HWB103", "A.go", ("y (2nd positional)",))}


def test_a_forwarder_is_followed_to_what_it_forwards_to(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "forward.py": """
                def inner(x, scale):
                    return x, scale
                def outer(*args, **kwargs):
                    return inner(*args, **kwargs)
                outer(1, scale=2)
                outer(1, scale=2, bias=3)
            """
        },
    )
    assert brief(shown(tmp_path)) == {("HWB105", "inner", ("bias",))}


DISPATCHING = """
    import torch.nn as nn
    class CustomOp(nn.Module):
        def __init__(self):
            super().__init__()
            self._forward_method = self.dispatch_forward()
        def forward(self, *args, **kwargs):
            return self._forward_method(*args, **kwargs)
        def forward_native(self, *args, **kwargs):
            raise NotImplementedError
        def forward_cuda(self, *args, **kwargs):
            raise NotImplementedError
        def forward_hip(self, *args, **kwargs):
            return self.forward_cuda(*args, **kwargs)
        def forward_npu(self, *args, **kwargs):
            return self.forward_native(*args, **kwargs)
        def dispatch_forward(self):
            if is_npu():
                return self.forward_npu
            elif is_hip():
                return self.forward_hip
            elif is_cuda():
                return self.forward_cuda
            return self.forward_native
"""
NORM = """
    from ops import CustomOp
    class Norm(CustomOp):
        def forward_cuda(self, x, residual=None, post=None):
            return x, residual, post
        def forward_npu(self, x, residual=None):
            return x, residual
"""
LAYER = """
    import torch.nn as nn
    from norm import Norm
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = Norm()
        def forward(self, x):
            {call}
"""


def modules(
    root: Path, call: str, norm: str = NORM, ops: str | None = DISPATCHING
) -> set[tuple[str, str, tuple[str, ...]]]:
    """What is shown for one call of a module whose base dispatches per platform."""
    files = {"norm.py": norm, "layer.py": LAYER.format(call=call)}
    return brief(shown(write(root, files if ops is None else {**files, "ops.py": ops})))


def test_calling_a_module_runs_forward_and_the_platform_method_behind_it(tmp_path: Path) -> None:
    wanted = {("HWB101", "Norm.forward_npu", ("post",))}
    assert modules(tmp_path / "attribute", "return self.norm(x, post=1)") == wanted
    assert modules(tmp_path / "local", "norm = Norm(); return norm(x, post=1)") == wanted
    assert modules(tmp_path / "forward", "return self.norm.forward(x, post=1)") == wanted
    assert not modules(tmp_path / "good", "return self.norm(x, residual=1)")


def test_each_rule_holds_behind_a_modules_forward(tmp_path: Path) -> None:
    assert modules(tmp_path / "keyword", "return self.norm(x, nobody=1)") == {
        ("HWB105", "Norm.forward_cuda", ("nobody",)),
        ("HWB105", "Norm.forward_npu", ("nobody",)),
    }
    assert modules(tmp_path / "position", "return self.norm(x, 1, 2)") == {
        ("HWB103", "Norm.forward_npu", ("post (3rd positional)",))
    }
    stricter = NORM.replace("forward_npu(self, x, residual=None)", "forward_npu(self, x, residual)")
    assert modules(tmp_path / "required", "return self.norm(x)", stricter) == {
        ("HWB102", "Norm.forward_npu", ("residual",))
    }
    assert modules(tmp_path / "all", "return self.norm()") == {
        ("HWB106", "Norm.forward_cuda", ("x",)),
        ("HWB106", "Norm.forward_npu", ("x",)),
    }


def test_a_platform_that_a_module_leaves_to_its_base_is_not_held_against_it(tmp_path: Path) -> None:
    native = NORM.replace("forward_npu(self, x, residual=None)", "forward_native(self, x, residual=None)")
    cuda_alone = NORM.partition("        def forward_npu")[0]
    assert modules(tmp_path / "inherited", "return self.norm(x, post=1)", native) == {
        ("HWB101", "Norm.forward_native", ("post",))
    }
    assert not modules(tmp_path / "declared", "return self.norm(x, post=1)", cuda_alone)


def test_hardware_tests_around_a_modules_call_choose_its_method(tmp_path: Path) -> None:
    assert not modules(tmp_path / "hip", "if is_hip(): return self.norm(x, post=1)")
    assert not modules(tmp_path / "cuda", "if is_cuda(): return self.norm(x, post=1)")
    assert modules(tmp_path / "npu", "if is_npu(): return self.norm(x, post=1)") == {
        ("HWB105", "Norm.forward_npu", ("post",))
    }


def test_a_method_pinned_by_the_subclass_joins_those_of_the_base(tmp_path: Path) -> None:
    pinned = (
        NORM
        + """
        def __init__(self, fast=False):
            super().__init__()
            if fast:
                self._forward_method = self.forward_fused
        def forward_fused(self, x):
            return x
"""
    )
    assert modules(tmp_path, "return self.norm(x, post=1)", pinned) == {
        ("HWB101", "Norm.forward_npu", ("post",)),
        ("HWB101", "Norm.forward_fused", ("post",)),
    }


def test_platform_methods_are_known_by_name_where_their_base_or_its_choice_cannot_be_seen(tmp_path: Path) -> None:
    wanted = {("HWB101", "Norm.forward_npu", ("post",))}
    assert modules(tmp_path / "outside", "return self.norm(x, post=1)", ops=None) == wanted
    by_name = """
        import torch.nn as nn
        class CustomOp(nn.Module):
            def forward(self, *args, backend=None, **kwargs):
                method = getattr(self, f"forward_{platform()}")
                return method(*args, **kwargs)
    """
    assert modules(tmp_path / "named", "return self.norm(x, post=1)", ops=by_name) == wanted
    assert not modules(tmp_path / "taken", "return self.norm(x, backend=1)", ops=by_name)


def test_a_forward_under_a_decorator_that_works_with_and_without_options_is_followed(tmp_path: Path) -> None:
    traced = (
        DISPATCHING.replace("def forward(self", "@traced\n        def forward(self")
        + """
    def traced(func=None, *, name=None):
        def decorator(f):
            def wrapper(*args, **kwargs):
                return f(*args, **kwargs)
            return wrapper
        return decorator if func is None else decorator(func)
"""
    )
    assert modules(tmp_path, "return self.norm(x, post=1)", ops=traced) == {("HWB101", "Norm.forward_npu", ("post",))}


def test_another_class_that_an_attribute_may_hold_is_another_protocol(tmp_path: Path) -> None:
    two = (
        NORM
        + """
    class Gated(CustomOp):
        def forward_cuda(self, x, gate, shift):
            return x, gate, shift
        def forward_npu(self, x, gate, shift):
            return x, gate, shift
"""
    )
    layer = LAYER.replace("import Norm", "import Gated, Norm").replace("Norm()", "Norm() if plain() else Gated()")
    files = {"ops.py": DISPATCHING, "norm.py": two, "layer.py": layer.format(call="return self.norm(x, 1)")}
    assert not shown(write(tmp_path, files))


def test_packages_need_no_init_file(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "engine/srt/ops/sum.py": "def total(x, y):\n    return x, y\n",
            "engine/srt/run.py": "from engine.srt.ops.sum import total\nimport engine.srt.ops.sum as ops\n"
            "total(1)\nops.total(1, 2, z=3)\n",
        },
    )
    assert brief(shown(tmp_path)) == {("HWB106", "total", ("y",)), ("HWB105", "total", ("z",))}


def test_a_dataclass_takes_its_fields_bases_first(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "config.py": """
                from dataclasses import dataclass, field
                @dataclass
                class Base:
                    rank: int
                    size: int = 1
                @dataclass
                class Config(Base):
                    names: list = field(default_factory=list)
                    hidden: int = field(default=3, init=False)
                Config(1, 2, [])
                Config(names=[])
                Config(1, hidden=2)
            """
        },
    )
    assert brief(shown(tmp_path)) == {("HWB106", "Config", ("rank",)), ("HWB105", "Config", ("hidden",))}


def test_a_name_defined_twice_means_the_last_definition(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "twice.py": """
                class Normalize:
                    def __init__(self, mean, std):
                        self.mean = mean, std
                def use(image):
                    return Normalize(mean=1, std=2)
                def Normalize(channels):
                    return channels
            """
        },
    )
    assert brief(shown(tmp_path)) == {("HWB105", "Normalize", ("mean", "std", "channels"))}


def test_an_override_that_swallows_a_keyword_its_base_reads_is_found(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "replay.py": """
                class Base:
                    def replay(self, bs, rows, track=None):
                        return bs, rows, track
                    def run(self):
                        return self.replay(1, 2, track=3)
                class Npu(Base):
                    def replay(self, bs, rows, **kwargs):
                        return bs, rows
            """
        },
    )
    assert brief(shown(tmp_path)) == {("HWB108", "Npu.replay", ("track",))}


def test_a_second_protocol_under_one_name_is_no_drift(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "methods.py": """
                class Method:
                    def apply(self, layer, x, bias=None):
                        raise NotImplementedError
                class Linear(Method):
                    def apply(self, layer, x, bias=None):
                        return layer, x, bias
                class Experts(Method):
                    def apply(self, layer, dispatch_output):
                        return layer, dispatch_output
                def run(method: Method, layer, x):
                    return method.apply(layer, x, bias=None)
            """
        },
    )
    assert not shown(tmp_path)


def test_an_unknown_package_is_never_judged(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "use.py": """
                import torch
                from flash_attn import varlen
                class Own(torch.nn.Linear):
                    pass
                varlen(1, 2, unknown=3)
                torch.zeros(1, device="cpu", unknown=2)
                Own(1, 2, 3, 4, 5, unknown=6)
            """
        },
    )
    assert not shown(tmp_path)


def test_a_decorator_that_takes_a_keyword_out_changes_the_signature(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "lora.py": """
                from functools import wraps
                def sharded(function):
                    @wraps(function)
                    def inner(*args, **kwargs):
                        if kwargs.pop("decorate", True):
                            return False
                        return function(*args, **kwargs)
                    return inner
                class Layer:
                    @classmethod
                    @sharded
                    def can_replace(cls, config):
                        return config
                Layer.can_replace(1, decorate=False)
            """
        },
    )
    assert not shown(tmp_path)


def test_a_decorator_that_hands_everything_on_keeps_the_signature(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "trace.py": """
                from functools import wraps
                def traced(function):
                    @wraps(function)
                    def inner(*args, **kwargs):
                        return function(*args, **kwargs)
                    return inner
                @traced
                async def encode(x, scale=1):
                    return x, scale
                async def main():
                    return await encode(1, bias=2)
            """
        },
    )
    assert brief(shown(tmp_path)) == {("HWB105", "encode", ("bias",))}


def test_a_class_with_an_abstract_metaclass_is_constructed_as_written(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "abstract.py": """
                from abc import ABCMeta
                class Base(metaclass=ABCMeta):
                    def __init__(self, size):
                        self.size = size
                class Made(Base):
                    pass
                Made(1, 2)
            """
        },
    )
    assert brief(shown(tmp_path)) == {("HWB103", "Base.__init__", ("2nd positional",))}


def test_a_star_import_brings_the_classes_of_its_module(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "family.py": "class Base:\n    def commit(self, a): return a\n",
            "user.py": "from family import *\ndef go(x: Base):\n    x.commit(1, b=2)\n    Base().commit(1, c=2)\n",
        },
    )
    assert {f.missing for f in shown(tmp_path)} == {("b",), ("c",)}


def test_a_test_that_patches_something_is_of_low_confidence(tmp_path: Path) -> None:
    source = """
        from unittest import mock
        from unittest.mock import patch
        class A:
            def run(self, a): return a
        @patch("module.A")
        def test_name(a):
            A().run(1, b=2)
        @mock.patch.object(A, "run")
        def test_object(a):
            A().run(1, b=2)
    """
    write(tmp_path, {"module.py": source})
    assert not shown(tmp_path)
    assert {f.confidence for f in shown(tmp_path, selection=Selection(confidence="low"))} == {"low"}


def test_a_definition_that_rejects_many_calls_is_shown_at_one_of_them(tmp_path: Path) -> None:
    calls = "".join(f"def go{n}(x: A):\n    x.run(1, b=2)\n" for n in range(7))
    write(tmp_path, {"module.py": f"class A:\n    def run(self, a): return a\n{calls}", "test_module.py": ""})
    (found,) = shown(tmp_path)
    assert found.call is not None
    assert found.call.line == 4


def test_forwarders_in_a_circle_end(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "circle.py": """
                def one(*args, **kwargs): return two(*args, **kwargs)
                def two(*args, **kwargs): return one(*args, **kwargs)
                one(1, b=2)
            """
        },
    )
    assert not shown(tmp_path)


def test_a_forwarder_that_sets_a_keyword_itself_may_pass_anything(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "forward.py": """
                def take(a, b): return a, b
                def give(*args, **kwargs):
                    kwargs.setdefault("b", 1)
                    return take(*args, **kwargs)
                give(1)
                give(1, c=2)
            """
        },
    )
    assert not shown(tmp_path)


def test_a_function_put_into_a_module_from_elsewhere_is_called_too(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "ops.py": "def norm(x, eps): return x, eps\n",
            "patch.py": "import ops\ndef npu_norm(x): return x\nif is_npu():\n    ops.norm = npu_norm\n",
            "use.py": "import ops\ndef go():\n    ops.norm(1, eps=2)\n",
        },
    )
    assert brief(shown(tmp_path)) == {("HWB101", "npu_norm", ("eps",))}


def test_modules_of_packages_without_init_files_are_reached_by_their_whole_name(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "space/deep/ops.py": "def norm(x): return x\n",
            "use.py": "import space.deep.ops\ndef go():\n    space.deep.ops.norm(1, eps=2)\n",
            "from_use.py": "from space.deep import ops\ndef go():\n    ops.norm(1, bias=2)\n",
        },
    )
    assert brief(shown(tmp_path)) == {("HWB105", "norm", ("eps",)), ("HWB105", "norm", ("bias",))}


def test_relative_imports_climb_the_packages(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "pkg/__init__.py": "",
            "pkg/ops/__init__.py": "from . import norms\nfrom .norms import norm\n",
            "pkg/ops/norms.py": "def norm(x): return x\n",
            "pkg/model/layer.py": (
                "from .. import ops\nfrom ..ops import norms\ndef go():\n"
                "    ops.norm(1, a=2)\n    norms.norm(1, b=2)\n    ops.norms.norm(1, c=2)\n"
            ),
        },
    )
    assert {f.missing for f in shown(tmp_path)} == {("a",), ("b",), ("c",)}
