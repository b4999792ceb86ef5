"""Draw the pictures of README.md and docs/gallery.md from the data in examples and benchmarks/studies.

    python scripts/docs_pictures.py [NAME ...]      all of them, or some: forecast compare systems decline

They are written to docs/assets. Nothing is trained.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

import scalerl
from scalerl.curve import LOG_LOGISTIC, Curve

ROOT = Path(__file__).parent.parent
OUT = ROOT / "docs" / "assets"
RUNS = ROOT / "examples" / "runs"
INK, MUTED, GRID = "#1b1f24", "#68717d", "#e4e7eb"
BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#00805c"
GFLOP = 1e9
plt.rcParams.update(
    {
        **{"font.size": 10, "axes.edgecolor": MUTED, "axes.labelcolor": MUTED, "axes.grid": True},
        **{"grid.color": GRID, "xtick.color": MUTED, "ytick.color": MUTED, "legend.frameon": False},
        **{"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True},
    }
)


def table(name: str) -> scalerl.Points:
    """Return the evaluations of one run in examples/runs."""
    return scalerl.read_table(RUNS / f"{name}.csv", x="flops", y="pass_rate")


def until(points: scalerl.Points, compute: float) -> scalerl.Fit:
    """Return the fit of what had been measured by `compute`."""
    return scalerl.fit(points, max_compute=compute)


def draw_forecast(ax: Axes, points: scalerl.Points, seen: float) -> None:
    """Draw what was known at `seen` FLOPs, the forecast made there, and what was measured later."""
    x_N, y_N, end = points.compute_N, points.pass_rate_N, float(points.compute_N[-1])
    fit = until(points, seen)
    ahead = np.linspace(seen, end, 60)
    made = [fit.forecast(c) for c in ahead]
    low, high = np.array([forecast.prediction for forecast in made]).T
    median = [forecast.median for forecast in made]
    known = x_N <= seen
    ax.axvspan(0, seen / GFLOP, color="#f2f4f6", zorder=0)
    ax.fill_between(ahead / GFLOP, low, high, color=BLUE, alpha=0.22, lw=0, label="forecast, 95 %")
    ax.plot(ahead / GFLOP, median, color=BLUE, lw=2)
    ax.plot(x_N[known] / GFLOP, y_N[known], "o", color=INK, ms=5, label="measured by then")
    ax.plot(x_N[~known] / GFLOP, y_N[~known], "o", mfc="white", mec=ORANGE, ms=5, label="measured later")
    ax.axhline(y_N[known][-1], color=MUTED, lw=1, ls=":", label="last value")
    ax.set(xlim=(0, 1.02 * end / GFLOP), ylim=(0.25, 0.92), xlabel="training compute (GFLOP)")


def forecast(out: Path) -> None:
    """Draw a run of the demonstration's recipe, forecast at a quarter and at half, before its curve bends."""
    points = scalerl.read_table(ROOT / "examples" / "curves" / "lr2.5e-6-seed1.csv", x="flops")
    end = float(points.compute_N[-1])
    fig, axes = plt.subplots(1, 2, figsize=(10, 3.9), sharey=True, layout="constrained")
    for ax, share, word in zip(axes, (1 / 4, 1 / 2), ("a quarter", "half"), strict=True):
        draw_forecast(ax, points, share * end)
        made = until(points, share * end).forecast(end)
        low, high = made.prediction
        ax.set_title(f"At {word}: {made.median:.2f} [{low:.2f}, {high:.2f}] at the end", color=INK)
        last, measured = points.pass_rate_N[points.compute_N <= share * end][-1], points.pass_rate_N[-1]
        label = {"color": MUTED, "va": "bottom", "ha": "right", "fontsize": 9}
        ax.text(end / GFLOP, last + 0.005, f"last value {last:.2f}: off by {measured - last:.2f}", **label)
    axes[0].set_ylabel("held-out pass rate")
    axes[1].legend(loc="lower right")
    fig.savefig(out, dpi=130)


