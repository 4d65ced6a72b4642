"""The tool that executes notebooks, and the rules that it checks, each broken once."""

import json

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from k3_teach.notebook import draw, execute, form, live, picture

DRAWING = "import matplotlib.pyplot as plt\nplt.plot([0, 1])\nplt.show()"
ALT = {"mystnb": {"image": {"alt": "A rising line."}}}


def notebook(*cells):
    """A notebook that looks as if it had been run from top to bottom; it begins as it should."""
    result = new_notebook(cells=[new_code_cell(form.INSTALL + "begin()"), *cells])
    code = [cell for cell in result.cells if cell.cell_type == "code"]
    for number, cell in enumerate(code, start=1):
        cell.execution_count = number
    return result


def stored(folder, *cells):
    path = folder / "chapter.ipynb"
    path.write_text(form.write(notebook(*cells)), encoding="utf-8")
    return path


def one_problem(path):
    (problem,) = form.problems(path)
    return problem


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """A chapter that prints, warns, draws, fails on purpose and shows a widget, executed once."""
    path = tmp_path_factory.mktemp("run") / "chapter.ipynb"
    cells = [
        new_markdown_cell("# A chapter"),
        new_code_cell(form.INSTALL + "\nfrom k3_teach.notebook import setup\nsetup()"),
        new_code_cell("import sys, torch, warnings\nprint(torch.rand(2, dtype=torch.float64))\n"
                      "warnings.warn('mind')\nprint('more', flush=True)"),
        new_code_cell(DRAWING, metadata=ALT | {"scrolled": True}),
        new_code_cell("1 / 0", metadata={"tags": ["raises-exception"]}),
        new_code_cell("import ipywidgets\nipywidgets.IntSlider()"),
        new_code_cell("   "),
    ]
    path.write_text(json.dumps(new_notebook(cells=cells)), encoding="utf-8")
    assert execute.main(["run", str(path)]) == 0
    return path


def test_two_runs_give_the_same_bytes(executed):
    first = executed.read_bytes()
    assert execute.main(["run", str(executed)]) == 0
    assert executed.read_bytes() == first


def test_what_a_run_stores(executed):
    cells = form.read(executed.read_text(encoding="utf-8")).cells
    assert [cell.get("execution_count") for cell in cells] == [None, 1, 2, 3, 4, 5]  # the blank cell is gone
    assert cells[1].outputs == []
    assert sorted(output.name for output in cells[2].outputs) == ["stderr", "stdout"]
    assert {output.name: "".join(output.text) for output in cells[2].outputs}["stderr"] == "UserWarning: mind\n"
    assert {"image/svg+xml", "image/png"} <= set(cells[3].outputs[0].data) and cells[3].metadata == ALT
    assert cells[4].outputs[0].traceback == ["ZeroDivisionError: division by zero"]
    assert form.WIDGET not in cells[5].outputs[0].data


def test_check_rejects_what_was_tampered_with(executed, tmp_path, capsys):
    assert execute.main(["check", str(executed)]) == 0
    other = tmp_path / "chapter.ipynb"
    other.write_text(executed.read_text(encoding="utf-8").replace('"execution_count": 2', '"execution_count": 7'))
    assert execute.main(["check", str(other)]) == 1
    assert "was not run once from top to bottom" in capsys.readouterr().err


def test_a_notebook_that_fails_is_left_alone(tmp_path, capsys):
    path = stored(tmp_path, new_code_cell("raise ValueError('no')"))
    before = path.read_bytes()
    assert execute.main(["run", str(path)]) == 1
    assert path.read_bytes() == before
    assert "FAILED" in capsys.readouterr().err


def test_cells_without_ids_get_the_same_ones_every_time():
    old = notebook(new_code_cell("2"))
    for cell in old.cells:
        del cell["id"]
    stored_text = form.write(form.read(json.dumps(old)))
    assert [cell.id for cell in form.read(stored_text).cells] == ["cell-1", "cell-2"]


def test_a_good_notebook_has_no_problems(tmp_path):
    output = new_output("display_data", data={"image/png": "aaaa"})
    cells = [new_markdown_cell("A ratio of a/b, see https://example.org/home/x"),
             new_code_cell("draw()", outputs=[output], metadata=ALT)]
    assert form.problems(stored(tmp_path, *cells)) == []


def test_other_form_is_a_problem(tmp_path):
    path = stored(tmp_path, new_code_cell("1"))
    path.write_text(path.read_text(encoding="utf-8").replace("\n", "\n "), encoding="utf-8")
    assert "not in the stored form" in one_problem(path)


def test_a_cell_that_was_not_run_is_a_problem(tmp_path):
    path = stored(tmp_path, new_code_cell("1"))
    path.write_text(path.read_text(encoding="utf-8").replace('"execution_count": 1', '"execution_count": null'))
    assert "was not run" in one_problem(path)


def test_an_error_without_tag_is_a_problem(tmp_path):
    failed = {"outputs": [new_output("error", ename="E", evalue="no", traceback=["E: no"])]}
    assert "code cell 2 ends in an error" in one_problem(stored(tmp_path, new_code_cell("f()", **failed)))
    tagged = new_code_cell("f()", **failed, metadata={"tags": ["raises-exception"]})
    assert form.problems(stored(tmp_path, tagged)) == []


@pytest.mark.parametrize("mime", ["image/png", "image/svg+xml"])
def test_a_picture_without_alt_text_is_a_problem(tmp_path, mime):
    cell = new_code_cell("draw()", outputs=[new_output("display_data", data={mime: "aaaa"})])
    assert "has no alt text" in one_problem(stored(tmp_path, cell))


