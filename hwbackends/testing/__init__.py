"""Tools for tests of backends and engines: a recorder for graphs, an emulated device. Nothing here serves a model."""
