"""Measure the cuda backend; the same as `hwbackends bench`. See docs/cuda.md."""

from hwbackends.bench.command import bench

if __name__ == "__main__":
    bench()
