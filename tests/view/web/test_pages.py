"""What people see and do in a page: without a network, by keyboard, on a narrow screen and in the dark."""

import io
import itertools
import json
import time
from dataclasses import replace

import numpy as np
import pytest
from browser_tools import POINTS, redrawn
from PIL import Image
from simulated_runs import BUDGET, HOSTILE, tokens_at

from scalerl.numbers import rate
from scalerl.view.runs.figures import runs_figures
from scalerl.view.runs.overlay import overlay
from scalerl.view.style import run_look

LINES = """() => document.querySelector('.sc-plot').data
  .filter((trace) => trace.mode === 'lines').map((trace) => trace.y)"""
SHAPES = "() => document.querySelector('.sc-plot').layout.shapes"
SYMBOLS = dict(
    zip("os^DvP", ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross"), strict=True)
)
KINDS = ("several", "hundred", "long", "one", "run", "study", "groups", "mixed")


@pytest.fixture
def several(charted):
    return charted("several")


def test_what_fails_once_is_done_when_it_is_asked_for_again(several):
    calls = """async () => {
      let calls = 0;
      const call = scalerlMarks.oneAtATime(async () => {
        calls += 1;
        if (calls === 1) throw new Error("once");
      });
      await call().catch(() => {});
      await call();
      return calls;
    }"""
    assert several.evaluate(calls) == 2


def points_of(page, name):
    """The trace of a run's evaluations."""
    return next(trace for trace in page.evaluate(POINTS) if trace["meta"].get("run") == name)


WIDER = """() => [...document.querySelectorAll('.scroll')]
  .filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.textContent.slice(0, 80))"""
OVERLAPS = """() => {
  const plot = document.querySelector('.sc-plot'), { xaxis, yaxis } = plot._fullLayout;
  const { left, top } = plot.getBoundingClientRect();
  const [x, y] = [(at) => left + xaxis._offset + xaxis.d2p(at), (at) => top + yaxis._offset + yaxis.d2p(at)];
  const texts = [...document.querySelectorAll('.annotation-text, .sc-labels span')]
    .map((one) => [one.textContent, one.getBoundingClientRect()]);
  const forecasts = plot.data.filter((one) => one.marker && one.marker.symbol === 'line-ew-open')
    .map(({ x: [at], y: [middle], error_y: { array: [half] } }) => ['a forecast',
      { left: x(at) - 7, right: x(at) + 7, top: y(middle + half), bottom: y(middle - half) }]);
  const start = left + xaxis._offset;
  const lines = plot.layout.shapes.filter((one) => one.xref === 'paper' && one.type === 'line')
    .map(({ y0 }) => ['a line',
      { left: start, right: start + xaxis._length, top: y(y0), bottom: y(y0) + 1 }]);
  const all = [...texts, ...forecasts, ...lines];
  return texts.flatMap(([name, a], i) => all.slice(i + 1).filter(([other, b]) =>
    Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
    Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > (other === 'a line' ? 0 : 1)
  ).map(([other]) => [name, other]));
}"""


CARDS = {"several": '"last pass rate"', "run": '"compute spent"'}
"""Where rows are cards, what the second figure says that it is."""
LABELLED = ("one", "run", "several", "study", "mixed")
SIZES = [
    *itertools.product(KINDS, [(1280, "light"), (360, "dark")]),
    *itertools.product(CARDS, [(768, "light")]),
    *itertools.product(LABELLED, [(390, "light"), (1440, "light")]),
]


@pytest.mark.parametrize(("kind", "size"), SIZES)
def test_a_page_needs_no_network_and_shows_all_of_itself_on_the_screen(charted, kind, size):
    """Nothing is wider than the screen or its table, and no label of the chart lies on another."""
    page, (width, scheme) = charted(kind, *size), size
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.body.scrollWidth") <= width
    assert page.title() != "owned"
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, background.removeprefix("rgb(").rstrip(")").split(","))) > 3 * 128
    assert light == (scheme == "light")
    assert page.locator("img").count() == 0
    if kind in LABELLED:
        assert page.evaluate(OVERLAPS) == []
    if kind in CARDS:
        assert page.evaluate(WIDER) == []
    if kind in CARDS and width < 800:
        cell = page.locator("table.cards td[data-label]").nth(1)
        assert cell.evaluate("(cell) => getComputedStyle(cell, '::before').content") == CARDS[kind]


