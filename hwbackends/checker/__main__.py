"""``python -m hwbackends.checker`` is ``hwbackends check``."""

import sys

if __name__ == "__main__":
    try:
        from .command import check

        check(prog_name="hwbackends check")
    except KeyboardInterrupt:  # while modules are loaded
        sys.exit(130)
