"""The site of guides and API builds without a warning, and its API page names what is there."""

import re
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]


def test_every_page_is_in_the_navigation() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = {page for entry in nav for value in entry.values() for page in _pages(value)}
    assert listed == {path.name for path in (ROOT / "docs").glob("*.md")}


def _pages(value: str | list[dict[str, str]]) -> list[str]:
    return [value] if isinstance(value, str) else [page for entry in value for page in entry.values()]


def test_the_site_builds_in_strict_mode(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert pages <= {path.parent.name for path in (tmp_path / "site").rglob("index.html")}
    api = (tmp_path / "site" / "api" / "index.html").read_text()
    for name in ("kvatlas.serve.service.Service.ask", "kvatlas.engine.engine.Engine.run", "kvatlas.core.Usage"):
        assert f'id="{name}"' in api
    text = re.sub(r"<[^>]+>", "", api)
    assert "kv_budget" in text
