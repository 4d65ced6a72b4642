"""The study of chapter 15: its variants, what stopping and going on leaves, what it says of the results."""

import copy
import json

import pytest
import torch

from k3_teach.errors import TrainingError
from k3_teach.notebook import experiment
from k3_teach.notebook.files import repository_module
from k3_teach.train.text import Bytes, Data

NAME = "15_study"


@pytest.fixture(autouse=True)
def float32():
    """The default, also behind a test that has changed it."""
    former = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(former)


@pytest.fixture
def lab():
    return repository_module(f"book/experiments/{NAME}.py")


@pytest.fixture
def small(lab, monkeypatch):
    """The study, so small that a run takes a second: 8 steps on 12 kB of numbers in words."""
    words = "zero one two three four five six seven eight nine".split()
    text = "\n\n".join(" ".join(words[int(c)] for c in str(n)) for n in range(1000))[:12_000]
    found = Data(text, Bytes())
    for name, value in dict(STEPS=8, POINTS=2, ROWS=8, LENGTH=16, RATES=(0.01, 0.02), data=lambda: found).items():
        monkeypatch.setattr(lab, name, value)
    return lab


def timeless(stored):
    stored = copy.deepcopy(stored)
    for runs in stored["runs"].values():
        for found in runs.values():
            assert found.pop("seconds") > 0
    return stored


# --- variants ------------------------------------------------------------------------------------------------------

def test_variants_are_equally_active(lab):
    found = {name: lab.sizes(name) for name in lab.VARIANTS}
    base = found[lab.BASE]["active"]
    for name, size in found.items():
        assert size["active"] == pytest.approx(base, rel=0.01), name
    assert found["GPT"]["total"] - found["GPT"]["active"] == lab.VOCAB * lab.WIDTH


def test_a_variant_changes_what_its_name_says(lab):
    kda = lambda name: len(lab.make_model(name, 0).config.linear_attn_config.kda_layers)
    ratios = {"K3 3:1": 6, "1:1": 4, "7:1": 7, "all KDA": 8, "all MLA": 0, "all MLA, RoPE": 0}
    assert {name: kda(name) for name in ratios} == ratios
    base = lab.config().to_dict()
    for name, (changes, recipe) in lab.VARIANTS.items():
        if changes is not None and "full_attn_layers" not in changes:
            ours = lab.config(**changes).to_dict()
            assert {key for key in base if ours[key] != base[key]} == set(changes), name
        assert len(recipe) + (changes is None or bool(changes)) == (name != lab.BASE), name
    # the last layer of each group is MLA
    assert lab.make_model("K3 3:1", 0).config.mla_layers == [3, 7]
    assert lab.make_model("1:1", 0).config.mla_layers == [1, 3, 5, 7]


@pytest.mark.slow
def test_every_variant_learns(small):
    for name in small.VARIANTS:
        losses = [row["loss"] for row in small.trainer(name, 0, 0.02, 8).run()]
        assert losses[-1] < losses[0] - 0.1, name


def test_a_seed_sets_weights_and_batches(small):
    one, other = (small.trainer("GPT", seed, 0.01, 8) for seed in (0, 1))
    assert not torch.equal(one.model.lm_head.weight, other.model.lm_head.weight)
    batches = [t.data.batch(0, 8, 16, t.recipe.seed) for t in (one, other, small.trainer(small.BASE, 0, 0.01, 8))]
    assert not torch.equal(batches[0], batches[1]) and torch.equal(batches[0], batches[2])


# --- stopping and going on -----------------------------------------------------------------------------------------

@pytest.mark.slow
def test_a_study_that_is_stopped_goes_on_to_the_same_result(small, tmp_path, monkeypatch):
    only, train, calls = (small.BASE, "GPT"), small.train, []
    whole = small.run(tmp_path / "whole.json", only, (0, 1))
    assert json.loads((tmp_path / "whole.json").read_text()) == whole

    def stopped(*args):         # Ctrl-C in the second of eight runs, in the fifth, and in the seventh
        calls.append(args[:3])
        if len(calls) in (2, 6, 9):
            raise KeyboardInterrupt
        return train(*args)

    monkeypatch.setattr(small, "train", stopped)
    path = tmp_path / "parts.json"
    for kept in (1, 4, 6):
        with pytest.raises(KeyboardInterrupt):
            small.run(path, only, (0, 1))
        stored = json.loads(path.read_text())
        parts = [*stored["sweep"].values(), *stored["runs"].values()]
        assert sum(map(len, parts)) == kept
    small.run(path, only, (0, 1))
    assert timeless(json.loads(path.read_text())) == timeless(whole)
    assert len(calls) == 8 + 3 and len(set(calls)) == 8         # what was whole is not run again
    assert {p.name for p in tmp_path.iterdir()} == {"whole.json", "parts.json"}


