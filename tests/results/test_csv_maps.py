"""CSV maps: the published ones, what is read, and every fault in one sentence."""

import pytest

from kvatlas.core import KvatlasError
from kvatlas.figures.heatmap import map_figure
from kvatlas.figures.style import rendered
from kvatlas.results.csv_maps import read_maps
from kvatlas.results.export import write_maps
from kvatlas.stats.estimates import with_binomial_bounds
from kvatlas.stats.maps import mean_map

HEAD = "model,benchmark,local_window,ratio,pass_at_1\n"
GOOD = HEAD + "M,AIME24,500,0.1,40\nM,AIME24,500,0.2,41.5\nM,AIME24,1000,0.1,42\nM,AIME24,1000,0.2,43\n"


@pytest.fixture
def read(tmp_path):
    def _read(text, **options):
        path = tmp_path / "map.csv"
        path.write_text(text, encoding="utf-8")
        return read_maps(path, **options)

    return _read


def _peaks(item):
    best = max(cell.estimate.value for cell in item.cells.values())
    return round(100 * best, 1), {coord for coord, cell in item.cells.items() if cell.estimate.value > best - 1e-9}


def test_published_maps_and_their_peaks():
    maps = {item.benchmark: item for item in read_maps("published:dynts_r1_llama")}
    assert list(maps) == ["AIME24", "AIME25", "AMC23", "GPQA_D"]
    assert [next(iter(map_.cells.values())).estimate.problems for map_ in maps.values()] == [30, 30, 40, 198]
    assert {map_.policy for map_ in maps.values()} == {"dynts"}
    assert _peaks(maps["AIME24"]) == (49.3, {(2000, 0.3), (1000, 0.2)})
    assert _peaks(maps["AIME25"]) == (30.7, {(2000, 0.4), (500, 0.2)})
    assert _peaks(maps["AMC23"]) == (89.0, {(3000, 0.5), (500, 0.3)})
    assert _peaks(maps["GPQA_D"]) == (48.4, {(500, 0.3)})


@pytest.mark.parametrize("name", ["dynts_r1_llama", "dynts_r1_qwen"])
def test_published_means_are_reproduced(name):
    mean = mean_map(with_binomial_bounds(read_maps(f"published:{name}")))
    (published,) = read_maps(f"published:{name}_mean")
    assert published.benchmark == mean.benchmark
    for coord, cell in published.cells.items():
        assert mean.cells[coord].estimate.value == pytest.approx(cell.estimate.value, abs=0.0005 + 1e-9)
    if name == "dynts_r1_qwen":
        assert _peaks(published) == (56.3, {(2000, 0.4)})
        assert _peaks(mean)[1] == {(2000, 0.4)}


def test_fractions_inside_axes_ascending_unknown_is_none(read):
    (item,) = read(GOOD)
    assert item.axes == (("local_window", (500, 1000)), ("ratio", (0.1, 0.2)))
    cell = item.cells[500, 0.2]
    assert cell.estimate.value == pytest.approx(0.415)
    assert (cell.estimate.low, cell.estimate.problems, cell.estimate.samples) == (None, 30, None)
    assert str(cell.setting) == "(local_window=500, ratio=0.2)"


def test_columns_in_any_order_with_quotes_and_a_byte_order_mark(read):
    (item,) = read('\ufeffratio,local_window,pass_at_1,"model",benchmark,problems,samples\n'
                  '0.1,500,40,"a, b",My set,10,3\n\n0.2, 500,41,"a, b",My set,10,3\n'
                  '0.1,900,40,"a, b",My set,10,3\n0.2,900,41,"a, b",My set,10,3\n')  # fmt: skip
    assert (item.model, item.benchmark) == ("a, b", "My set")
    assert (item.cells[0.2, 900].estimate.problems, item.cells[0.2, 900].estimate.samples) == (10, 3)


