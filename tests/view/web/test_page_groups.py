"""What people do with groups, tasks and further metrics in a page."""

import itertools

import pytest
from browser_tools import POINTS, redrawn
from simulated_runs import BUDGET


@pytest.fixture
def groups(charted):
    return charted("groups")


def test_groups_have_a_mean_curve_and_a_label_that_covers_no_other(groups):
    assert len(groups.evaluate(POINTS)) == 4  # both seeds of a group are one trace
    boxes = groups.evaluate(
        """() => [...document.querySelectorAll('.sc-labels span')].map((one) => one.getBoundingClientRect())
          .map(({ top, bottom, left, right }) => [top, bottom, left, right])"""
    )
    assert len(boxes) == 4
    tops = sorted(boxes)
    assert all(one[1] <= other[0] + 1 for one, other in itertools.pairwise(tops))
    frame = groups.evaluate("document.querySelector('.sc-frame').getBoundingClientRect().right")
    plot = groups.evaluate("document.querySelector('.sc-plot .nsewdrag').getBoundingClientRect().right")
    assert all(plot <= left and right <= frame for _, _, left, right in boxes)


def test_runs_are_grouped_and_found_by_a_key_of_their_recipe(groups):
    with redrawn(groups):
        groups.get_by_label("Colour by").select_option("lr")
    assert groups.locator(".sc-legend li").all_inner_texts()[0].startswith("●\n0.0001")
    with redrawn(groups):
        groups.get_by_label("Colour by").select_option("run")
    with redrawn(groups):
        groups.get_by_label("Find a run").fill("kind=2")
    assert [trace["meta"]["run"] for trace in groups.evaluate(POINTS)] == ["recipe 2-0", "recipe 2-1"]
    assert groups.locator(".sc-legend li:visible").count() == 2


def test_any_metric_is_drawn_below_on_the_same_axis(groups):
    with redrawn(groups):
        groups.get_by_label("Below").select_option("entropy")
        groups.get_by_label("Colour by").select_option("run")
    drawn = groups.evaluate(
        "() => document.querySelector('.sc-below').data.map((t) => [t.x.at(-1), t.y.at(-1)])"
    )
    assert drawn[-1] == [pytest.approx(BUDGET), pytest.approx(0.31)]
    ranges = "(place) => document.querySelector(place)._fullLayout.xaxis.range"
    assert groups.evaluate(ranges, ".sc-below") == groups.evaluate(ranges, ".sc-plot")
    groups.get_by_label("Smoothing").fill("0")


def test_a_column_of_a_table_without_steps_is_drawn_below(charted):
    page = charted("long")
    page.get_by_label("Below").select_option("loss")
    page.wait_for_function("document.querySelector('.sc-below').data")
    x, y, text = page.evaluate(
        "() => (({ x, y, text }) => [x, y, text.at(-1)])(document.querySelector('.sc-below').data.at(-1))"
    )
    assert len(x) == len(y)
    assert x[-1] == pytest.approx(BUDGET, rel=5e-3)  # the mean of a block
    assert max(y) < 1
    assert " GPU-hours: loss " in text


def test_a_recipe_is_renamed_wherever_it_is_shown(groups):
    groups.locator(".sc-legend li").first.hover()
    groups.get_by_label("Rename recipe 0-0").click()
    groups.get_by_label("Name of recipe 0-0").fill("<b>the base")
    with redrawn(groups):
        groups.keyboard.press("Enter")
    assert "<b>the base" in groups.locator(".sc-legend").inner_text()
    assert "<b>the base" in groups.locator(".sc-labels").inner_text()
    assert groups.locator("td:first-child").first.inner_text() == "<b>the base"
    groups.reload()
    groups.wait_for_selector("#chart[data-drawn]")
    assert "<b>the base" in groups.locator(".sc-legend").inner_text()


def test_a_table_is_sorted_by_its_headings(groups):
    head = groups.locator(".curves thead th").nth(2)
    for order in (-1, 1):
        head.click()
        rates = groups.locator(".curves tbody tr td:nth-child(3)").all_inner_texts()
        values = [float(text) for text in rates]
        assert values == sorted(values, reverse=order < 0)


def test_tasks_are_thin_labelled_curves_that_can_be_left_out(charted):
    page = charted("mixed")
    stout = """() => document.querySelector('.sc-plot').data
      .filter((trace) => trace.fill || (trace.line && trace.line.width >= 2)).length"""
    assert page.evaluate(stout) == 2  # the band of the run, and its line
    assert [trace["meta"]["run"] for trace in page.evaluate(POINTS)] == ["mixed", "hard", "easy"]
    assert sorted(page.locator(".sc-labels span").all_text_contents()) == ["easy", "hard", "mixed"]
    ceiling = page.locator(".annotation-text", has_text="ceiling A")
    assert ceiling.count() == 1  # the run's own, as on a page without tasks
    with redrawn(page):
        page.get_by_role("checkbox", name="hard").uncheck()
    assert [trace["meta"]["run"] for trace in page.evaluate(POINTS)] == ["mixed", "easy"]
