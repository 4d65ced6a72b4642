"""A loss curve that grows while a model trains in a notebook.

    rows = follow(trainer)

With a kernel the picture is drawn again every second or so; one picture is stored.
"""

import math
import time

from .draw import Drawing, lines
from .live import picture

SECONDS = 1.0       # between two pictures
ALT = "The loss over the steps of the run."


def follow(trainer, steps: int | None = None, rows: list[dict] = ()) -> list[dict]:
    """Run the trainer, with the curve under the cell. -> the rows, behind earlier `rows`.

    The button that interrupts a cell ends the run after a whole step, and rows are given.
    """
    from IPython.display import display
    rows, shown, last = list(rows), None, -math.inf
    per = trainer.data.bytes_per_token
    try:
        for row in trainer.run(steps):
            rows.append(row)
            if time.monotonic() - last > SECONDS and len(rows) > 1:
                shown, last = _show(display, shown, rows, per), time.monotonic()
    except KeyboardInterrupt:
        print(f"stopped after step {trainer.step}")
    if len(rows) > 1:
        _show(display, shown, rows, per)
    return rows


def _show(display, shown, rows, per):
    """Draw in the place of the picture before, if there is one. -> the handle of the place."""
    now = picture(loss_curve(rows, per), alt=ALT)
    if shown is None:
        return display(now, display_id=True)
    shown.update(now)
    return shown


def loss_curve(rows: list[dict], bytes_per_token: float = 1.0) -> Drawing:
    """Rows of a run as curves, in nats a byte; at most 200 points of the training loss.

    Between two validations the curve is straight.
    """
    every = -(-len(rows) // 200)
    shown = rows[::-every][::-1]        # with the last one
    steps = [row["step"] for row in shown]
    curves = {"training": [row["loss"] / bytes_per_token for row in shown]}
    asked = {r["step"]: r["validation_loss"] / bytes_per_token
             for r in rows if "validation_loss" in r}
    if len(asked) > 1:
        curves["validation"] = [between(asked, step) for step in steps]
    last = rows[-1]
    says = f"{last['loss'] / bytes_per_token:.2f} nats a byte after step {last['step']}"
    return lines(steps, curves, "step", "loss in nats a byte", says=says)


def between(known: dict[int, float], x: int) -> float:
    """The value at x on the straight line between the two nearest that are known, or NaN."""
    before = [k for k in known if k <= x]
    after = [k for k in known if k >= x]
    if not before or not after:
        return math.nan
    a, b = max(before), min(after)
    share = 0.0 if a == b else (x - a) / (b - a)
    return known[a] + share * (known[b] - known[a])