def test_other_axes_are_taken_by_their_names(read):
    (item,) = read(
        "model,benchmark,policy,kv_budget,ratio_over,pass_at_1\nM,B,h2o,64,older,40\nM,B,h2o,64,thinking,50\n"
    )
    assert item.axes == (("kv_budget", (64,)), ("ratio_over", ("older", "thinking")))
    assert item.policy == "h2o"


def test_percentages_below_one_need_a_limit_above_one(read):
    (item,) = read(HEAD.replace("\n", ",high\n") + "M,B,500,0.1,0.5,3\nM,B,500,0.2,0.25,3\n")
    values = {coord: round(100 * cell.estimate.value, 6) for coord, cell in item.cells.items()}
    assert values == {(500, 0.1): 0.5, (500, 0.2): 0.25}


@pytest.mark.parametrize("axis", ["every", "kv_budget"])
def test_names_of_any_accepted_length_can_be_drawn(read, axis):
    other = "kv_budget" if axis == "every" else "every"
    long = "x" * 499
    rows = [f"M,B,{value},{number},40\n" for value in (f"{long}1", f"{long}2") for number in (1, 2)]
    text = f"model,benchmark,{axis},{other},pass_at_1\n" + "".join(rows)
    figure = map_figure(read(text.replace("M,B", f"{'m' * 500},{'b' * 500}")))
    assert rendered(figure, ".png", 40)


def test_a_spreadsheets_semicolons_and_decimal_commas_are_read(read):
    assert read(GOOD.replace(",", ";").replace(".", ",")) == read(GOOD)
    assert read(GOOD.replace(",", "\t")) == read(GOOD)


def test_small_percentages_of_whole_counts_are_percentages(read):
    rare = "R,AIME24,500,0.1,0.5,200,2\nR,AIME24,500,0.2,0.25,200,2\nR,AIME24,500,0.3,0,200,2\n"
    maps = read(HEAD.replace("\n", ",problems,samples\n") + "M,AIME24,500,0.1,40,30,2\n" + rare, partial=True)
    assert [round(400 * cell.estimate.value, 6) for cell in maps[1].cells.values()] == [2, 1, 0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD, "has no cells"),
        (GOOD.replace("pass_at_1", "Pass@1"), "has the columns model, .*, Pass@1; expected each once: model, benchm"),
        (GOOD.replace(",43", ",lots"), "line 5: pass_at_1 is 'lots'; expected a number"),
        (GOOD.replace(",43", ",143"), "line 5: pass_at_1 is 143; expected a percentage from 0 to 100"),
        (GOOD.replace("41.5", "41").replace(",4", ",0.4"), "has values of pass_at_1 from 0 to 1; expected percent"),
        (GOOD.replace("1000,0.2", "1000,0.1"), "line 5 repeats the cell local_window 1000, ratio 0.1"),
        (GOOD.replace("M,AIME24,1000,0.2,43\n", ""), r"lacks 1 of 4 cells \(local_window 1000, ratio 0.2\)"),
        (GOOD.replace("0.2", "20"), "ratio is 20; expected a share from 0 to 1"),
        (GOOD.replace("1\n", "1,low,high\n").replace("43\n", "43,60,40\n"), "line 5: .* low 60 and high 40; expected"),
        (GOOD.replace("1\n", "1,low,high\n").replace("43\n", "43,60,70\n"), "line 5: pass_at_1 is 43 with low 60 and"),
        (GOOD.replace("1\n", "1,low,high\n").replace("43\n", "43,,42\n"), "line 5: pass_at_1 is 43 with .* high 42"),
        (GOOD.replace("1000", "10.5"), "local_window is 10.5; expected an integer"),
        (GOOD.replace("1000,0.2", "1000,"), "has a value of local_window alone"),
        (GOOD + "M,AIME24,,,90\nM,AIME24,,,91\n", "line 7 repeats the baseline '' of AIME24"),
        ("pass_at_1,model,benchmark,local_window,ratio\n40,M,B,500,0.1\n41,M,B,5", "line 3 ends before .* ratio"),
        (GOOD.replace("1000,0.2", "25%,0.2").replace("1000,0.1", "25.0%,0.2"), "line 5 repeats the cell .* 25%"),
        (GOOD.replace("1000", "125%"), "line 4: local_window is 125%; expected a share below 100%"),
        (GOOD.replace("AIME24,1000", '"AIME\n24",1000'), "line 5: benchmark is .*; expected one line of up to 500"),
        (GOOD.replace("AIME24,1000", "A" * 3000 + ",1000"), "line 4: benchmark is .*; expected one line of up to 500"),
        (GOOD.replace("local_window", "every").replace("1000", "nan"), "every is 'nan'; expected a finite number or a"),
        (GOOD.replace("local_window", "every").replace("1000", "1e400"), "every is '1e400'; expected a finite number"),
        (GOOD.replace("local_window", "every").replace("1000", "1_000"), "every is '1_000'; expected a finite number"),
        *[
            (GOOD.replace("1\n", f"1,{column}\n").replace("43\n", f"43,{value}\n"), f"line 5: {column} is .{end}")
            for column, value, end in [
                ("stays_tokens", "-5", "*; expected a number from 0"),
                ("kept_tokens_mean", "-0.5", "*; expected a number from 0"),
                ("seconds_mean", "1e300", "*; expected a number from 0"),
                ("output_tokens_mean", "9" * 310, "*; expected a number"),
                ("samples", "9" * 310, "*; expected a number"),
                ("low", "-500", "*; expected a percentage from 0 to 100"),
                ("high", "900", "*; expected a percentage from 0 to 100"),
            ]
        ],
        (GOOD.replace(",43", "," + "9" * 310), "line 5: pass_at_1 is '999.*; expected a number"),
        (GOOD.replace("1\n", "1,samples,truncated\n").replace("43\n", "43,2,61\n"), "truncated is 61; .* up to 60"),
        (GOOD + "N,AIME24,500,0.1,0.5\nN,AIME24,500,0.2,0.25\n", "N on AIME24: has values of pass_at_1 from 0 to 1"),
        (GOOD + 'M,AIME24,"' + "9" * 200_000 + '",0.1,4\n', "cannot be read as a CSV map"),
    ],
)  # fmt: skip
def test_faults_are_named(read, text, said):
    with pytest.raises(KvatlasError, match=said) as caught:
        read(text)
    assert "\n" not in str(caught.value)