@pytest.mark.parametrize("kind", ["several", "run", "study"])
def test_paper_shows_tables_and_figures_whole(charted, kind):
    page = charted(kind, 794)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.emulate_media(media="print")
    cut = "(one) => [one.scrollWidth - one.clientWidth, getComputedStyle(one).backgroundImage]"
    for one in page.locator(".scroll, figure").all():
        assert one.evaluate(cut) in ([0, "none"], [1, "none"])


def test_a_table_that_scrolls_shows_that_it_does(visit, pages):
    page = visit(pages["several"], 820)
    scroll = page.locator(".scroll").filter(has=page.locator(".curves"))
    assert scroll.evaluate("(one) => one.scrollWidth > one.clientWidth")
    strip = "(one, to) => { one.scrollLeft = to; }"
    edges = []
    for place in (0, 10_000):
        scroll.evaluate(strip, place)
        picture = Image.open(io.BytesIO(scroll.screenshot())).convert("L")
        edge = picture.crop((picture.width - 2, 0, picture.width, picture.height))
        edges.append(float(np.median(np.asarray(edge))))
    assert edges[0] < edges[1] - 20  # there is a shadow, and none where the table ends


def test_the_toolbar_covers_no_label(several):
    several.locator(".sc-plot").hover()
    bar, *labels = several.evaluate(
        """() => ['.modebar', '.annotation'].flatMap((name) => [...document.querySelectorAll(name)])
          .map((one) => one.getBoundingClientRect())
          .map(({ left, right, top, bottom }) => [left, right, top, bottom])"""
    )
    assert len(labels) == 2  # budget and target
    for left, right, top, bottom in labels:
        assert right <= bar[0] or left >= bar[1] or top >= bar[3] or bottom <= bar[2]


def test_the_chart_is_readable_in_the_dark(charted):
    page = charted("several", scheme="dark")
    text = page.evaluate("getComputedStyle(document.querySelector('.sc-plot .xtick text')).fill")
    assert min(map(int, text.removeprefix("rgb(").rstrip(")").split(","))) > 128
    with redrawn(page):
        page.emulate_media(color_scheme="light")
    text = page.evaluate("getComputedStyle(document.querySelector('.sc-plot .xtick text')).fill")
    assert max(map(int, text.removeprefix("rgb(").rstrip(")").split(","))) < 160


def test_another_axis_moves_the_evaluations_along_their_clock(several, shown):
    hours = points_of(several, "base")["x"]
    np.testing.assert_allclose(hours, shown.runs[0].points.compute_N, rtol=1e-4)
    with redrawn(several):
        several.locator("#chart select").first.select_option("tokens")
    tokens = np.array(points_of(several, "base")["x"])
    np.testing.assert_allclose(tokens / tokens[-1], tokens_at(np.array(hours)) / tokens_at(BUDGET), rtol=1e-4)
    # Curves go to the budget of 16,000 GPU-hours, beyond the run at the pace of its last two evaluations.
    pace = (tokens[-1] - tokens[-2]) / (hours[-1] - hours[-2])
    budget = pytest.approx(tokens[-1] + pace * (16_000 - hours[-1]), rel=1e-3)
    assert max(several.evaluate(LINES.replace("trace.y", "trace.x.at(-1)"))) == budget
    assert [one["x0"] for one in several.evaluate(SHAPES) if one["yref"] == "paper" and "x0" in one][
        -1
    ] == budget
    assert several.evaluate("document.querySelector('.sc-plot')._fullLayout.xaxis.range[1]") >= tokens[-1]
    assert "along each run’s own clock" in several.locator(".sc-note").inner_text()
    assert "tokens" in several.locator(".sc-plot .xtitle").text_content()


