"""The page of policies says what the docstrings say, and what the guide shows runs as it stands there."""

import re
from pathlib import Path

from kvatlas.policies import PRESETS, policies

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "policies.md"


def table() -> str:
    """Return the page's table of all policies."""
    rows = [
        f"| `{name}` | {policy.summary} | {policy.scope.value} | "
        f"{', '.join(sorted(signal.value for signal in policy.observes)) or '-'} | {policy.paper or '-'} |"
        for name, policy in ((name, policies.get(name)) for name in policies.names())
    ]
    return "\n".join(["| policy | keeps | one choice for | observes | paper |", "|---|---|---|---|---|", *rows]) + "\n"


def presets() -> str:
    """Return the page's table of presets."""
    rows = [f"| `{name}` | `{preset.policy}` | {preset.fixed} |" for name, preset in PRESETS.items()]
    return "\n".join(["| preset | is | with |", "|---|---|---|", *rows]) + "\n"


def test_the_page_has_every_policy_and_every_preset() -> None:
    """`python -m tests.policies.test_documents` writes the tables anew."""
    assert table() in PAGE.read_text()
    assert presets() in PAGE.read_text()


if __name__ == "__main__":
    text = PAGE.read_text()
    for begin, rows in (("| policy |", table()), ("| preset |", presets())):
        text = re.sub(rf"^{re.escape(begin)}.*?\n(?=\n)", lambda _, rows=rows: rows, text, count=1, flags=re.S | re.M)
    PAGE.write_text(text)