def test_missing_cells_are_drawn_if_asked_for_and_noted(read):
    text = GOOD.replace("M,AIME24,1000,0.2,43\n", "") + "M,AMC23,500,0.1,4\n"
    first, second = read(text, partial=True)
    assert [*map(str, first.notes)] == ["PARTIAL: 1 of 4 cells are missing"]
    assert [*map(str, second.notes)] == ["PARTIAL: 3 of 4 cells are missing"]
    assert second.axes == first.axes


def test_a_missing_file_a_folder_and_bytes(tmp_path):
    with pytest.raises(KvatlasError, match="no CSV map 'nowhere"):
        read_maps("nowhere.csv")
    with pytest.raises(KvatlasError, match="cannot be read as a CSV map"):
        read_maps(tmp_path)
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(KvatlasError, match="UTF-8"):
        read_maps(tmp_path / "bytes.csv")


def test_what_is_written_reads_back_the_same(tmp_path, read):
    text = GOOD.replace("\n", ",,\n").replace("_1,,", "_1,policy,samples") + "M,AIME24,,,97.5,full,5\n"
    written = with_binomial_bounds(read(text))
    write_maps(written, tmp_path / "out.csv")
    (again,) = read_maps(tmp_path / "out.csv")
    assert again.axes == written[0].axes
    assert list(again.baselines) == ["full"]
    for coord, cell in written[0].cells.items():
        back = again.cells[coord].estimate
        assert back.value == pytest.approx(cell.estimate.value, abs=1e-6)
        assert back.low == pytest.approx(cell.estimate.low, abs=1e-6)
        assert back.problems == 30
