"""``python -m hwbackends.checker`` is ``hwbackends check``."""

from .command import check

if __name__ == "__main__":
    check(prog_name="hwbackends check")
