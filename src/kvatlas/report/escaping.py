"""Hostile text in a page: how data stands in it."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

from kvatlas.text import visible


def embedded(value: Any) -> str:
    """JSON that can stand inside a script element: no character in it ends the element or begins markup.

    All texts in it, keys too, are made `visible`.
    """
    text = json.dumps(_made_visible(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _made_visible(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {visible(key): _made_visible(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_made_visible(item) for item in value]
    return value


def policy_hash(text: str) -> str:
    """What a content security policy calls this exact inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