@pytest.mark.parametrize("path", ["/home/me/k3", "in /tmp/x.py", "file:///x", r"C:\Users\me", f"{form.ROOT}/book"])
def test_an_absolute_path_is_a_problem(tmp_path, path):
    assert "absolute path" in one_problem(stored(tmp_path, new_markdown_cell(f"See\n{path}")))
    printed = [new_output("stream", text=f"at\n{path}\n")]
    assert "absolute path" in one_problem(stored(tmp_path, new_code_cell("f()", outputs=printed)))


def test_a_heavy_notebook_is_a_problem(tmp_path):
    assert "bytes" in one_problem(stored(tmp_path, new_markdown_cell("x" * form.MAX_BYTES)))


def test_too_many_cells_left_out_of_the_comparison(tmp_path):
    ignored = [new_code_cell("f()", metadata={"tags": ["nbval-ignore-output"]}) for _ in range(3)]
    assert form.problems(stored(tmp_path, *ignored)) == []
    assert "exempts 4 of 5" in one_problem(stored(tmp_path, *ignored, new_code_cell("# NBVAL_IGNORE_OUTPUT\nf()")))


def test_a_live_figure_is_always_compared(tmp_path):
    """One without controls need not be: the loss curve of a run differs between machines."""
    def cell(figure):
        output = new_output("display_data", data=figure._repr_mimebundle_())
        return new_code_cell("f()", outputs=[output], metadata={"tags": ["nbval-ignore-output"]})

    moves = live(lambda x: draw.bars([x]), x=[1, 2], alt="A bar.")
    assert "has a live figure and is exempt" in one_problem(stored(tmp_path, cell(moves)))
    assert form.problems(stored(tmp_path, cell(picture(draw.bars([1]), alt="A bar.")))) == []


def test_the_first_code_cell_must_install_the_package(tmp_path):
    path = stored(tmp_path, new_code_cell("1"))
    text = path.read_text(encoding="utf-8").replace("import k3_teach", "import another")
    path.write_text(text, encoding="utf-8")
    assert "does not begin with form.INSTALL" in one_problem(path)


def said(words):
    return [new_output("execute_result", data={"text/plain": words}, execution_count=1)]


STUB = {"source": "def f(x):  # about 1 line\n    ...\ncheck(f)", "metadata": {"tags": ["exercise"]},
        "outputs": said("Not done yet: f returns None.")}
SOLUTION = {"source": "def f(x):\n    return x\ncheck(f)", "metadata": {"tags": ["hide-cell", "solution"]},
            "outputs": said("Right: it agrees.")}


def test_exercises_in_order_have_no_problems(tmp_path):
    cells = [new_code_cell(**cell) for cell in (STUB, SOLUTION, STUB, SOLUTION)]
    assert form.problems(stored(tmp_path, *cells)) == []


@pytest.mark.parametrize("stub, solution, problem", [
    (STUB | {"source": "def f(x):\n    ...\ncheck(f)"}, SOLUTION, "in code cell 2 lacks a stub"),
    (STUB | {"outputs": said("Right: it agrees.")}, SOLUTION, "the stub in code cell 2 does not fail its check"),
    (STUB, SOLUTION | {"outputs": said("Not yet: 5 is not it.")}, "in code cell 3 does not pass its check"),
    (STUB, SOLUTION | {"outputs": []}, "in code cell 3 does not pass its check"),
    (STUB, SOLUTION | {"metadata": {"tags": ["solution"]}}, "in code cell 3 is not folded"),
    (STUB, SOLUTION | {"metadata": {}}, "the exercise in code cell 2 has no solution"),
    (STUB | {"metadata": {}}, SOLUTION, "the solution in code cell 3 has no exercise before it"),
])  # fmt: skip
def test_what_is_wrong_with_an_exercise(tmp_path, stub, solution, problem):
    assert problem in one_problem(stored(tmp_path, new_code_cell(**stub), new_code_cell(**solution)))


@pytest.mark.parametrize("cells, problem", [
    ([STUB, STUB, SOLUTION], "the exercise in code cell 2 has no solution"),
    ([STUB | {"source": "def f(x):  # about 1 line\n    return 1\ncheck(f)"}, SOLUTION], "in code cell 2 lacks a stub"),
    ([STUB, SOLUTION | {"outputs": said("Right: it agrees.") + said("Not yet: no.")}], "cell 3 does not pass"),
])  # fmt: skip
def test_more_that_is_wrong_with_exercises(tmp_path, cells, problem):
    assert problem in one_problem(stored(tmp_path, *(new_code_cell(**cell) for cell in cells)))


def test_only_format_four_is_read():
    with pytest.raises(ValueError, match="only notebook format 4 is understood, not 3"):
        form.read('{"nbformat": 3, "cells": []}')


def test_a_run_tells_what_is_wrong_with_what_it_stored(tmp_path, capsys):
    path = tmp_path / "chapter.ipynb"
    path.write_text(json.dumps(new_notebook(cells=[new_code_cell("1")])), encoding="utf-8")
    assert execute.main(["run", str(path)]) == 1
    assert "does not begin with form.INSTALL" in capsys.readouterr().err


def test_the_share_left_out_of_the_comparison(tmp_path):
    """A fifth of twenty cells is four; embedded pictures hold no paths."""
    code = lambda n, tags: [new_code_cell("f()", metadata={"tags": tags}) for _ in range(n)]
    assert form.problems(stored(tmp_path, *code(4, ["nbval-skip"]), *code(15, []))) == []
    assert "exempts 5 of 20" in one_problem(stored(tmp_path, *code(5, ["nbval-skip"]), *code(14, [])))
    picture = [new_output("display_data", data={"text/html": "<img src='data:image/png;base64,/tmp/x'>"})]
    assert form.problems(stored(tmp_path, new_code_cell("f()", outputs=picture))) == []
