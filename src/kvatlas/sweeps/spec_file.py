"""The YAML of a spec: what is declared as text stays the text that stands there, whatever YAML would make of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml
from yaml import MappingNode, Node, ScalarNode, SequenceNode

from kvatlas.core import KvatlasError
from kvatlas.models import Options
from kvatlas.policies import policies
from kvatlas.text import text_fields

#: Characters of a spec, and values, each alias counted as what it stands for.
MOST_CHARACTERS, MOST_NODES = 100_000, 100_000

_NULL, _TEXT = "tag:yaml.org,2002:null", "tag:yaml.org,2002:str"


def load(text: str) -> Any:
    """The plain data of a spec. A revision `0123` or `1.0` is that text; nothing (`null`, `~`) stays None.

    Raises yaml.YAMLError for what is no YAML, KvatlasError for a key that stands twice and for what is too long
    or, with its aliases written out, too much.
    """
    if len(text) > MOST_CHARACTERS:
        raise KvatlasError(f"It is longer than {MOST_CHARACTERS:,} characters.")
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _check(root, {})
        _keep_texts(_entries(root))
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _check(node: Node, sizes: dict[int, int]) -> int:
    """How many values a node stands for with its aliases written out; `sizes` are those of nodes seen before."""
    if id(node) not in sizes:
        # Who meets itself on the way down has no end.
        sizes[id(node)] = MOST_NODES + 1
        inner: list[Node] = [] if isinstance(node, ScalarNode) else list(node.value)
        if isinstance(node, MappingNode):
            keys = [key for key, _ in node.value if isinstance(key, ScalarNode)]
            first = {key.value: key for key in reversed(keys)}
            twice = next((key for key in keys if first[key.value] is not key), None)
            if twice is not None:
                raise KvatlasError(f"The key {twice.value!r} stands twice, again in line {twice.start_mark.line + 1}.")
            inner = [child for pair in node.value for child in pair]
        sizes[id(node)] = 1 + sum(_check(child, sizes) for child in inner)
    if sizes[id(node)] > MOST_NODES:
        raise KvatlasError(f"It stands for more than {MOST_NODES:,} values with its aliases written out.")
    return sizes[id(node)]


def _keep_texts(spec: dict[str, Node]) -> None:
    for model in _items(spec.get("models")):
        _keep(model, {"model", "name", *text_fields(Options)})
    for benchmark in _items(spec.get("benchmarks")):
        _keep(benchmark, {"name", "file", "prompt"})
        columns = _entries(benchmark).get("columns")
        _keep(columns, set(_entries(columns)))
    axes = _entries(spec.get("axes"))
    for key in ("settings", "baseline"):
        for setting in _items(spec.get(key)):
            named = _entries(setting).get("policy")
            texts = _parameters(named.value) if isinstance(named, ScalarNode) else frozenset()
            _keep(setting, {"policy", *texts})
            for name in texts & axes.keys():
                for value in _items(axes[name]):
                    _keep(value, set())


def _parameters(policy: str) -> frozenset[str]:
    try:
        return text_fields(policies.get(policy))
    except KvatlasError:
        # Whoever makes the plan says which policies there are.
        return frozenset()


def _entries(node: Node | None) -> dict[str, Node]:
    pairs = node.value if isinstance(node, MappingNode) else ()
    return {key.value: value for key, value in pairs if isinstance(key, ScalarNode)}


def _items(node: Node | None) -> Iterator[Node]:
    """What stands in a list; one entry may stand alone."""
    if isinstance(node, SequenceNode):
        yield from node.value
    elif node is not None:
        yield node


def _keep(node: Node | None, names: set[str]) -> None:
    """Make text of a scalar, or of the entries of a mapping that have these names."""
    for scalar in [node, *(value for name, value in _entries(node).items() if name in names)]:
        if isinstance(scalar, ScalarNode) and scalar.tag != _NULL:
            scalar.tag = _TEXT
