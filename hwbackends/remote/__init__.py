"""Hooks of a backend in a process of their own: `client` sends a call's arguments and takes back what the hook wrote,
`serve` makes the calls, `zygote` starts processes quickly. The caller's memory is out of the hook's reach: a process
sees the inputs of its calls and nothing of what they are for."""

from __future__ import annotations
