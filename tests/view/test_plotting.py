"""`scalerl.plot`, `Fit.plot` and `Comparison.plot`: what is drawn is what the fits say, on any scale."""

import re

import example_files
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from hostile_study import check_latex
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

import scalerl
from scalerl.errors import InputError
from scalerl.numbers import plain, plus_minus

CUT = 6000.0


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return example_files.write(tmp_path_factory.mktemp("plots"))


@pytest.fixture(scope="module")
def runs(places):
    return {name: scalerl.load_run(places / "runs" / name) for name in ("a-seed0", "a-seed1", "b-seed0")}


@pytest.fixture(scope="module")
def recipes(runs):
    cut = {name: scalerl.fit(run, max_compute=CUT) for name, run in runs.items()}
    return {"a": [cut["a-seed0"], cut["a-seed1"]], "b": [cut["b-seed0"]]}


@pytest.fixture(scope="module")
def comparison(recipes):
    return scalerl.compare(recipes, budget=12_000)


@pytest.fixture(autouse=True)
def _figures_are_closed():
    yield
    plt.close("all")


def short(rate):
    return f"{rate:.3f}"


def texts(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def curves(ax):
    return [line for line in ax.lines if len(line.get_xdata()) > 20 and line.get_marker() == "None"]


def drawn(ax):
    """Evaluations on the axes, filled and hollow, as (compute, pass rate)."""
    found = {"filled": [], "hollow": []}
    for line in ax.lines:
        if line.get_marker() in "os^D" and len(line.get_xdata()) > 1:
            kind = "hollow" if line.get_markerfacecolor() == "none" else "filled"
            found[kind] += list(zip(line.get_xdata(), line.get_ydata(), strict=True))
    return {kind: sorted(points) for kind, points in found.items()}


def test_a_fit_is_drawn_with_its_curve_its_ceiling_and_its_forecasts(recipes):
    (fit,) = recipes["b"]
    ax = fit.plot(forecast=[12_000, 20_000])
    solid, dashed = curves(ax)
    assert (solid.get_xdata()[0], solid.get_xdata()[-1]) == (0, pytest.approx(CUT, rel=0.05))
    assert dashed.get_xdata()[-1] == 20_000
    np.testing.assert_allclose(dashed.get_ydata()[-1], fit.forecast(20_000).median, atol=2e-3)
    (ceiling,) = [line for line in ax.lines if len(set(line.get_ydata())) == 1 and len(line.get_ydata()) == 2]
    assert ceiling.get_ydata()[0] == fit.median.A
    assert f"A {fit.median.A:.3f}" in texts(ax)[0]
    bars = [tuple(part[:, 1]) for bar in ax.containers for part in bar[2][0].get_segments()]
    for compute in (12_000, 20_000):
        assert any(np.allclose(fit.forecast(compute).prediction, ends) for ends in bars)
    assert ax.get_xlabel() == "training compute (GPU-hours)"


def test_evaluations_after_the_cut_are_hollow_and_every_one_is_drawn(recipes, runs):
    ax = scalerl.plot(recipes)
    points = drawn(ax)
    assert max(compute for compute, _ in points["filled"]) <= CUT < min(x for x, _ in points["hollow"])
    every = [
        (e, r)
        for run in runs.values()
        for e, r in zip(run.compute("gpu_hours"), run.to_frame().pass_rate, strict=True)
    ]
    assert sorted(points["filled"] + points["hollow"]) == sorted(every)


def test_the_key_explains_each_sign_that_is_drawn_and_no_other(recipes, places):
    """Two recipes share a grey sign; one alone has its colour. Dashes begin where the fit ends."""
    ax = scalerl.plot(recipes)
    assert texts(ax)[2:] == ["evaluation", "evaluation after the cut", "forecast", "ceiling A"]
    (fit,) = recipes["b"]
    ax = fit.plot(forecast=20_000)
    signs = dict(zip(texts(ax), ax.get_legend().get_lines(), strict=True))
    solid, dashed = curves(ax)
    assert signs["forecast"].get_linestyle() == dashed.get_linestyle() != solid.get_linestyle()
    assert signs["forecast"].get_color() == dashed.get_color()
    assert dashed.get_xdata()[0] == solid.get_xdata()[-1] <= CUT
    whole = scalerl.fit(scalerl.load_run(places / "runs" / "mine"))
    assert texts(whole.plot())[1:] == ["evaluation", "ceiling A"]
    assert texts(whole.plot(ceiling=False))[1:] == ["evaluation"]
    assert whole.plot(label="").get_legend() is None


def test_recipes_have_colours_and_seeds_are_thin_around_their_mean(recipes):
    ax = scalerl.plot(recipes, color={"b": "black"})
    bold = [line for line in curves(ax) if line.get_linewidth() > 1.5]
    thin = [line for line in curves(ax) if line.get_linewidth() < 1]
    assert len(bold) == len(thin) == 4  # solid and dashed each: two recipes, and two seeds of one
    assert {to_rgba(line.get_color())[:3] for line in thin} == {to_rgba(bold[0].get_color())[:3]}
    assert to_rgba(bold[-1].get_color())[:3] == (0, 0, 0)
    mean = np.mean([np.asarray(line.get_ydata()) for line in (thin[0], thin[2])], axis=0)
    np.testing.assert_allclose(np.asarray(bold[0].get_ydata()), mean)
    assert texts(ax)[0].startswith("a (2 seeds): A 0.")


@pytest.mark.parametrize("log", [False, True])
def test_the_figure_is_the_same_whichever_way_the_scale_is_set(recipes, log):
    """The data hold and the limits follow; nothing drawn leaves the frame, points at compute 0 aside."""
    first, last = ["linear", "log"][:: 1 if log else -1]
    direct = scalerl.plot(recipes, log=log, forecast=12_000)
    changed = scalerl.plot(recipes, log=not log, forecast=12_000)
    assert (changed.get_xscale(), direct.get_xscale()) == (first, last)
    changed.set_xscale(last)
    for ax in (direct, changed):
        ax.figure.canvas.draw()
    assert changed.get_xlim() == pytest.approx(direct.get_xlim(), rel=0.02)
    left, right = changed.get_xlim()
    assert left < (400 if log else 0)
    assert right > 12_000
    assert changed.get_xlabel() == direct.get_xlabel()


def test_a_second_fit_on_the_same_axes_takes_the_next_colour(recipes):
    _, ax = plt.subplots()
    before = plt.rcParams.copy()
    assert recipes["a"][0].plot(ax, label="one") is ax
    ax = recipes["b"][0].plot(ax, label="two", ceiling=False)
    assert plt.rcParams == before
    assert texts(ax)[0].startswith("one: A 0.")
    assert texts(ax)[1] == "two"
    assert len({line.get_color() for line in curves(ax)}) == 2


def test_a_fit_on_another_axis_needs_axes_of_its_own(recipes, runs):
    axes = recipes["b"][0].plot()
    with pytest.raises(InputError, match=r"curves over training compute .GPU-hours.: draw those over .*step"):
        scalerl.fit(runs["b-seed0"], x="steps").plot(axes)
    assert axes.get_xlabel() == "training compute (GPU-hours)"


def test_a_colour_may_be_a_tuple(recipes):
    axes = recipes["b"][0].plot(color=(1.0, 0.0, 0.0))
    assert {to_rgba(line.get_color()) for line in axes.get_legend().get_lines()} >= {(1.0, 0.0, 0.0, 1.0)}


def test_a_key_of_many_recipes_leaves_room_for_the_curves(recipes):
    (fit,) = recipes["b"]
    axes = scalerl.plot({f"recipe {n}": fit for n in range(40)})
    axes.figure.canvas.draw()
    assert axes.get_window_extent().height > 150
    assert axes.get_legend().get_window_extent().y0 >= 0
    assert fit.plot().figure.get_figheight() == 4.0


def test_what_is_no_fit_yet_is_fitted_on_the_axis_that_is_named(places, runs):
    frame = pd.read_csv(places / "log.csv")
    ax = scalerl.plot({"table": frame, "run": runs["b-seed0"]}, x="gpu_hours", log=True)
    assert [text.split(":")[0] for text in texts(ax)[:2]] == ["table", "run"]


def test_a_misfit_has_its_evaluations_and_its_change_and_no_ceiling(places):
    frame = pd.read_csv(places / "log.csv")
    frame.loc[13:, "pass_rate"] += 0.2
    fit = scalerl.fit(frame)
    assert fit.misfit is not None
    ax = fit.plot()
    assert "the pass rate jumps" in texts(ax)[0]
    assert "A 0." not in texts(ax)[0]
    assert any(np.array_equal(line.get_xdata(), [float(fit.misfit.at or 0)] * 2) for line in ax.lines)
    assert len(drawn(ax)["filled"]) == len(frame)
    assert "--" in fit.to_latex()


def test_seeds_of_which_one_is_a_misfit_have_no_mean_and_no_ceiling(places, recipes):
    frame = pd.read_csv(places / "log.csv")
    frame.loc[13:, "pass_rate"] += 0.2
    seeds = {"a": [*recipes["a"], scalerl.fit(frame)]}
    ax = scalerl.plot(seeds)
    assert texts(ax)[0] == "a (3 seeds): the pass rate jumps (1 of 3)"
    assert {line.get_linewidth() for line in curves(ax)} == {0.9}
    assert "ceiling A" not in texts(ax)
    assert re.search(r"^a \(3 seeds\) & -- &", scalerl.latex(seeds), re.MULTILINE)


def test_what_cannot_be_drawn_is_named(recipes, runs):
    fit = recipes["b"][0]
    steps = scalerl.fit(runs["b-seed0"], x="steps")
    for fits, options, message in (
        ({"a": fit, "b": steps}, {}, "'a' is on gpu_hours, 'b' on steps"),
        (fit, {"x": "flops"}, "the fits are on gpu_hours, not on flops"),
        ({}, {}, "there is nothing to show: give a fit"),
        ([fit, fit], {}, "have the same evaluations, which are no two seeds"),
        ({"a": []}, {}, "recipe 'a' has no fits"),
        ({"a": fit}, {"label": "b"}, "label is for a single recipe"),
        ("log.csv", {}, "fit takes a run"),
        (
            fit,
            {"ax": Figure().subplots(1, 2)},
            r"one Axes of matplotlib \(axes\[0\] of several\)",
        ),
        (fit, {"ax": Figure()}, "ax must be one Axes of matplotlib"),
    ):
        with pytest.raises(InputError, match=message):
            scalerl.plot(fits, **options)  # type: ignore[arg-type]
    assert plt.get_fignums() == []


def test_a_name_that_begins_with_an_underscore_is_in_the_key(recipes):
    ax = scalerl.plot({"_base": recipes["b"], "a": recipes["a"]})
    assert [text.split(":")[0].strip("\u200b") for text in texts(ax)[:2]] == ["_base", "a (2 seeds)"]


def test_what_cannot_be_one_table_is_named(recipes, runs):
    fit = recipes["b"][0]
    steps = scalerl.fit(runs["b-seed0"], x="steps")
    narrow = scalerl.fit(runs["b-seed0"], level=0.8)
    for fits, message in (
        (None, "fit takes a run .* found NoneType"),
        ({"a": "log.csv"}, "fit takes a run .* found str"),
        ({}, "there is nothing to show: give a fit"),
        ([], "recipe 'run' has no fits"),
        ({"a": fit, "b": steps}, "'a' is on gpu_hours, 'b' on steps"),
        ([fit, fit], "have the same evaluations, which are no two seeds"),
        ({"a": fit, "b": narrow}, r"intervals of one level, found 0\.8, 0\.95"),
    ):
        with pytest.raises(InputError, match=message):
            scalerl.latex(fits)  # type: ignore[arg-type]


def test_a_comparison_draws_its_fits_to_the_budget(comparison, recipes):
    ax = comparison.plot(log=True)
    assert [text[0] for text in texts(ax)[:2]] == ["a", "b"]
    assert max(line.get_xdata()[-1] for line in curves(ax)) == comparison.budget
    assert "fits" not in comparison.to_json()


def test_forecasts_of_several_computes_are_those_of_each(recipes):
    (fit,) = recipes["b"]
    found, one = fit.forecast(np.array([8000.0, 12_000.0])), fit.forecast(12_000)
    assert found.median[1] == one.median
    assert (found.interval[0][1], found.interval[1][1]) == one.interval
    frame = found.to_frame()
    assert list(frame.gpu_hours) == [8000, 12_000]
    assert frame.prediction_high[1] == one.prediction[1]
    assert len(fit.forecast([]).median) == 0


def test_a_fit_as_a_row_and_as_a_frame(recipes, runs):
    (fit,) = recipes["b"]
    row = pd.DataFrame([fit.to_dict()]).iloc[0]
    assert (row.A, row.A_low, row.A_high) == (fit.median.A, *fit.intervals.A)
    assert (row.axis, row.points) == ("gpu_hours", fit.n_points)
    frame = fit.to_frame()
    np.testing.assert_array_equal(frame.gpu_hours, runs["b-seed0"].compute("gpu_hours"))
    assert list(frame.gpu_hours[frame.fitted]) == list(fit.points.compute_N)


def test_the_latex_table_has_the_numbers_of_the_fits(comparison, recipes):
    text = comparison.to_latex()
    a, b = recipes["a"], recipes["b"][0]
    rows = [line for line in text.splitlines() if line.endswith("\\\\")]
    assert rows[0].startswith(
        r"recipe & $A$ & $B$ & \begin{tabular}[b]{@{}r@{}}$C_{\mathrm{mid}}$ \\ (GPU-hours)"
    )
    A = np.array([fit.median.A for fit in a])
    mean = rf"{short(A.mean())} $\pm$ {short(A.std(ddof=1))}"
    assert re.match(rf"a \(2 seeds\) & {re.escape(mean)}\*? & ", rows[1])
    star = "" if b.identified else "*"
    made = b.forecast(12_000)
    for value, (low, high), mark in ((b.median.A, b.intervals.A, star), (made.median, made.interval, "")):
        assert rf"{short(value)}{mark} \\ {{\scriptsize {{[}}{short(low)}, {short(high)}]}}" in rows[2]
    assert len([line for line in text.splitlines() if "caption" in line]) == 1
    check_latex(text)
    assert "a\\_b\\& " in scalerl.latex({"a_b&": b})
    lines = scalerl.latex(a, at=12_000).splitlines()
    assert sum(line.startswith("run (2 seeds) & 0.") for line in lines) == 1


def test_results_as_columns_are_their_frames(comparison, recipes, runs):
    found = comparison.to_dict()
    assert set(found["recipe"]) == {"b"}
    pd.testing.assert_frame_equal(pd.DataFrame(found), comparison.to_frame())
    made = recipes["b"][0].forecast([8000, 12_000])
    assert list(made.to_dict()["interval_low"]) == list(made.interval[0])
    test = scalerl.backtest([runs["b-seed0"]], fractions=[1 / 2])
    assert test.to_dict()["measured"] == list(test.cuts[0].later.pass_rate_M)


@pytest.mark.parametrize("size", [(3.3, 2.4), (7.0, 2.6)])
def test_a_key_too_wide_for_a_column_stands_below_the_axes(recipes, size):
    figure, panels = plt.subplots(1, 1 if size[0] < 4 else 2, figsize=size, squeeze=False)
    for ax in panels.ravel():
        scalerl.plot(recipes, ax=ax, log=True, forecast=12_000)
    figure.tight_layout()
    figure.canvas.draw()
    for ax in panels.ravel():
        key, name, frame = (one.get_window_extent() for one in (ax.get_legend(), ax.yaxis.label, ax))
        assert key.y1 < ax.xaxis.label.get_window_extent().y0 < frame.y0
        assert key.y0 >= 0
        assert 0 <= name.y0 < name.y1 <= figure.bbox.y1
        assert frame.height > 0.25 * figure.bbox.height
    assert scalerl.plot(recipes, legend=False).get_legend() is None
    wide = scalerl.plot(recipes)
    assert wide.get_legend().get_window_extent().y0 > wide.get_window_extent().y0  # within the frame


def test_an_error_has_two_digits_and_its_value_as_many_decimals():
    for value, sd, text in (
        (1.7612, 0.095, "1.761 ± 0.095"),
        (30.49, 0.1834, "30.49 ± 0.18"),
        (12_345.0, 996.0, "12,300 ± 1,000"),
        (2.0, 0.0999, "2.00 ± 0.10"),
        (3.0, 0.0, "3 ± 0"),
    ):
        assert plus_minus(value, sd, plain) == text
