"""Writes docs/checks.md: each rule that arguments are held to, made from the rules themselves.

python tools/checks_table.py          # rewrite the page
python tools/checks_table.py --check  # exit 1 where it is not current
"""

from __future__ import annotations

import sys
from pathlib import Path

from hwbackends.ssm import checks as ssm_checks
from hwbackends.step import checks, device_checks
from hwbackends.step.rulebook import RULES, Rule

checks.with_families()
PAGE = Path(__file__).parents[1] / "docs" / "checks.md"
GROUPS = {
    "the prepare hooks": checks.PREPARE,
    "the conv and fused hooks": checks.CONV,
    "the fused hooks": checks.FUSED,
    "clear and copy": checks.SLOTS,
    "the SSM hooks": ssm_checks.SSM,
}

HEAD = """# What is checked, and where

Every backend holds its arguments to the rules below; `tools/checks_table.py` writes this page from them, and a test
holds it current. A broken rule raises a named error before anything is written: it says hook, parameter, what was
got and what is wanted, and its attribute `rule` is the name in the first column.

- **Always**: rules that Python attributes show. The reference and Ascend ask them in every call. `cuda` asks them
  when it plans a launch; a later call is held to the plan by shapes, dtypes, strides, addresses and whether memory
  may be shared, and goes back to the rules wherever one of them differs. One rule is narrower there: that a tensor
  of the batch shares no memory with an output of a preparation is asked when the launch is planned, and in checked
  mode in every call.
- **Checked mode** (`HWBACKENDS_CHECKED=1`): rules that must read device memory, and the first kind again in every
  call. They wait for the device, so they do not run inside a capture.

Without checked mode an index that is not there (a request row, virtual slot, slot, draft row or step out of range)
is padding: nothing is written for it, and its output is 0. Lengths beyond the step's tokens are cut off there. What
two rows of one step write to one slot, or write where another reads, is undefined.
"""


def page() -> str:
    """The page as it should be."""
    parts = [HEAD]
    for title, reads in (("Always", False), ("In checked mode", True)):
        parts.append(f"## {title}\n\n| rule | what is held | hooks | clause |\n| --- | --- | --- | --- |")
        parts += [_row(rule) for rule in RULES if rule.reads is reads]
        parts.append("")
    return "\n".join(parts)


def _row(rule: Rule) -> str:
    return f"| `{rule.name}` | {rule.text} | {_hooks(rule)} | {rule.clause} |"


def _hooks(rule: Rule) -> str:
    for name, hooks in GROUPS.items():
        if rule.hooks == hooks:
            return name
    return ", ".join(f"`{hook}`" for hook in rule.hooks)


def main() -> int:
    """Write the page, or compare it."""
    assert device_checks.rules  # its import declares the rules of checked mode
    if "--check" in sys.argv[1:]:
        return int(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