def compare(out: Path) -> None:
    """Draw two recipes, three seeds each, with their fits."""
    fig, ax = plt.subplots(figsize=(7, 4), layout="constrained")
    for recipe, color in (("scalerl", BLUE), ("length_penalty", ORANGE)):
        for seed in range(3):
            draw_fit(ax, table(f"{recipe}-{seed}"), color, recipe.replace("_", " ") if not seed else None)
    ax.set(xlabel="training compute (GFLOP)", ylabel="held-out pass rate", ylim=(0.25, 0.85))
    ax.legend(loc="lower right")
    fig.savefig(out, dpi=110)


def draw_fit(ax: Axes, points: scalerl.Points, color: str, label: str | None, ahead: float = 1.0) -> None:
    """Draw the evaluations of a run and its fit up to `ahead` times its compute."""
    fit = scalerl.fit(points)
    grid = np.linspace(0, ahead * points.compute_N[-1], 80)[1:]
    made = [fit.forecast(c) for c in grid]
    low, high = np.array([one.interval for one in made]).T
    ax.fill_between(grid / GFLOP, low, high, color=color, alpha=0.12, lw=0)
    ax.plot(grid / GFLOP, [one.median for one in made], color=color, lw=1.3, label=label)
    ax.plot(points.compute_N / GFLOP, points.pass_rate_N, ".", color=color, ms=4)


def systems(out: Path) -> None:
    """Draw five systems, eight seeds each: the study archived as systems.tar.xz."""
    fig, ax = plt.subplots(figsize=(7, 4), layout="constrained")
    arms = {"base": BLUE, "magistral": GREEN, "minimax_m1": ORANGE, "deepseek_grpo": "#aa4499"}
    arms["qwen25_dapo"] = MUTED
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(ROOT / "benchmarks" / "studies" / "systems.tar.xz") as archive:
            archive.extractall(folder, filter="data")
        for arm, color in arms.items():
            runs = [scalerl.load_run(f"{folder}/runs/{arm}/seed{seed}").to_frame() for seed in range(8)]
            share = np.linspace(0, 200, 41)
            rates = [np.interp(share, run.flops / GFLOP, run.pass_rate) for run in runs]
            mean, spread = np.mean(rates, axis=0), np.std(rates, axis=0, ddof=1)
            ax.fill_between(share, mean - spread, mean + spread, color=color, alpha=0.15, lw=0)
            ax.plot(share, mean, color=color, label="ScaleRL" if arm == "base" else arm.replace("_", " "))
    ax.set(xlabel="training compute (GFLOP)", ylabel="held-out pass rate")
    ax.legend(loc="lower right")
    fig.savefig(out, dpi=110)


def decline(out: Path) -> None:
    """Draw a simulated run that declines after its forecast: a case in which forecasts fail."""
    rng = np.random.default_rng(3)
    compute_N = np.linspace(0, 300 * GFLOP, 31)
    rise = Curve(LOG_LOGISTIC, A=0.72, B=2.0, C_mid=40 * GFLOP, R_0=0.3)(compute_N)
    fall = 0.16 * np.clip(compute_N / (300 * GFLOP) - 0.5, 0, None) / 0.5
    rate_N = rise - fall + rng.normal(0, 0.008, compute_N.size)
    points = scalerl.Points.from_arrays(compute_N, rate_N, axis="flops")
    fig, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
    draw_forecast(axes[0], points, 145 * GFLOP)
    axes[0].set_title("Before it falls, nothing shows that it will", color=INK)
    draw_forecast(axes[1], points, 240 * GFLOP)
    misfit = until(points, 240 * GFLOP).misfit
    said = f"reported as “{misfit.kind}”, ceiling withheld" if misfit else "nothing is reported"
    axes[1].set_title(f"After: {said}", color=INK)
    axes[0].set_ylabel("held-out pass rate")
    axes[0].legend(loc="lower right")
    fig.savefig(out, dpi=110)


PICTURES: dict[str, Callable[[Path], None]] = {
    **{"forecast": forecast, "compare": compare, "systems": systems, "decline": decline},
}


def main(names: Sequence[str]) -> None:
    for name in names or PICTURES:
        PICTURES[name](OUT / f"{name}.png")
        print(OUT / f"{name}.png")


if __name__ == "__main__":
    main(sys.argv[1:])