def test_what_other_settings_gave_is_not_continued(small, tmp_path):
    path = tmp_path / "old.json"
    stored = small.empty()
    stored["settings"]["steps"] = 7
    small.save(stored, path)
    with pytest.raises(SystemExit, match="was begun with other settings; give another --output"):
        small.run(path)
    assert json.loads(path.read_text()) == stored


def test_a_run_that_breaks_off_is_not_the_best(small, monkeypatch):
    def train(variant, seed, rate, steps):
        assert (seed, steps) == (100, 2)        # a quarter, with a seed that the study does not use
        if rate == 0.01:
            raise TrainingError("NaN")
        return {"validation": 5.0}

    monkeypatch.setattr(small, "train", train)
    stored = small.run(None, (small.BASE,), ())
    assert stored["sweep"][small.BASE] == {"0.01": None, "0.02": 5.0}
    assert small.best(stored, small.BASE) == small.best(stored, "all KDA") == 0.02


def test_the_command(lab, tmp_path, capsys, monkeypatch):
    given = []
    monkeypatch.setattr(lab, "run", lambda *args: given.append(args))
    lab.main(["--output", str(tmp_path / "a.json"), "--only", "GPT", "1:1", "--seeds", "3", "4"])
    lab.main(["--output", str(tmp_path / "a.json")])
    assert given[0][1:] == (["GPT", "1:1"], [3, 4])
    assert given[1][1:] == (list(lab.VARIANTS), lab.SEEDS)
    for wrong, told in ((["--only", "GPT-4"], "invalid choice"), (["--output", str(tmp_path / "no/a.json")], "no is not")):
        with pytest.raises(SystemExit):
            lab.main(["--output", str(tmp_path / "a.json"), *wrong])
        assert told in capsys.readouterr().err


# --- what is said of it --------------------------------------------------------------------------------------------

def test_summary_by_hand(lab):
    loss = lambda *values: {str(i): {"validation": v} for i, v in enumerate(values)}
    said = lab.summary({"runs": {lab.BASE: loss(1.0, 2.0, 3.0), "GPT": loss(2.0, 2.0, 5.0), "1:1": loss(1.5), "7:1": {}}})
    assert list(said) == [lab.BASE, "GPT", "1:1"]
    assert said[lab.BASE] == {"mean": 2, "spread": 1, "difference": 0, "spread of difference": 0}
    assert said["GPT"] == pytest.approx({"mean": 3, "spread": 3 ** 0.5, "difference": 1, "spread of difference": 1})
    assert said["1:1"] == {"mean": 1.5, "spread": None, "difference": 0.5, "spread of difference": None}


def test_means_of_parts(lab):
    assert lab.means([1, 3, 5, 7, 100], 2) == [2, 6]


def test_every_variant_is_stored_for_every_seed(lab):
    _, stored = experiment(NAME)
    assert {name: list(runs) for name, runs in stored["runs"].items()} == {
        name: [str(seed) for seed in lab.SEEDS] for name in lab.VARIANTS}
    for name, runs in stored["runs"].items():
        assert {found["rate"] for found in runs.values()} == {lab.best(stored, name)}
        assert {len(found["curve"]) for found in runs.values()} == {lab.POINTS}
    assert stored["sizes"] == {name: lab.sizes(name) for name in lab.VARIANTS}


def test_no_best_rate_is_the_lowest_or_highest_tried(lab):
    _, stored = experiment(NAME)
    for name in lab.TUNED:
        assert set(stored["sweep"][name]) == {str(rate) for rate in lab.RATES}
        assert min(lab.RATES) < lab.best(stored, name) < max(lab.RATES), name


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["K3 3:1", "GPT"])
def test_the_first_steps_are_repeated(lab, variant):
    """Where Python has the text that the study had; later steps may part with another order of sums."""
    _, stored = experiment(NAME)
    if stored["text"] != lab.empty()["text"]:
        pytest.skip("another Python, another text")
    again = lab.short(stored, variant, 0, 12)
    assert again == pytest.approx(stored["runs"][variant]["0"]["losses"][:12], abs=0.01)
