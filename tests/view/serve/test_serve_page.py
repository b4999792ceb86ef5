"""The page in a browser: what it shows, follows and loads, and by which means it is used."""

import contextlib
import json
import shutil
import time

import pytest
from browser_tools import needs_axe, serious
from growing import Growing
from serve_client import logs_of_trl
from serve_process import server

playwright = pytest.importorskip("playwright.sync_api", reason="browser tests need Playwright")
NASTY = '<img src=x onerror="alert(1)">&amp;<script>alert(2)</script>'


@pytest.fixture(scope="module")
def served(original, tmp_path_factory):
    """The address of a server, and a run in it that is growing."""
    folder = shutil.copytree(original, tmp_path_factory.mktemp("page") / "runs")
    growing = Growing(folder / "growing", 12, 5, name=NASTY)
    growing.alarm(100)
    with server(folder, "--target", "0.58") as (_, address):
        yield address, growing


@contextlib.contextmanager
def opened(browser, address, at="", width=1280, **options):
    """A page that loads from its server alone, and says nothing on its console; opened `at` an address."""
    page = browser.new_page(viewport={"width": width, "height": 900}, **options)
    page.set_default_timeout(60_000)
    said = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(dialog.message) or dialog.dismiss())
    page.on("request", lambda request: None if request.url.startswith(address) else said.append(request.url))
    page.goto(at or address)
    page.wait_for_selector("#chart[data-drawn]")
    yield page
    page.close()
    assert said == []


def until(page, condition):
    """Wait for something in the page; its policy forbids what Playwright would do by itself."""
    for _ in range(600):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(100)
    raise AssertionError(condition)


def row(page, name):
    return page.locator("#runs tbody tr").filter(has_text=name)


def test_an_evaluation_that_is_made_appears(browser, served):
    address, growing = served
    with opened(browser, address) as page:
        newest = row(page, "onerror")
        assert newest.locator(".name").inner_text().startswith(NASTY)
        assert page.locator("img").count() == 0
        assert "truncated 0.14" in newest.inner_text()
        newest.locator("input").check()
        step = f"{20 * growing.n + 5:,}"
        growing.grow()
        playwright.expect(newest.locator("td").first).to_have_text(step, timeout=60_000)
        points = "document.querySelector('.sc-plot').data.filter((t) => t.meta).map((t) => t.x.length)"
        until(page, f"{points}.includes({growing.n})")


def test_the_list_is_in_order_after_every_change(browser, original, tmp_path):
    folder = shutil.copytree(original, tmp_path / "runs")
    names = "[...document.querySelectorAll('#runs tbody .name')].map((name) => name.firstChild.data).join()"
    with server(folder) as (_, address), opened(browser, address) as page:
        page.select_option("#order", "pass_rate")
        growing = Growing(folder / "young", 1, 5)
        until(page, f"{names}.endsWith(',young')")  # it starts below the others
        box = row(page, "young").locator("input")
        box.focus()
        for _ in range(3):
            growing.grow()
        line = json.loads((growing.path / "evals.jsonl").read_text().splitlines()[-1])
        with (growing.path / "evals.jsonl").open("a") as file:
            file.write(json.dumps({**line, "step": 80, "pass_rate": 0.9}) + "\n")
        until(page, f"{names}.startsWith('young,')")
        assert box.evaluate("(box) => box === document.activeElement")
        # A folder that has another name is another run, and there are as many as before.
        page.select_option("#order", "name")
        (folder / "b" / "b-0").rename(folder / "b" / "moved")
        until(
            page,
            "[...document.querySelectorAll('#runs small')].some((path) => path.textContent === 'b/moved')",
        )
        assert page.locator("#runs tbody tr").count() == 4


def test_the_time_to_go_is_the_one_that_the_server_forecasts(browser, original):
    def later(route):
        answer = route.fetch()
        told = answer.json()
        for run in told["runs"]:
            run["eta"] = 5000.0
        route.fulfill(response=answer, json=told)

    with server(original) as (_, address), opened(browser, address) as page:
        assert "to go" not in row(page, "a-0").inner_text()  # it stands still
        page.route("**/api/runs?*", later)
        page.reload()
        playwright.expect(row(page, "a-0")).to_contain_text("83 min to go", timeout=60_000)