def test_hovering_shows_what_was_measured(several, shown):
    points = shown.runs[1].points
    place = several.evaluate(
        """([name, i]) => {
          const plot = document.querySelector('.sc-plot');
          plot.scrollIntoView();
          const trace = plot.data.find((one) => one.meta && one.meta.run === name);
          const { xaxis, yaxis } = plot._fullLayout, box = plot.getBoundingClientRect();
          const [x, y] = [xaxis.l2p(trace.x[i]), yaxis.l2p(trace.y[i])];
          return [box.x + xaxis._offset + x, box.y + yaxis._offset + y];
        }""",
        [HOSTILE, 20],
    )
    several.mouse.move(place[0] - 2, place[1])
    several.mouse.move(*place)
    several.wait_for_selector(".hoverlayer .hovertext")
    text = several.locator(".hoverlayer").text_content()
    assert HOSTILE[:40] in text
    assert "step 200, 10,000 GPU-hours" in text
    assert f"pass rate {rate(points.pass_rate_N[20])} ± {rate(points.noise_sd_N[20])}" in text
    assert several.locator(".hoverlayer image, .hoverlayer a, .hoverlayer script").count() == 0


def test_every_control_is_reached_and_works_by_keyboard(several):
    reached = []
    for _ in range(15):
        several.keyboard.press("Tab")
        reached.append(several.evaluate("document.activeElement.outerHTML.slice(0, 70)"))
        if "Logarithmic" in reached[-1]:
            with redrawn(several):
                several.keyboard.press("Enter")
    found = " ".join(reached)
    assert found.count("<select") == 2
    assert found.count('type="checkbox"') == found.count("sc-rename") == 3
    for control in ("Logarithmic", "Whole view", 'class="sc-plot', "modebar-btn"):
        assert control in found
    assert several.locator("#chart").get_attribute("data-drawn") == "gpu_hours log"
    several.locator("#chart select").first.focus()
    with redrawn(several):
        several.keyboard.press("ArrowDown")
    assert several.locator("#chart").get_attribute("data-drawn") == "flops log"
    several.locator('input[type="checkbox"]').nth(1).focus()
    with redrawn(several):
        several.keyboard.press("Space")
    assert [trace["meta"]["run"] for trace in several.evaluate(POINTS)] == ["base", "flat"]


def test_arrow_keys_read_evaluation_by_evaluation(several, shown):
    several.locator(".sc-plot").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowUp"):
        several.keyboard.press(key)
    said = several.locator(".sc-said").inner_text()
    assert said.startswith("<script>document.title='owned'</script>")
    assert f"step 10, 500 GPU-hours, pass rate {rate(shown.runs[1].points.pass_rate_N[1])}" in said
    several.wait_for_selector(".hoverlayer .hovertext")


def test_a_run_that_is_pointed_at_shows_its_forecast_as_it_was_frozen(several, shown):
    before = several.evaluate(LINES)
    with redrawn(several):
        several.locator('.sc-legend li[data-entry="base"] label').hover()
    lines = several.evaluate(LINES)
    frozen = overlay(shown.runs)["runs"][0]["forecasts"][0]
    curve, made = frozen["curve"], frozen["made"]
    line = [y for x, y in zip(curve["compute"], curve["line"], strict=True) if x >= made]
    assert line in lines
    assert line not in before


def test_the_figures_of_a_file_look_like_the_chart(several, shown):
    chart = {
        trace["meta"]["run"]: (trace["marker"]["color"], trace["marker"]["symbol"][1].removesuffix("-open"))
        for trace in several.evaluate(POINTS)
    }
    axes = runs_figures(shown)["overlay"].axes[0]
    drawn = [line for line in axes.lines if line.get_marker() in SYMBOLS]
    found = [(line.get_markerfacecolor(), SYMBOLS[str(line.get_marker())]) for line in drawn]
    assert found == list(chart.values())
    # A marker is an evaluation, and nothing else is.
    assert [np.size(line.get_xdata()) for line in drawn] == [len(run.points) for run in shown.runs]
    texts = [line.get_label() for line in axes.lines]
    assert {"budget 16,000 GPU-hours", "target 0.550"} <= set(texts)
    curves = [line for line in axes.lines if np.size(line.get_xdata()) > 40]
    assert max(np.max(line.get_xdata()) for line in curves) == 16_000
    assert runs_figures(shown)["linearised"].get_supylabel().startswith("F = C_mid^B / ((A")


