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
    places = {
        "pyproject.toml": "pyproject.toml", "README.md": "README.md", "gitignore": ".gitignore",
        "ci.yml": ".github/workflows/ci.yml", "__init__.py": f"{package}/__init__.py",
        "manifest.yaml": f"{package}/manifest.yaml", "probe.py": f"{package}/probe.py",
    }  # fmt: skip
    made = {path: _fill(_template(file), values) for file, path in places.items()}
    return made | {f"{package}/plugin.py": plugin(name, package, contracts)}


def _range(contract: Contract) -> str:
    """A line of the manifest: this version of a contract, up to the next one that may break."""
    return f'  {contract.name}: ">={contract.version},<{int(contract.version.split(".")[0]) + 1}.0"'


def _template(file: str) -> str:
    """A file of the folder beside this one; `@name@` stands for a value."""
    return (Path(__file__).parent / "templates" / f"{file}.txt").read_text(encoding="utf-8")


def _fill(template: str, values: dict[str, str]) -> str:
    for key, value in values.items():
        template = template.replace(f"@{key}@", value)
    return template


def plugin(name: str, package: str, contracts: Contracts) -> str:
    """The plugin module: one stub per hook of the contracts, marked as not written."""
    stubs = [_stub(hook) for hook in contracts.hooks.values() if hook.role != "probe"]
    return _fill(_template("plugin.py"), {"name": name, "package": package}) + "\n\n".join(["", *stubs])


def _stub(hook: Hook) -> str:
    lines = ["@hookimpl", "@unwritten", f"def {hook.name}("]
    lines += [
        f"{_INDENT}{p.name}: {_annotation(p)}{'' if p.required else f' = {p.default!r}'}," for p in hook.parameters
    ]
    lines += [f") -> {hook.returns['type']}:", f'{_INDENT}"""{hook.summary}"""']
    return "\n".join([*lines, f'{_INDENT}raise _todo("{hook.name}")', ""])


def _annotation(parameter: Parameter) -> str:
    none = parameter.optional and parameter.default is None
    return f"{parameter.type} | None" if none else parameter.type
