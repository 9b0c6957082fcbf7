"""Clause tests of the contract `ssm`."""