def test_the_time_to_go_runs_out_where_a_run_is_killed(browser, original):
    def later(route):
        answer = route.fetch()
        told = answer.json()
        for run in told["runs"]:
            run |= {"eta": 15.0, "as_of": time.time()}
        route.fulfill(response=answer, json=told)

    with server(original) as (_, address), opened(browser, address) as page:
        page.route("**/api/runs?*", later)
        page.reload()
        playwright.expect(row(page, "a-0")).to_contain_text("to go", timeout=60_000)
        playwright.expect(row(page, "a-0")).not_to_contain_text("to go", timeout=60_000)


def test_runs_are_chosen_overlaid_and_compared(browser, served):
    with opened(browser, served[0]) as page:
        page.click("#none")
        until(page, "document.querySelector('#chart').hidden")
        assert page.locator("#compare").is_disabled()
        # Hidden, the chart still has the legend of the runs before: it counts once it is drawn.
        row(page, "a-0").locator("input").check()
        legend = "document.querySelector('.sc-legend')"
        until(
            page, f"!document.querySelector('#chart').hidden && {legend}.querySelectorAll('li').length === 1"
        )
        for name in ("a-1", "b-0"):
            row(page, name).locator("input").check()
        # Of recipes, although a run alone has no groups to be coloured by.
        until(page, f"{legend}.innerText.includes('(2 runs)')")
        page.click("#compare")
        page.wait_for_selector(".comparison")
        assert "2 seeds" in page.locator(".comparison").inner_text()
        # The address keeps the choice.
        page.go_back()
        until(page, "document.querySelectorAll('.sc-legend li').length === 2")
        assert page.locator("#runs input:checked").count() == 3
        for wanted in ("b-0", "kind=b"):
            page.fill("#find", wanted)
            assert page.locator("#runs tbody tr:visible").count() == 1


def test_every_forecast_says_of_what_it_is(browser, original, tmp_path):
    folder = shutil.copytree(original, tmp_path / "runs")
    Growing(folder / "endless", 15, 5, budget=None).writer.close()
    with server(folder) as (_, address), opened(browser, address) as page:
        ended = row(page, "a-0").locator('[data-label="forecast"]')
        playwright.expect(ended).to_contain_text("at 1,200 steps, the budget", timeout=60_000)
        # Compute without a budget is in the unit of its own axis.
        endless = row(page, "endless").locator('[data-label="forecast"]')
        playwright.expect(endless).to_contain_text("twice its compute so far", timeout=60_000)
        assert "the budget" not in endless.inner_text()
        assert "GPU-hours" in page.locator("#axis").inner_text()
        assert "gpu-hours" not in page.content()


def test_what_cannot_be_read_is_shown_with_its_error(browser, original, tmp_path):
    folder = shutil.copytree(original, tmp_path / "runs")
    with server(folder) as (_, address), opened(browser, address) as page:
        folder.rename(tmp_path / "elsewhere")
        cell = page.locator("#runs td.error")
        playwright.expect(cell).to_have_text(
            "the folder cannot be read: No such file or directory", timeout=60_000
        )
        playwright.expect(page.locator("#state")).to_have_text("0 runs, 1 not read")


