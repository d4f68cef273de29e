"""The report: complete, self-contained, and inert whatever the model wrote."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from kvatlas.core import KvatlasError, Setting
from kvatlas.report.page import TEXT_LIMIT, page, visible, write_report
from kvatlas.results import Store
from kvatlas.stats.maps import maps_of_run
from tests.stats.synthetic import AXES, grid, manifest, trace, traces

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\u202eevil\x00\x1b[31m\u2066 {{ 7*7 }}"


class _Tags(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes = [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs


def _run(tmp_path, plan, texts=lambda trace: trace.text, chance=lambda _: 0.5):
    with Store.create(tmp_path / "run") as store:
        store.put_manifest(plan)
        for key, one in traces(plan, chance):
            store.add(key, replace(one, text=texts(one)))
    return tmp_path / "run"


@pytest.fixture
def html(tmp_path):
    plan = manifest(grid("dynts", "random"))
    out = tmp_path / "out" / "report.html"
    write_report(_run(tmp_path, plan), out)
    return out.read_text("utf-8")


def test_it_holds_maps_means_comparisons_traces_and_provenance(html):
    for text in ("tiny on 2 benchmarks", "tiny | mean of 2", "tiny | CHAIN6", "Local Window Size (rows) by Ratio",
                 "Paired comparisons", "best dynts cell", "worst random cell", "baseline", "12 problems",
                 "tokens kept on average", "key-tiny-CHAIN6", "&#34;seed&#34;: 0", "0.1.0"):  # fmt: skip
        assert text in html
    assert _Tags(html).tags.count("figure") == 6
    assert len(re.findall(r'<td tabindex="0" style="background:#[0-9a-f]{6};color:#[0-9a-f]{6}">', html)) == 6 * 9


def test_it_needs_no_network_and_runs_nothing(html):
    tags = _Tags(html)
    assert not {"script", "link", "img", "iframe", "object", "form"} & set(tags.tags)
    assert not [name for name, _ in tags.attributes if name.startswith("on") or name == "src"]
    assert all(value.startswith("#") for name, value in tags.attributes if name == "href")
    assert "http://" not in html
    assert "https://" not in html
    assert "default-src 'none'" in html


def test_hostile_text_is_inert_and_visible(tmp_path):
    hostile = manifest(grid("dynts"), models=("<script>m</script>",), benchmarks=('B"><script>',))
    out = tmp_path / "r.html"
    write_report(_run(tmp_path, hostile, texts=lambda _: HOSTILE), out)
    html = out.read_text("utf-8")
    assert "script" not in _Tags(html).tags
    assert "img" not in _Tags(html).tags
    assert "&lt;/pre&gt;&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "⟨U+202E⟩evil⟨U+0000⟩⟨U+001B⟩[31m⟨U+2066⟩ {{ 7*7 }}" in html
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069]", html)


def test_long_traces_are_cut_and_said(tmp_path):
    out = tmp_path / "r.html"
    write_report(_run(tmp_path, manifest(grid("dynts")), texts=lambda _: "x" * 1_000_000), out)
    assert f"{1_000_000 - TEXT_LIMIT:,} more characters" in out.read_text("utf-8")
    assert out.stat().st_size < 1_000_000


def test_a_partial_run_is_refused_or_says_so(tmp_path):
    plan = manifest(grid("dynts"))
    folder = tmp_path / "run"
    with Store.create(folder) as store:
        store.put_manifest(plan)
        for key, one in list(traces(plan))[24:]:
            store.add(key, one)
    with pytest.raises(KvatlasError, match="24 of 480 traces are missing"):
        write_report(folder, tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()
    write_report(folder, tmp_path / "r.html", partial=True)
    html = (tmp_path / "r.html").read_text("utf-8")
    assert '<p class="warn">PARTIAL: 24 of 240 traces are missing, in 1 cell</p>' in html
    assert '<td class="none" aria-label="no traces"></td>' in html


def test_no_run_and_no_place_to_write(tmp_path):
    with pytest.raises(KvatlasError, match="is no run"):
        write_report(tmp_path, tmp_path / "r.html")
    with pytest.raises(KvatlasError, match="is a folder"):
        write_report(_run(tmp_path, manifest(grid("dynts"), problems=2)), tmp_path)


def test_one_map_alone_many_columns_many_models():
    ratios = tuple(n / 20 for n in range(1, 13))
    settings = [Setting.of("dynts", local_window=w, ratio=r) for w in (8, 16) for r in ratios]
    axes = (AXES[0], ("ratio", ratios))
    plan = manifest(settings, models=("one", "two"), benchmarks=("CHAIN6",), baselines=(), problems=3, axes=axes)
    html = page(plan, maps_of_run(plan, traces(plan)))
    assert "one, two on CHAIN6" in html
    assert 'class="heat wide" style="--columns: 13"' in html
    assert "mean of" not in re.sub("<style>.*</style>", "", html, flags=re.DOTALL)
    assert "Paired comparisons" not in html


def test_verdicts_tell_why_a_trace_is_wrong():
    plan = manifest(grid("dynts"))
    right, wrong = (trace(plan.expected[0], "p0", 0, correct) for correct in (True, False))
    html = page(plan, maps_of_run(plan, traces(plan)), examples=[("best", right), ("worst", wrong)])
    assert '<span class="badge right">right</span>' in html
    assert '<span class="badge wrong">wrong (truncated)</span>' in html


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("数学 é €", "数学 é €"),
        ("a\u200bb\ufeff", "a⟨U+200B⟩b⟨U+FEFF⟩"),
        ("\r\x7f\x9b", "⟨U+000D⟩⟨U+007F⟩⟨U+009B⟩"),
        ("\ud800", "⟨U+D800⟩"),
        (7, 7),
    ],
)  # fmt: skip
def test_invisible_characters_are_made_visible(text, shown):
    assert visible(text) == shown
