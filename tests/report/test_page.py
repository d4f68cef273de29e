"""The report: complete, self-contained, and inert whatever the model wrote."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from kvatlas.core import EvictionTrace, KvatlasError, Setting
from kvatlas.report.escaping import visible
from kvatlas.report.page import write_report
from kvatlas.report.page_json import front
from kvatlas.report.pictures import Picture
from kvatlas.report.traces import TEXT_LIMIT, choose, coded_evictions
from kvatlas.results import Store
from kvatlas.stats.run_analysis import RunAnalysis
from kvatlas.stats.run_data import RunData, short_names
from kvatlas.stats.table import TraceTable
from tests.stats.synthetic import AXES, grid, manifest, setting, traces

HOSTILE = "</pre></script><script>alert(1)</script><img src=x onerror=alert(2)>\u202eevil\x00\x1b[31m\u2066 {{ 7*7 }}"


class _Tags(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.data = [], [], ""
        self._in_data = False
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self._in_data = ("id", "data") in attrs

    def handle_data(self, data):
        if self._in_data:
            self.data += data


def build(tmp_path, plan, texts=lambda trace: trace.text, chance=lambda _: 0.5):
    with Store.create(tmp_path / "run") as store:
        store.put_manifest(plan)
        for key, item in traces(plan, chance):
            store.add(key, replace(item, text=texts(item)))
    return tmp_path / "run"


def report(tmp_path, plan, texts=lambda trace: trace.text, **options):
    out = tmp_path / "out" / "report.html"
    write_report(RunAnalysis(RunData.open(build(tmp_path, plan, texts))), out, **options)
    return out.read_text("utf-8")


def data_of(html):
    return json.loads(_Tags(html).data)


@pytest.fixture
def html(tmp_path):
    return report(tmp_path, manifest(grid("dynts", "random")))


def test_it_holds_words_maps_comparisons_traces_and_provenance(html):
    for text in ("tiny on 2 benchmarks", "Every map as text", "lose at most 3 points", "maps show a difference",
                 "Paired comparisons", "best dynts cell", "key-tiny-CHAIN6", "&#34;seed&#34;: 0", "0.1.0"):  # fmt: skip
        assert text in html
    data = data_of(html)
    assert [(item["benchmark"], item["policy"]) for item in data["maps"]] == [
        (benchmark, policy) for benchmark in ("mean of 2", "CHAIN6", "CHAIN8") for policy in ("dynts", "random")
    ]
    for item in data["maps"]:
        assert (item["rows"], item["columns"]) == (["32", "16", "8"], ["0.1", "0.3", "0.5"])
        assert all(number is not None for row in item["cells"] for number in row)
        assert item["frame"] == "shown to lose at most 3 points against the full cache"
        assert not any(any(row) for row in item["framed"])
    cell = data["cells"][data["maps"][2]["cells"][0][0]]
    assert cell["short"] == "dynts(local_window=32, ratio=0.1)"
    assert (cell["problems"], cell["samples"], cell["kept"], cell["output"], cell["peak"]) == (12, 2, 60.5, 100, 96)
    assert len(cell["difference"]) == 3
    assert 0 <= cell["truncated"] <= 100
    assert cell["low"] < cell["value"] < cell["high"]


def test_what_a_run_cannot_show_stands_right_beneath_the_verdict(tmp_path):
    plan = manifest(grid("dynts"))
    with Store.create(tmp_path / "run") as store:
        store.put_manifest(plan)
        for key, trace in traces(plan, lambda _: 0.1):
            store.add(key, replace(trace, usage=replace(trace.usage, compressions=0)))
    write_report(RunAnalysis(RunData.open(tmp_path / "run")), tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text("utf-8")
    beneath = html[html.index('id="verdicts"') : html.index('id="summary"')]
    assert "What limits the run (5)" in beneath
    first, second, third, *_ = re.findall(r"<p>(.*?)</p>", beneath)
    assert "traces are without an answer (0) or truncated" in first
    assert "CHAIN8" in second
    assert third.startswith("CHAIN6: 0 of 216 traces under a KV budget were compressed")
    assert "no setting is recommended, because none of the 432 traces under a KV budget was compressed" in html
    data = data_of(html)
    assert {item["vacuous"] for item in data["maps"] if item["benchmark"] == "CHAIN6"} == {
        "none of the 216 traces under a KV budget was compressed"
    }
    audits = [data["cells"][number]["audit"] for row in data["maps"][1]["cells"] for number in row]
    # 20 prompt tokens fill a tenth of what is older than the window.
    assert [audit["no_choice"] for audit in audits] == [100.0, 100.0, 0.0, 100.0, 0.0, 0.0, 100.0, 0.0, 0.0][
        : len(audits)
    ]


def test_outcomes_say_what_every_trace_came_to(tmp_path):
    plan = manifest(grid("dynts"), problems=3)
    data = data_of(report(tmp_path, plan))
    (first, second) = data["outcomes"]
    assert (first["benchmark"], second["benchmark"]) == ("CHAIN6", "CHAIN8")
    assert first["problems"] == ["p0", "p1", "p2"]
    assert first["samples"] == 2
    assert len(first["rows"]) == 10
    with Store.open(tmp_path / "run") as store:
        stored = {(t.benchmark, str(t.setting), t.problem, t.sample): t.grade.correct for _, t in store.traces()}
    for table in data["outcomes"]:
        for row in table["rows"]:
            name = data["cells"][row["cell"]]["name"]
            wanted = [stored[table["benchmark"], name, p, s] for p in table["problems"] for s in range(2)]
            assert row["marks"] == "".join("r" if right else "t" for right in wanted)


def test_it_needs_no_network_and_runs_its_own_script_alone(html):
    tags = _Tags(html)
    assert not {"link", "iframe", "object", "form"} & set(tags.tags)
    assert tags.tags.count("script") == 2
    assert not [name for name, _ in tags.attributes if name.startswith("on") or name == "style"]
    assert all(value.startswith("data:image/") for name, value in tags.attributes if name == "src")
    assert all(value.startswith("#") for name, value in tags.attributes if name == "href")
    assert "https://" not in html
    assert html.replace("http://www.w3.org/2000/svg", "").count("http://") == 0
    assert re.search(
        r"default-src 'none'; style-src 'sha256-[\w+/=]+'; script-src 'sha256-[\w+/=]+'; img-src data:", html
    )


def test_hostile_text_is_inert_and_visible(tmp_path):
    hostile = manifest(grid("dynts"), models=("<script>m</script>",), benchmarks=('B"><script>',))
    html = report(tmp_path, hostile, texts=lambda _: HOSTILE)
    tags = _Tags(html)
    assert tags.tags.count("script") == 2
    assert [value[:22] for name, value in tags.attributes if name == "src"] == ["data:image/png;base64,"]
    assert tags.tags.count("img") == 1
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069]", html)
    data = json.loads(tags.data)
    assert data["traces"][0]["text"] == visible(HOSTILE)
    assert "⟨U+202E⟩evil⟨U+0000⟩⟨U+001B⟩[31m⟨U+2066⟩ {{ 7*7 }}" in data["traces"][0]["text"]


def test_long_traces_are_cut_and_said(tmp_path):
    html = report(tmp_path, manifest(grid("dynts"), problems=2), texts=lambda _: "x" * 1_000_000)
    item = data_of(html)["traces"][0]
    assert len(item["text"]) == TEXT_LIMIT
    assert item["more"] == 1_000_000 - TEXT_LIMIT
    assert len(html) < 6_000_000


def test_traces_that_do_not_fit_stand_in_a_folder_beside(tmp_path, monkeypatch):
    monkeypatch.setattr("kvatlas.report.page.TRACES_LIMIT", 9_000)
    plan = manifest(grid("dynts"), problems=3)
    out = tmp_path / "my report.html"
    written = write_report(RunAnalysis(RunData.open(build(tmp_path, plan))), out, per_cell=1, trace_pages=True)
    data = data_of(out.read_text("utf-8"))
    assert 5 < len(data["traces"]) <= 20
    assert data["folder"] == "my report.traces"
    assert len(written) == 1 + 20
    shard = written[1].read_text("utf-8")
    assert _Tags(shard).tags.count("script") == 2
    assert len(data_of(shard)["traces"]) == 6
    assert ("href", "../my%20report.html") in _Tags(shard).attributes
    assert write_report(RunAnalysis(RunData.open(tmp_path / "run")), out, per_cell=1) == [out]
    assert "folder" not in data_of(out.read_text("utf-8"))


def test_a_small_run_is_whole_in_its_page(tmp_path):
    plan = manifest(grid("dynts"), problems=2)
    out = tmp_path / "r.html"
    assert write_report(RunAnalysis(RunData.open(build(tmp_path, plan))), out, trace_pages=True) == [out]
    assert len(data_of(out.read_text("utf-8"))["traces"]) == 2 * 10 * 2 * 2


def test_no_traces_are_shown_where_none_are_asked_for(tmp_path):
    assert data_of(report(tmp_path, manifest(grid("dynts"), problems=2), per_cell=0))["traces"] == []


def test_a_partial_run_is_refused_or_says_so(tmp_path):
    plan = manifest(grid("dynts"))
    folder = tmp_path / "run"
    with Store.create(folder) as store:
        store.put_manifest(plan)
        for key, trace in list(traces(plan))[24:]:
            store.add(key, trace)
    with pytest.raises(KvatlasError, match="24 of 480 traces are missing"):
        write_report(RunAnalysis(RunData.open(folder)), tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()
    write_report(RunAnalysis(RunData.open(folder, partial=True)), tmp_path / "r.html")
    html = (tmp_path / "r.html").read_text("utf-8")
    assert '<p class="warn">PARTIAL: 24 of 240 traces are missing, in 1 cell</p>' in html
    assert data_of(html)["maps"][1]["cells"][2][0] is None


def test_no_run_an_empty_run_and_no_place_to_write(tmp_path):
    with pytest.raises(KvatlasError, match="is no run"):
        write_report(RunAnalysis(RunData.open(tmp_path)), tmp_path / "r.html")
    with Store.create(tmp_path / "empty") as store:
        store.put_manifest(manifest(grid("dynts")))
    with pytest.raises(KvatlasError, match="none of its 480 traces"):
        write_report(RunAnalysis(RunData.open(tmp_path / "empty")), tmp_path / "r.html")
    with pytest.raises(KvatlasError, match="is a folder"):
        write_report(RunAnalysis(RunData.open(build(tmp_path, manifest(grid("dynts"), problems=2)))), tmp_path)


def test_one_benchmark_many_columns_many_models(tmp_path):
    ratios = tuple(n / 20 for n in range(1, 13))
    settings = [Setting.of("dynts", local_window=w, ratio=r) for w in (8, 16) for r in ratios]
    axes = (AXES[0], ("ratio", ratios))
    plan = manifest(settings, models=("one", "two"), benchmarks=("CHAIN6",), baselines=(), problems=3, axes=axes)
    html = report(tmp_path, plan)
    assert "one, two on CHAIN6" in html
    data = data_of(html)
    assert {item["benchmark"] for item in data["maps"]} == {"CHAIN6"}
    assert data["cells"][0]["difference"] is None


def test_forty_benchmarks_with_odd_names(tmp_path):
    benchmarks = [f"B '{n}' \"q\" ümlaut" for n in range(40)]
    plan = manifest(grid("p q"), models=('数学 "m"',), benchmarks=benchmarks, problems=2, samples=1)
    html = report(tmp_path, plan, per_cell=1)
    data = data_of(html)
    assert len(data["maps"]) == 41
    assert [item["benchmark"] for item in data["outcomes"]] == benchmarks
    assert "数学 &#34;m&#34; on 40 benchmarks" in html


def test_a_grid_of_twelve_by_twelve_stays_small(tmp_path):
    axes = (("local_window", tuple(range(1, 13))), ("ratio", tuple(n / 20 for n in range(1, 13))))
    settings = [Setting.of("dynts", local_window=w, ratio=r) for w in axes[0][1] for r in axes[1][1]]
    plan = manifest(settings, benchmarks=("MATH500",), problems=100, samples=1, axes=axes)
    html = report(tmp_path, plan, per_cell=1)
    data = data_of(html)
    assert (len(data["maps"][0]["rows"]), len(data["maps"][0]["columns"])) == (12, 12)
    assert len(html) - len(json.dumps(data["traces"])) < 400_000


@pytest.mark.parametrize(
    ("settings", "axes", "rows", "columns"),
    [
        ([Setting.of(p, kv_budget=b) for p in ("dynts", "window") for b in (64, 96)], (("kv_budget", (64, 96)),),
         ["window", "dynts"], ["64", "96"]),
        ([Setting.of("dynts", kv_budget=64), Setting.of("window", kv_budget=64)], (),
         ["full", "window", "dynts"], ["pass@1"]),
    ],
)  # fmt: skip
def test_runs_without_two_axes_have_a_page_too(tmp_path, settings, axes, rows, columns):
    html = report(tmp_path, manifest(settings, axes=axes, problems=3))
    data = data_of(html)
    assert data["maps"][1]["rows"] == rows
    assert data["maps"][1]["columns"] == columns
    assert '<img src="data:image/svg+xml;base64,' in html
    assert "Paired comparisons" not in html


def test_finished_figures_are_embedded_as_images(tmp_path):
    from kvatlas.report.page import page
    from kvatlas.report.report_data import report_data

    data = report_data(RunAnalysis(RunData.open(build(tmp_path, manifest(grid("dynts"), problems=2)))), 1, 0, 10**6)
    html = page(data, [Picture("Pairwise", "densities", b"<svg/>"), Picture("P", "", b"\x89PNG...")])
    assert 'src="data:image/svg+xml;base64,PHN2Zy8+" alt="densities"' in html
    assert 'src="data:image/png;base64,' in html
    assert '<a href="#figures">' in html


def test_problems_graded_by_progress_get_the_pairwise_figure(html, tmp_path):
    assert "a panel for every two of full, dynts, random" in html
    plan = manifest(grid("dynts"), problems=2)
    with Store.create(tmp_path / "plain") as store:
        store.put_manifest(plan)
        for key, trace in traces(plan):
            store.add(key, replace(trace, grade=replace(trace.grade, progress=float(trace.grade.correct))))
    write_report(RunAnalysis(RunData.open(tmp_path / "plain")), tmp_path / "plain.html")
    assert "Every two against each other" not in (tmp_path / "plain.html").read_text("utf-8")


def test_a_front_holds_what_no_other_beats():
    points = {0: (10.0, 0.5), 1: (20.0, 0.5), 2: (20.0, 0.7), 3: (5.0, 0.2), 4: (None, 0.9), 5: (30.0, 0.6)}
    assert front(points) == [3, 0, 2]
    assert front({}) == []


def test_settings_are_called_by_what_tells_them_apart():
    names = short_names([*grid("dynts"), setting("random", 8, 0.1), Setting.of("full")])
    assert names[setting("dynts", 8, 0.1).id] == "dynts(local_window=8, ratio=0.1)"
    assert names[setting("random", 8, 0.1).id] == "random"
    assert names[Setting.of("full").id] == "full"


def test_chosen_traces_share_a_problem_and_show_both_verdicts():
    plan = manifest(grid("dynts"), benchmarks=("CHAIN6",), problems=6, samples=1)
    every = list(traces(plan))
    chosen = choose(dict(enumerate(TraceTable.of(plan, every).cells())), 2)
    stored = {(t.setting.id, t.problem): t.grade.correct for _, t in every}
    by_cell = {}
    for item in chosen:
        by_cell.setdefault(item.cell, []).append(item.key)
    assert len({keys[0][3] for keys in by_cell.values()}) == 1
    for keys in by_cell.values():
        verdicts = [stored[key[1], key[3]] for key in keys]
        all_of_cell = {stored[s, p] for s, p in stored if s == keys[0][1]}
        assert set(verdicts) == all_of_cell


def test_evictions_are_coded_for_the_page():
    eviction_trace = EvictionTrace(1, (0, 5, 3, 0, 5, 0, 0, 0), (1, 0, 0, 1, 0, 1, 1, 1))
    assert coded_evictions(eviction_trace, 2, 6, 1) == {
        "steps": [3, 5],
        "left": "$#%###",
        "judged": 3,
        "prompt_left": [0, 1],
    }
    shared = coded_evictions(EvictionTrace(4, (0, 0, 2), (4, 1, 0)), 1, 2, None)
    assert shared["holders"] == 4
    assert len(shared["held"]) == 2
    assert coded_evictions(EvictionTrace(1, (0,), (1,)), 1, 0, 8) == {
        "steps": [],
        "left": "",
        "judged": 0,
        "prompt_left": [],
    }
    many = coded_evictions(EvictionTrace(1, tuple(range(1, 301)), (0,) * 300), 0, 300, 1)
    assert many["left"] == list(range(1, 301))


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