def test_a_log_of_another_trainer_is_told_as_far_as_it_says(browser, original, tmp_path):
    folder = shutil.copytree(original, tmp_path / "runs")
    logs_of_trl(folder)
    with server(folder) as (_, address), opened(browser, address) as page:
        why = row(page, "short").locator('[data-label="forecast"] .why')
        playwright.expect(why).to_have_text("too early: 3 evaluations", timeout=60_000)
        assert "a curve needs at least 4" in why.get_attribute("title")
        flat = row(page, "flat")
        playwright.expect(flat.locator('[data-label="forecast"]')).to_contain_text(
            "at 48 steps", timeout=60_000
        )
        assert flat.locator('[data-label="ceiling A"]').inner_text().endswith("not identified")
        assert row(page, "flat").locator('[data-label="state"]').inner_text() == "–"
        assert row(page, "a-0").locator('[data-label="state"]').inner_text() == "48 %"
        assert page.locator("#state").inner_text() == "7 runs, 3 not ended"
        notes = row(page, "trl-0").locator("details")
        notes.locator("summary").click()
        assert "named for percentages" in notes.inner_text()
        page.click("#none")
        for name in ("trl-0", "trl-1"):
            row(page, name).locator("input").check()
        page.click("#compare")
        beside = page.locator(".warnings li", has_text="named for percentages")
        playwright.expect(beside).to_have_count(1, timeout=60_000)


def test_the_axis_is_chosen_in_the_page(browser, served):
    with opened(browser, served[0]) as page:
        assert page.locator("#chart").get_attribute("data-drawn").startswith("steps ")
        page.select_option("#axis", "tokens")
        page.wait_for_selector("#chart[data-drawn^=tokens]")
        assert "million tokens" in page.locator("#chart").inner_text()
        page.locator("#chart .sc-controls select").first.select_option("flops")
        page.wait_for_selector("#chart[data-drawn^=flops]")


