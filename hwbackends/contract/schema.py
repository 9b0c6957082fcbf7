"""The JSON Schema of a contract file, for editors: made from the reader's own tables, written to
`contracts/schema.json` by `python -m hwbackends.contract.schema`. A test holds the file to what this gives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hwbackends.contract import reader
from hwbackends.contract.document import Kinds
from hwbackends.contract.model import ROLES

_WORDS = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


def schema() -> dict[str, Any]:
    """The schema of `step.yaml` and of every family's contract."""
    parameter = _mapping({"name": str, "type": str}, reader.PARAMETER)
    clause = _mapping({"id": str, "text": str}, {})
    clause["properties"]["id"]["pattern"] = f"^{reader.CLAUSE_ID.pattern}$"
    hook = _mapping(reader.HOOK, {"doc": str, "forward_modes": list})
    hook["properties"] |= {
        "role": {"enum": list(ROLES)},
        "may_allocate": {"enum": [True, False, "output"]},
        "forward_modes": {"type": "array", "items": {"type": "string"}},
        "parameters": {"type": "array", "items": {"$ref": "#/$defs/parameter"}},
        "clauses": {"type": "array", "items": {"$ref": "#/$defs/clause"}},
    }
    fields = _mapping({"fields": list}, {"doc": str})
    fields["properties"]["fields"]["items"] = {"$ref": "#/$defs/parameter"}
    top = _mapping(reader.TOP, {**reader.TABLES, "imports": list})
    top["properties"]["types"]["additionalProperties"] = fields
    top["properties"]["hooks"]["items"] = {"$ref": "#/$defs/hook"}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A contract of hwbackends"}
    return {**head, **top, "$defs": {"parameter": parameter, "clause": clause, "hook": hook}}


def _mapping(required: Kinds, optional: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping with these keys and no other."""
    properties = {name: {"type": _types(kinds)} for name, kinds in {**optional, **required}.items()}
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _types(kinds: type | tuple[type, ...]) -> str | list[str]:
    return [_WORDS[kind] for kind in kinds] if isinstance(kinds, tuple) else _WORDS[kinds]


def text() -> str:
    """The schema as the file holds it."""
    return json.dumps(schema(), indent=2) + "\n"


if __name__ == "__main__":
    (reader.contracts_folder() / "schema.json").write_text(text(), encoding="utf-8")
