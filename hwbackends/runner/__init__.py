"""Packed serving of a model: scheduler, requests, prefixes, graphs, drafters."""
