"""The three faults that started the project, put back into a copy of SGLang 0.5.17: found in both modes?

    python benchmarks/drift_faults.py [--folder DIR] [--output FILE]

Each fault deletes one parameter from an override of the Ascend backend. The untouched tree must be silent in contract
mode. The exit status is 1 when a fault is missed or the untouched tree is not silent.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from drift_corpus import unpacked

CONTRACT = Path(__file__).resolve().parents[1] / "contracts/engines/sglang.yaml"
ASCEND = "sglang/srt/hardware_backend/npu/attention"
FAULTS = {
    "req_pool_indices": ("ascend_hybrid_linear_attn_backend.py", "update_mamba_state_after_mtp_verify"),
    "in_capture": ("ascend_gdn_backend.py", "init_forward_metadata_out_graph"),
    "mamba_track_indices": ("ascend_hybrid_linear_attn_backend.py", "_replay_metadata"),
}


def without(source: str, function: str, parameter: str) -> str:
    """The source with one parameter deleted from a definition that has each parameter on a line of its own."""
    start = source.index(f"def {function}(")
    end = source.index("):", start)
    head = re.sub(rf"\n\s+{parameter}\b[^\n]*", "", source[start:end])
    if head == source[start:end]:
        raise SystemExit(f"{function} has no parameter {parameter}")
    return source[:start] + head + source[end:]


def reported(tree: Path, options: list[str]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "hwbackends.checker", str(tree), "--format", "json", "--no-cache", *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == 2:
        raise SystemExit(result.stderr)
    found: list[dict[str, Any]] = json.loads(result.stdout)["findings"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache/hwbackends/corpus")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    tree = unpacked("sglang==0.5.17", arguments.folder)
    modes = {"contract": ["--contract", str(CONTRACT)], "drift": ["--drift"]}
    rows: dict[str, Any] = {"untouched, contract": len(reported(tree, modes["contract"]))}
    for parameter, (file, function) in FAULTS.items():
        copy = arguments.folder / f"fault-{parameter}"
        shutil.copytree(tree / "sglang/srt", copy / "sglang/srt", dirs_exist_ok=True)
        path = copy / ASCEND / file
        path.write_text(without(path.read_text(encoding="utf-8"), function, parameter), encoding="utf-8")
        for mode, options in modes.items():
            rows[f"{parameter}, {mode}"] = any(
                parameter in f["missing"] and f["definition"]["file"] == str(path) for f in reported(copy, options)
            )
        shutil.rmtree(copy)
    print(json.dumps(rows, indent=1))
    if arguments.output:
        arguments.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if rows.pop("untouched, contract") == 0 and all(rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
