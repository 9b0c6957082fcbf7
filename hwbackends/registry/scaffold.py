"""`hwbackends new-backend NAME`: writes a complete, installable plugin package whose hooks all raise a named error and
which claims nothing yet. Signatures come from the contracts, so that they fit by construction."""

from __future__ import annotations

import re
from pathlib import Path

import click

from hwbackends import __version__
from hwbackends.contract.model import Contract, Contracts, Hook, Parameter
from hwbackends.contract.reader import installed

_INDENT = "    "


@click.command("new-backend")
@click.argument("name")
@click.option(
    "--device", default="cpu", show_default=True, help="Device type that the backend serves, as torch names it."
)
@click.option("--folder", type=click.Path(file_okay=False), help="Where to write. Default: ./hwbackends-NAME.")
def new_backend(name: str, device: str, folder: str | None) -> None:
    """Write a new backend's plugin package."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise click.BadParameter(
            f"got {name!r}, wanted small letters, digits and _, such as 'myvendor'", param_hint="NAME"
        )
    if not re.fullmatch(r"[a-z]+", device):
        raise click.BadParameter(f"got {device!r}, wanted a device type, such as 'cuda'", param_hint="--device")
    root = Path(folder) if folder else Path(f"hwbackends-{name.replace('_', '-')}")
    if root.exists() and any(root.iterdir()):
        raise click.ClickException(f"{root} is not empty; name another folder with --folder")
    try:
        _write(root, files(name, device, installed()))
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}; name another folder with --folder") from error
    click.echo(f"wrote {root}; next:\n  pip install -e {root}\n  hwbackends conformance run {name} --device {device}")


def _write(root: Path, texts: dict[str, str]) -> None:
    for path, text in texts.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


def files(name: str, device: str, contracts: Contracts) -> dict[str, str]:
    """Path to text of every file of the package."""
    package, project = f"hwbackends_{name}", f"hwbackends-{name.replace('_', '-')}"
    values = {
        "name": name, "package": package, "project": project, "device": device, "version": __version__,
        "contracts": "\n".join(_range(contract) for contract in contracts.values()),
    }  # fmt: skip
    templates = {
        "pyproject.toml": _PYPROJECT, "README.md": _README, ".gitignore": _IGNORE,
        ".github/workflows/ci.yml": _WORKFLOW, f"{package}/__init__.py": _INIT,
        f"{package}/manifest.yaml": _MANIFEST, f"{package}/probe.py": _PROBE,
    }  # fmt: skip
    made = {path: _fill(text, values) for path, text in templates.items()}
    return made | {f"{package}/plugin.py": plugin(name, package, contracts)}


def _range(contract: Contract) -> str:
    """A line of the manifest: this version of a contract, up to the next one that may break."""
    return f'  {contract.name}: ">={contract.version},<{int(contract.version.split(".")[0]) + 1}.0"'


def _fill(template: str, values: dict[str, str]) -> str:
    for key, value in values.items():
        template = template.replace(f"@{key}@", value)
    return template


def plugin(name: str, package: str, contracts: Contracts) -> str:
    """The plugin module: one stub per hook of the contracts."""
    stubs = [_stub(hook) for hook in contracts.hooks.values() if hook.role != "probe"]
    return _fill(_PLUGIN, {"name": name, "package": package}) + "\n\n".join(["", *stubs])


def _stub(hook: Hook) -> str:
    lines = ["@hookimpl", f"def {hook.name}("]
    lines += [
        f"{_INDENT}{p.name}: {_annotation(p)}{'' if p.required else f' = {p.default!r}'}," for p in hook.parameters
    ]
    lines += [f") -> {hook.returns['type']}:", f'{_INDENT}"""{hook.summary}"""']
    return "\n".join([*lines, f'{_INDENT}raise _todo("{hook.name}")', ""])


def _annotation(parameter: Parameter) -> str:
    none = parameter.optional and parameter.default is None
    return f"{parameter.type} | None" if none else parameter.type


_PYPROJECT = """[build-system]
requires = ["hatchling>=1.26"]
build-backend = "hatchling.build"

[project]
name = "@project@"
version = "0.1.0"
description = "hwbackends plugin for @name@"
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["hwbackends>=@version@"]

[project.optional-dependencies]
test = ["hwbackends[reference,test]", "ruff>=0.9"]

# One line makes the backend known; the value is text until somebody asks for it.
[project.entry-points."hwbackends.backends"]
@name@ = "@package@.plugin"

[tool.hatch.build.targets.wheel]
packages = ["@package@"]

[tool.ruff]
line-length = 120
target-version = "py311"

[tool.ruff.lint]
select = ["E", "F", "W", "I", "B", "UP"]
"""

_README = """# @project@

A backend for hwbackends. Write a hook in `@package@/plugin.py`, claim it in `@package@/manifest.yaml`, and run

    pip install -e '.[test]'
    hwbackends check @package@
    hwbackends conformance run @name@ --device @device@ --report conformance.json

until the last line says `certified`. The manual is "Add a backend" in hwbackends' documentation.
"""

_IGNORE = """__pycache__/
*.egg-info/
build/
dist/
.pytest_cache/
.ruff_cache/
conformance.*
"""

_WORKFLOW = """name: ci
on: [push, pull_request]
jobs:
  conformance:
    runs-on: ubuntu-latest  # a runner with the device, once the hooks need it
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
      - run: pip install -e '.[test]'
      - run: ruff format --check . && ruff check .
      - run: hwbackends check @package@
      - run: hwbackends conformance run @name@ --device @device@ --report conformance.json
      - uses: actions/upload-artifact@v4
        if: always()
        with:
          name: conformance
          path: conformance.*
"""

_INIT = '''"""hwbackends plugin for @name@. Keep this file free of imports: it is read to find the manifest."""
'''

_MANIFEST = """# Read before the plugin is imported: for which contract it was written, and what it claims.
name: @name@
contracts:
@contracts@
devices: [@device@]
priority: 10
# What the conformance kit holds you to. A key that you leave out is claimed in full; a hook that is not listed is
# counted as not claimed. Write `hooks: all` once every hook is there.
capabilities:
  hooks: []
  layouts: [window, ring, lazy]
  dtypes: [float16, bfloat16, float32, float64]
  mixed_dtypes: true
  widths: [2, 3, 4, 5]
  graphs: true
  large_offsets: true
"""

_PROBE = '''"""Whether this backend can run here. Asked before the plugin is imported: no torch, no device context."""

from __future__ import annotations

from importlib.util import find_spec

from hwbackends.contract.hookspecs import ProbeResult


def probe(device: str | None = None) -> ProbeResult:
    """Say yes where torch is there; look for your driver or runtime library here, without loading it."""
    if find_spec("torch") is None:
        return ProbeResult(False, "torch is not installed", "pip install torch")
    return ProbeResult(True, "torch is installed")
'''

_PLUGIN = '''"""The hooks of @name@, one function each.

`hwbackends.contract.hookspecs` says what each means; `contracts/*.yaml` number the clauses that the kit judges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwbackends.contract.hookspecs import hookimpl
from hwbackends.errors import HookNotImplementedError

from @package@ import probe as _probe

if TYPE_CHECKING:
    from hwbackends.step.batch import StepBatch
    from hwbackends.step.metadata import StepMetadata
    from hwbackends.conv.state import ConvState
    from hwbackends.step.pool import StatePool
    from torch import Tensor

probe = hookimpl(_probe.probe)


def _todo(hook: str) -> HookNotImplementedError:
    return HookNotImplementedError(f"{hook}: backend '@name@' does not have this hook yet; do not claim it")
'''
