"""Tools for tests of backends and engines: a graph recorder, guards, an emulated device. Nothing here serves a model."""
