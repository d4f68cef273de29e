from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from kvatlas import registry
from kvatlas.core import KvatlasError
from kvatlas.registry import Registry


def test_third_parties_are_found_by_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = [EntryPoint("theirs", "collections:OrderedDict.fromkeys", "g")]
    monkeypatch.setattr(registry, "entry_points", lambda group: theirs if group == "g" else [])
    found: Registry[Any] = Registry("thing", "g", {"ours": "json:loads"})
    assert found.names() == ["ours", "theirs"]
    assert found.get("ours")("1") == 1
    assert list(found.get("theirs")("ab")) == ["a", "b"]
    with pytest.raises(KvatlasError, match="Unknown thing 'other'; valid are: ours, theirs"):
        found.get("other")


def test_a_name_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: [EntryPoint("ours", "a:b", group)])
    found: Registry[Any] = Registry("thing", "g", {"ours": "json:loads"})
    with pytest.raises(KvatlasError, match="registered twice: json:loads and a:b"):
        found.names()
