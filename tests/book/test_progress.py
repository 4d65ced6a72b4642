"""The loss curve that grows while a model trains."""

import math

import IPython.display
import pytest

from k3_teach.notebook import progress
from k3_teach.notebook.progress import between, follow, loss_curve


class FakeTrainer:
    """Gives ten rows; every fifth has a validation loss."""

    class data:
        bytes_per_token = 2.0

    def run(self, steps=None):
        for step in range(1, (steps or 10) + 1):
            row = dict(step=step, loss=5.0 - 0.1 * step)
            yield row | ({"validation_loss": 5.0} if step % 5 == 0 else {})


def test_values_between_are_on_the_line():
    known = {10: 3.0, 20: 1.0}
    assert [between(known, x) for x in (10, 15, 20)] == [3.0, 2.0, 1.0]
    assert math.isnan(between(known, 9)) and math.isnan(between(known, 21))


def test_curve_is_in_nats_a_byte():
    drawing = loss_curve(list(FakeTrainer().run()), 2.0)
    assert drawing.says == "2.00 nats a byte after step 10"
    words = [mark for mark in drawing.marks if "validation" in str(mark)]
    assert words and "validation" not in str(loss_curve(list(FakeTrainer().run(4))).marks)


def test_a_long_run_has_two_hundred_points():
    rows = [dict(step=i, loss=1.0 + i % 2) for i in range(1, 5001)]
    longest = max((str(mark) for mark in loss_curve(rows).marks), key=len)
    assert len(longest) < 8000


@pytest.mark.parametrize("seconds, pictures", [(0.0, 10), (1e9, 2)])
def test_pictures_take_the_place_of_each_other(monkeypatch, seconds, pictures):
    shown = []

    class Handle:
        def update(self, figure):
            shown.append(figure)

    def display(figure, display_id):
        assert display_id is True and not shown       # once; then it is updated
        shown.append(figure)
        return Handle()

    monkeypatch.setattr(progress, "SECONDS", seconds)
    monkeypatch.setattr(IPython.display, "display", display)
    rows = follow(FakeTrainer())
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert len(shown) == pictures and "after step 10" in str(shown[-1]._repr_mimebundle_())
    assert follow(FakeTrainer(), steps=1) == rows[:1]       # one row makes no curve
    shown.clear()
    assert follow(FakeTrainer(), steps=1, rows=rows[:3])[:3] == rows[:3]
