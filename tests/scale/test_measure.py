"""The race, with a clock that is set by hand; memory; what is said of the machine."""

import os
import platform
import random

import pytest
import torch

import k3_teach as k3
from k3_teach.scale import measure
from k3_teach.scale.measure import peak_memory, race, spread


class Clock:
    """Time passes only where a contender says so."""

    def __init__(self):
        self.now, self.calls = 0.0, []

    def __call__(self):
        return self.now

    def taking(self, name, *seconds):
        """A contender whose calls take `seconds`, the last of them from then on."""
        ahead = list(seconds)

        def call():
            self.calls.append(name)
            self.now += ahead.pop(0) if len(ahead) > 1 else ahead[0]
        return call


def start(rounds=5, seconds=1000.0, seed=0, **times):
    clock = Clock()
    contenders = {name: clock.taking(name, *(t if isinstance(t, tuple) else (t,))) for name, t in times.items()}
    return race(contenders, rounds, seconds, seed=seed, clock=clock), clock.calls


def test_medians_and_ratios_are_those_of_the_rounds():
    result, _ = start(rounds=4, a=(9.0, 1.0, 2.0, 3.0, 4.0), b=(9.0, 10.0, 20.0, 30.0, 40.0))
    assert result.times == {"a": [1, 2, 3, 4], "b": [10, 20, 30, 40]}
    assert result.seconds("a") == measure.Spread(2.5, 1.75, 3.25)
    assert result.ratio("b", "a") == measure.Spread(10, 10, 10)
    assert result.ratio("a", "b").median == pytest.approx(0.1)


def test_a_slow_first_call_does_not_count():
    result, _ = start(a=(100.0, 1.0), b=1.0)
    assert result.times["a"] == [1.0] * 5


def test_the_order_is_shuffled_and_follows_from_the_seed():
    orders = [start(rounds=20, seed=seed, a=1.0, b=1.0, c=1.0)[1] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    raced = orders[0][3:]                           # after one call of each
    rounds = [raced[i:i + 3] for i in range(0, len(raced), 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds) and len({tuple(one) for one in rounds}) > 3


def test_short_calls_are_repeated():
    result, calls = start(rounds=3, a=1e-6)
    assert result.times["a"] == pytest.approx([1e-6] * 3)
    assert len(calls) > 3 * measure.SAMPLE / 2 / 1e-6
    assert len(start(rounds=3, a=1e-4)[1]) < 100            # as many as it takes, not more


def test_a_slow_contender_leaves_early_and_the_others_go_on():
    result, _ = start(rounds=10, seconds=30.0, slow=6.0, fast=0.01, hopeless=31.0)
    assert {name: len(times) for name, times in result.times.items()} == {"slow": 3, "fast": 10, "hopeless": 3}
    assert result.ratio("slow", "fast").median == pytest.approx(600)


def test_a_race_leaves_everything_as_it_was():
    import gc
    threads = torch.get_num_threads()
    seen = []
    race({"a": lambda: seen.append((gc.isenabled(), torch.get_num_threads()))}, rounds=1, seconds=1e-6, threads=1)
    assert set(seen) == {(False, 1)} and gc.isenabled() and torch.get_num_threads() == threads
    with pytest.raises(ZeroDivisionError):
        race({"a": lambda: 1 / 0})
    assert gc.isenabled() and torch.get_num_threads() == threads
    state = random.getstate()
    start(a=1.0)
    assert random.getstate() == state


def test_the_clock_is_named():
    quick = dict(rounds=1, seconds=1e-6)
    assert race({"a": int}, **quick).clock == "CPU time of the thread"
    assert race({"a": int}, threads=2, **quick).clock == "wall time"
    assert start(a=1.0)[0].clock == "given"


@pytest.mark.parametrize("wrong", [dict(contenders={}), dict(rounds=0), dict(threads=0), dict(seconds=0), dict(seconds=float("nan"))])
def test_nothing_to_race(wrong):
    with pytest.raises(k3.InputError, match="need one or more"):
        race(**dict(contenders={"a": int}) | wrong)


def test_spread_of_few():
    assert spread([2.0]) == measure.Spread(2.0, 2.0, 2.0) and spread([1.0, 3.0]) == measure.Spread(2.0, 1.5, 2.5)


# --- memory --------------------------------------------------------------------------------------------------------

MB = 1 << 20


def test_peak_memory_of_chains_lists_and_views():
    x = torch.zeros(MB // 4)
    assert peak_memory(lambda: x + 1) == MB
    assert peak_memory(lambda: ((x + 1) * 2).exp() + 1) == 2 * MB           # one operand, one result
    assert peak_memory(lambda: [x + i for i in range(5)][0]) == 5 * MB
    assert peak_memory(lambda: x.view(2, -1)[0][None]) == 0                    # nothing new
    assert peak_memory(lambda: x.add_(1)) == 0


def test_peak_memory_of_a_backward_pass():
    """What is kept for it counts: here one tensor for each layer of the chain, two of them being free at first."""
    w = torch.zeros(MB // 4, requires_grad=True)

    def chain():
        y = w
        for _ in range(6):
            y = y.exp()
        y.sum().backward()

    assert 6 * MB <= peak_memory(chain) <= 8.1 * MB


# --- the machine ---------------------------------------------------------------------------------------------------

def test_floors_are_rates():
    assert measure.matmul_rate(size=64) > 1e7 and measure.copy_bandwidth(1 << 16) > 1e7


def test_the_machine_is_described_but_not_named():
    out = measure.machine()
    assert {"processor", "cores", "threads", "python", "torch", "system", "BLAS"} <= set(out)
    said = " ".join(str(value) for value in out.values())
    assert platform.node() not in said and os.path.expanduser("~") not in said and os.getcwd() not in said