def test_later_runs_look_alike_too(several, shown):
    newer = overlay([replace(shown.runs[0], name=f"run {n}") for n in range(24)])
    with redrawn(several):
        several.evaluate("(data) => { scalerlChart(document.getElementById('chart'), data); }", newer)
    traces = {one["meta"]["run"]: one["marker"] for one in several.evaluate(POINTS)}
    kinds = several.evaluate(
        "() => [...new Set(document.querySelector('.sc-plot').data.filter((t) => t.mode === 'lines')"
        ".map((t) => t.line.color + t.line.dash))]"
    )
    for place in (3, 6, 8, 13, 23):
        colour, marker, dashes = run_look(place)
        shape = traces[f"run {place}"]
        assert (shape["color"], shape["symbol"][1]) == (colour, SYMBOLS[marker]), place
        assert colour + {"-": "solid", "--": "dash", ":": "dot", "-.": "dashdot"}[dashes] in kinds, place


def test_a_name_is_text(several):
    legend = several.locator(".sc-legend")
    assert HOSTILE.split(" %")[0] in legend.inner_text()
    assert legend.locator("script, img").count() == 0
    assert several.locator("td script, td img, h1 script").count() == 0


def test_newer_data_are_drawn_and_choices_stay(several, shown):
    newer = overlay([shown.runs[0]])
    several.evaluate(
        """(data) => {
          const element = document.getElementById('chart');
          const first = JSON.parse(document.getElementById('runs').textContent);
          window.chart = scalerlChart(element, first);
        }""",
        newer,
    )
    several.locator("#chart select").first.select_option("tokens")
    several.get_by_role("button", name="Logarithmic").click()
    several.wait_for_selector("#chart[data-drawn='tokens log']")
    with redrawn(several):
        several.evaluate("(data) => window.chart.update(data)", newer)
    assert several.locator("#chart").get_attribute("data-drawn") == "tokens log"
    assert [trace["meta"]["run"] for trace in several.evaluate(POINTS)] == ["base"]
    assert several.locator(".sc-legend li").count() == 1


def test_a_hundred_runs_are_grey_until_they_are_ticked(charted):
    page = charted("hundred")
    traces = "() => document.querySelector('.sc-plot').data.length"
    assert page.evaluate(traces) == 2
    started = time.perf_counter()
    with redrawn(page):
        page.locator("#chart select").first.select_option("flops")
    print(f"\n100 runs: axis switched in {1000 * (time.perf_counter() - started):.0f} ms")
    page.get_by_label("Find a run").fill("run 42")
    assert page.locator(".sc-legend li:visible").count() == 1
    with redrawn(page):
        page.locator(".sc-legend li:visible input").check()
    assert points_of(page, "run 42")["x"]
    assert page.evaluate(traces) > 2


def test_ten_thousand_evaluations_are_thinned_and_said_to_be(charted):
    page = charted("long")
    trace = points_of(page, "long")
    assert 500 < len(trace["x"]) < 1300
    assert min(trace["y"]) == 0.2
    assert "Of 10,000 evaluations" in page.locator(".sc-note").inner_text()
    started = time.perf_counter()
    with redrawn(page):
        page.get_by_role("button", name="Logarithmic").click()
    print(f"\n10,000 evaluations: axis switched in {1000 * (time.perf_counter() - started):.0f} ms")


def test_the_data_of_a_page_are_those_of_the_overlay(several, shown):
    text = several.locator("#runs").text_content()
    assert json.loads(text) == overlay(shown.runs, budget=16_000.0, target=0.55)
