"""Draw the sizes of a ladder, the law over all but the last, and the last size's prediction. It needs matplotlib.

python recipes/ladder train_configs/ladders/debug.toml --output=runs/ladder
python -m evidence.ladder runs/ladder/results.csv docs/images/ladder.svg     prints the error, too
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import numpy as np
from ladder.fit import Point, PowerLaw
from ladder.ladder import read_sizes, summary


def draw(results: Path, picture: Path) -> None:
    from matplotlib import pyplot, rcParams

    *fitted, last = read_sizes(results)
    law = PowerLaw([Point(size.compute, size.loss) for size in fitted])
    print(summary(fitted, law, last))
    predicted = law.predict(last.compute)
    compute = np.geomspace(fitted[0].compute, last.compute, 200)
    rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ladder"})
    figure, axis = pyplot.subplots(figsize=(6, 3), layout="constrained")
    axis.plot(compute, [law.predict(float(flops)).loss for flops in compute], label="law of the smaller sizes")
    axis.plot([size.compute for size in fitted], [size.loss for size in fitted], "o", label="trained")
    label = "predicted, 9 of 10 cases"
    axis.errorbar(last.compute, predicted.loss, yerr=predicted.half_width, fmt="_", capsize=4, label=label)
    axis.plot(last.compute, last.loss, "x", label=f"then trained: {last.size}")
    axis.set(xscale="log", xlabel="FLOPs", ylabel="validation loss, nats per byte")
    axis.legend()
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
