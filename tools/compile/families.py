"""The families of scenes that are compiled: of convs, and of SSMs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import scenes
import ssm_scenes

AnyScene = scenes.Scene | ssm_scenes.SsmScene
FAMILIES: dict[str, Callable[[], list[Any]]] = {"conv": scenes.scenes, "ssm": ssm_scenes.scenes}


def family_of(scene: AnyScene) -> str:
    """Its name in FAMILIES."""
    return "conv" if isinstance(scene, scenes.Scene) else "ssm"


def hot() -> Iterator[AnyScene]:
    """What an engine runs on every layer of every step."""
    return itertools.chain(scenes.hot(), ssm_scenes.hot())


def play(scene: AnyScene, hooks: Any) -> None:
    """Call the hooks of a scene. Their launches are whatever the caller made of them."""
    if isinstance(scene, scenes.Scene):
        scenes.play(scene, hooks)
    else:
        ssm_scenes.play(scene, hooks)
