"""Tools for tests of backends and engines: a graph recorder, guards, an emulated device. None of it serves a model."""
