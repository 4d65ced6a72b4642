"""Each deliberate mistake is caught by the probe of its pitfall, and is undone afterwards."""

import pytest

from k3_teach.conformance import PITFALLS, k3_teach, run
from k3_teach.conformance.mistakes import MISTAKES, Edit, Mistake
from k3_teach.errors import InputError
from k3_teach.parts.kda_layer import l2_normalize
from k3_teach.parts.situ import softcap

BY_READING = {36, 38, 39}
SINGLED_OUT = {     # seen by its own probe and not by these, which look at its neighbours
    "A_log cut without a look at what is cut off": (2, 5),
    "gate_lower_bound lost when the configuration is written": (3, 4),
    "the bounded gate whatever the configuration says": (2, 3, 5),
    "decays of a tile counted from its last token": (8, 9, 13),
    "a first call with one token reads a recycled state": (14, 16),
    "a step writes into the state that was kept": (14, 16),
    "padding multiplied by 0, which leaves NaN what it is": (17, 19),
    "the keys of left padding are visible": (14, 17),
    "one eps for all norms": (6, 25),
}


def failed(*numbers):
    return [r.number for r in run(k3_teach, probes=numbers) if r.status == "failed"]


def test_a_mistake_for_each_pitfall_that_can_be_made():
    assert {p.number for p in PITFALLS if p.by_reading} == BY_READING
    assert SINGLED_OUT.keys() <= {m.name for m in MISTAKES}
    assert {m.pitfall for m in MISTAKES} == set(range(41)) - BY_READING
    assert len({m.name for m in MISTAKES}) == len(MISTAKES)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: f"{m.pitfall}: {m.name}")
def test_the_probe_of_its_pitfall_catches_it(mistake):
    others = SINGLED_OUT.get(mistake.name, ())
    with mistake.apply():
        assert failed(mistake.pitfall, *others) == [mistake.pitfall]


def test_afterwards_all_is_as_before():
    before = {e.where: e.where.__code__ for m in MISTAKES for e in m.edits}
    for mistake in MISTAKES:
        with pytest.raises(KeyError), mistake.apply():
            assert all(e.where.__code__ is not before[e.where] for e in mistake.edits)
            raise KeyError
    assert all(function.__code__ is code for function, code in before.items())


def test_lines_that_are_not_there_are_refused():
    stale = Mistake(6, "stale", (Edit(l2_normalize, "return x", "return 2 * x"),))
    with pytest.raises(InputError, match="kda_layer.py: l2_normalize holds these lines 0 times"):
        stale.apply().__enter__()


def test_the_diff_shows_the_lines_of_the_source():
    edit = Edit(softcap, "return x if beta is None else beta * torch.tanh(x / beta)", "return x")
    assert Mistake(30, "no cap", (edit,)).diff() == (
        "# parts/situ.py: softcap\n"
        "- return x if beta is None else beta * torch.tanh(x / beta)\n"
        "+ return x")
