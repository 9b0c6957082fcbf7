"""`python -m hwbackends`: the command line where the script is not on the path."""

from __future__ import annotations

from hwbackends.cli import main

main(prog_name="hwbackends")
