"""The page of policies says what the docstrings say, and what the guide shows runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from kvatlas.policies import PRESETS, policies

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "policies.md"


def table() -> str:
    """What the page says of all policies."""
    rows = [
        f"| `{name}` | {policy.summary} | {policy.scope.value} | "
        f"{', '.join(sorted(signal.value for signal in policy.observes)) or '-'} | {policy.paper or '-'} |"
        for name, policy in ((name, policies.get(name)) for name in policies.names())
    ]
    return "\n".join(["| policy | keeps | one choice for | observes | paper |", "|---|---|---|---|---|", *rows]) + "\n"


def presets() -> str:
    """What the page says of presets: a table."""
    rows = [
        f"| `{name}` | `{preset.policy}` | {preset.fixed} | {preset.says} | {preset.source} |"
        for name, preset in PRESETS.items()
    ]
    return "\n".join(["| preset | is | with | what that code does | read in |", "|---|---|---|---|---|", *rows]) + "\n"


def test_the_page_has_every_policy() -> None:
    """`python -m tests.policies.test_documents` writes the tables anew."""
    assert table() in PAGE.read_text()


def test_the_page_has_every_preset() -> None:
    assert presets() in PAGE.read_text()


def test_the_guides_policy_is_short_and_runs_as_a_third_partys_package(tmp_path: Path) -> None:
    """The text of the guide, installed as a package with its entry point, runs on the embedded model."""
    guide = (ROOT / "docs" / "adding-a-policy.md").read_text()
    (code, *_) = re.findall(r"^```python\n(.*?)^```", guide, flags=re.S | re.M)
    (entry,) = re.findall(r"^```toml\n(.*?)^```", guide, flags=re.S | re.M)
    assert code.count("\n") < 30
    module, name = re.findall(r'^\w+ = "([\w.]+):(\w+)"$', entry, flags=re.M)[0]
    assert f"class {name}(" in code
    file = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True)
    file.write_text(code)
    about = tmp_path / "your_package-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: your-package\nVersion: 1.0\n")
    lines = entry.replace('"', "").replace("[project.entry-points.", "[")
    (about / "entry_points.txt").write_text(lines)

    def kvatlas(*words: str) -> str:
        paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-m", "kvatlas", *words],
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "sinks = 4" in kvatlas("policies", "sinks")
    options = ["--kv-budget", "64", "--local-window", "8", "--ratio", "0.3", "--set", "ratio_over=thinking"]
    words = ["run", "embedded:tiny-llama", "CHAIN4", "--problems", "2", "--policy", "sinks", *options]
    assert "Pass@1" in kvatlas(*words, "--max-new-tokens", "150", "--workers", "1", "--quiet")


if __name__ == "__main__":
    text = PAGE.read_text()
    for begin, rows in (("| policy |", table()), ("| preset |", presets())):
        text = re.sub(rf"^{re.escape(begin)}.*?\n(?=\n)", lambda _, rows=rows: rows, text, flags=re.S | re.M)
    PAGE.write_text(text)
