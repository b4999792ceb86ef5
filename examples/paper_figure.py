"""The figure of a paper from three CSVs: recipes by colour, fitted up to a cut, forecast beyond."""

from pathlib import Path

import matplotlib.pyplot as plt

import scalerl

CUT = 0.75e12  # half of the budget, in FLOP
curves = Path(__file__).parent / "curves"
fits = {
    recipe: [
        scalerl.fit(scalerl.read_table(str(file), x="flops"), max_compute=CUT)
        for file in sorted(curves.glob(f"{recipe}-*.csv"))
    ]
    for recipe in ("lr2.5e-6", "lr6e-6")
}
ax = scalerl.plot(fits, log=True, forecast=1.5e12)
ax.axvline(CUT, color="grey", lw=0.8)
plt.savefig("paper_figure.png", dpi=150)
print(scalerl.compare(fits).to_latex(at=1.5e12))