def test_it_is_used_by_keyboard(browser, served):
    with opened(browser, served[0]) as page:
        box = row(page, "b-0").locator("input")
        before = box.is_checked()
        box.focus()
        page.keyboard.press("Space")
        assert box.is_checked() != before
        page.locator(".sc-plot").focus()
        page.keyboard.press("ArrowRight")
        until(page, "/pass rate/.test(document.querySelector('.sc-said').textContent)")
        seen = set()
        page.locator("#find").focus()
        for _ in range(12):
            page.keyboard.press("Tab")
            seen.add(page.evaluate("document.activeElement.id || document.activeElement.type"))
        assert {"order", "none", "checkbox"} <= seen


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_telephone_shows_all_of_it(browser, served, scheme):
    with opened(browser, served[0], width=360, color_scheme=scheme) as page:
        assert row(page, "a-0").locator("td").first.is_visible()
        wide = "(one) => one.offsetWidth / one.closest('tr').clientWidth"
        assert row(page, "a-0").locator("th").evaluate(wide) > 0.9  # its name has a line of its own
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.click("#compare")
        page.wait_for_selector(".comparison", timeout=60_000)
        page.wait_for_selector("#chart[data-drawn]")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        ink, paper = page.evaluate(
            "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        )
        light = [sum(map(int, colour[4:-1].split(","))) for colour in (ink, paper)]
        assert (light[0] < light[1]) == (scheme == "light")


@needs_axe
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_serious_keeps_anyone_from_reading_a_list(browser, served, width):
    with opened(browser, served[0], width=width) as page:
        assert serious(page) == []


def test_the_token_leaves_the_address_and_stays_good(browser, original):
    with (
        server(original, "--token") as (_, address),
        opened(browser, address.partition("?")[0], address) as page,
    ):
        assert "token" not in page.url
        assert page.evaluate("document.cookie") == ""
        page.reload()
        page.wait_for_selector("#chart[data-drawn]")
        assert page.locator("#runs tbody tr").count() == 3


def test_a_connection_that_is_back_is_said_to_be(browser, original):
    with server(original) as (_, address):
        page = browser.new_page()
        page.set_default_timeout(60_000)
        # Nothing changes from here on, which would be news.
        page.goto(address)
        rows = "fetch('api/runs').then((answer) => answer.json())"
        settled = f"{rows}.then((told) => !told.looking && told.runs.every((run) => !run.waits))"
        until(page, settled)
        page.route("**/events", lambda route: route.abort())
        page.reload()
        state = page.locator("#state")
        playwright.expect(state).to_contain_text("does not answer", timeout=60_000)
        page.unroute("**/events")
        playwright.expect(state).to_have_text("3 runs, 3 not ended", timeout=60_000)
        page.close()


def test_a_server_that_is_gone_is_said_to_be(browser, original):
    with server(original) as (process, address):
        page = browser.new_page()
        page.set_default_timeout(60_000)
        page.goto(address)
        page.wait_for_selector("#chart[data-drawn]")
        process.terminate()
        playwright.expect(page.locator("#state")).to_contain_text("does not answer", timeout=60_000)
        assert page.locator("#runs tbody tr").count() == 3
        page.close()


def test_a_run_has_a_page_of_its_own_that_is_live(browser, original, tmp_path):
    folder = shutil.copytree(original, tmp_path / "runs")
    growing = Growing(folder / "young", 12, 5)
    with server(folder, "--target", "0.58") as (_, address), opened(browser, address) as page:
        row(page, "young").locator("a").click()
        page.wait_for_selector("#chart[data-drawn]")
        assert page.locator(".result").inner_text().startswith("Will it reach 0.580 by ")
        points = "document.querySelector('.sc-plot').data.filter((t) => t.meta)[0].x.length"
        until(page, f"{points} === 12")
        growing.grow()
        until(page, f"{points} === 13")


def test_the_page_of_a_run_says_when_the_run_or_the_server_is_gone(browser, original, tmp_path):
    folder = shutil.copytree(original, tmp_path / "runs")
    with server(folder) as (process, address):
        page = browser.new_page()
        page.set_default_timeout(60_000)
        page.goto(address)
        row(page, "a-0").locator("a").click()
        page.wait_for_selector("#chart[data-drawn]")
        assert page.locator("#state").count() == 0
        moved = (folder / "a" / "a-0").rename(tmp_path / "a-0")
        playwright.expect(page.locator("#state")).to_contain_text(
            "A run of this page is gone", timeout=60_000
        )
        moved.rename(folder / "a" / "a-0")
        playwright.expect(page.locator("#state")).to_have_count(0, timeout=60_000)
        process.terminate()
        playwright.expect(page.locator("#state")).to_contain_text("does not answer", timeout=60_000)
        page.close()


def test_what_stands_around_a_live_chart_is_renewed(browser, original, tmp_path):
    folder = shutil.copytree(original, tmp_path / "runs")
    growing = Growing(folder / "young", 12, 5)
    with server(folder) as (_, address), opened(browser, address) as page:
        ids = page.evaluate("fetch('api/runs').then((found) => found.json()).then(({ ids }) => ids.join())")
        page.goto(f"{address.rstrip('/')}/run/{ids}")
        page.wait_for_selector("#chart[data-drawn]")
        page.get_by_label("Rename young").focus()
        page.keyboard.press("Enter")
        page.keyboard.type("other")
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.ariaLabel") == "Rename young"
        names = "[...document.querySelectorAll('.curves tbody td:first-child')].map((cell) => cell.innerText)"
        heads = "document.querySelectorAll('.curves th.sortable').length"
        sortable = page.evaluate(heads)
        page.locator(".curves th").first.click()
        page.locator(".curves th").first.click()
        page.locator("details.section summary").first.click()
        before = page.evaluate(names)
        assert before == sorted(before)
        assert "other" in before
        assert page.locator(".cautions", has_text="truncated").count() == 0
        page.evaluate("document.getElementById('chart').same = true")
        growing.alarm(100)
        growing.grow()
        until(page, "[...document.querySelectorAll('.cautions')].some((one) => /trunc/i.test(one.innerText))")
        points = "document.querySelector('.sc-plot').data.some((t) => t.meta && t.x.length === 13)"
        until(page, points)
        assert page.evaluate(heads) == sortable > 0
        assert page.evaluate(names) == before
        assert page.locator("details.section[open]").count() == 1
        assert page.evaluate("document.getElementById('chart').same")
        page.goto(address)
        row(page, "other").locator("a").click()
        page.wait_for_selector("#chart[data-drawn]")
        assert page.locator("h1").inner_text() == "other"
