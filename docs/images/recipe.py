"""Makes the curve of a page of docs/recipes from its run's metrics: `python docs/images/recipe.py NAME RUN`.

Writes `recipe_NAME.svg`: reward in training and held-out scores by step. The background is transparent and all colours
are of middle brightness, so that it can be read on light and dark pages.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from megasync.observe.curve import held_out_name, points
from megasync.observe.metrics import STEP, read_metrics
from megasync.observe.names import REWARD

HERE = Path(__file__).parent
GREY = "#808890"
COLOURS = ("#d9534f", "#e0912f", "#2f9e77", "#9b6fd3")


def main(name: str, run: Path) -> None:
    # The same run gives the same file.
    mpl.rcParams.update({"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9})
    columns = read_metrics(run)
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axis = figure.subplots()
    axis.plot(
        *zip(*points(columns, STEP, REWARD), strict=True), color="#4a90d9", linewidth=1, label="reward in training"
    )
    held_out = {key: label for key in sorted(columns) if (label := held_out_name(key)) is not None}
    for colour, (key, label) in zip(COLOURS, held_out.items(), strict=False):
        axis.plot(*zip(*points(columns, STEP, key), strict=True), color=colour, marker="o", markersize=4, label=label)
    axis.set(xlabel="step", ylim=(-0.03, 1.03), facecolor="none")
    axis.grid(color=GREY, alpha=0.3)
    axis.tick_params(colors=GREY)
    axis.xaxis.label.set_color(GREY)
    for spine in axis.spines.values():
        spine.set_color(GREY)
    axis.legend(labelcolor=GREY, facecolor="none", edgecolor="none", loc="best")
    path = HERE / f"recipe_{name}.svg"
    figure.savefig(path, transparent=True, metadata={"Date": None})
    sys.stdout.write(f"wrote {path}\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
