"""The form in which a chapter is stored, and the rules that it keeps.

A stored notebook holds its outputs. `normalise` drops what differs from run to run, so a diff shows
what really changed; `problems` lists the rules that a notebook breaks.
"""

import json
import math
import re
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 1_000_000
KERNEL = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CELL_METADATA = ("mystnb", "tags")
WIDGET = "application/vnd.jupyter.widget-view+json"
NOT_COMPARED = {"nbval-ignore-output", "nbval-skip"}
NOT_COMPARED_COMMENT = re.compile(
    r"#\s*(NBVAL_IGNORE_OUTPUT|NBVAL_SKIP|PYTEST_VALIDATE_IGNORE_OUTPUT)\b"
)
EMBEDDED = re.compile(r"base64,[A-Za-z0-9+/=\s]+")
ABSOLUTE = re.compile(
    r"(?<![\w./:-])/(?:home|Users|root|tmp|private|usr|opt|var|mnt)/"
    r"|\b[A-Z]:\\Users\\|file:///"
)
# How the first code cell of every chapter begins, so that it also runs where only the notebook is.
INSTALL = """\
try:
    import k3_teach
except ImportError:  # on Colab, say
    %pip install -q "k3_teach[notebook] @ git+https://github.com/k3-teach/k3-teach"
"""


# ---- the normal form -----------------------------------------------------------------------------


def read(text):
    """A notebook from its JSON text; unlike nbformat's reader, no cell gets a random id."""
    notebook = nbformat.from_dict(json.loads(text))
    if notebook.get("nbformat") != 4:
        raise ValueError(f"only notebook format 4 is understood, not {notebook.get('nbformat')!r}")
    return notebook


def write(notebook):
    """The JSON text of a notebook in normal form."""
    return nbformat.writes(normalise(notebook), indent=1).rstrip("\n") + "\n"


def normalise(notebook):
    """Drop in place whatever changes between runs, machines and editors; return the notebook."""
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = nbformat.from_dict(KERNEL)
    notebook.cells = [cell for cell in notebook.cells if "".join(cell.source).strip()]
    taken = {cell.get("id") for cell in notebook.cells}
    for number, cell in enumerate(notebook.cells, start=1):
        if not cell.get("id"):
            cell.id = _free_id(number, taken)
        cell.source = "".join(cell.source).rstrip()
        cell.metadata = _only(cell.metadata, CELL_METADATA)
        if cell.cell_type == "code":
            cell.outputs = _normal_outputs(cell.outputs)
    return notebook


def _free_id(number, taken):
    while f"cell-{number}" in taken:
        number += 1000
    taken.add(f"cell-{number}")
    return f"cell-{number}"


def _only(metadata, names):
    return nbformat.from_dict({k: v for k, v in metadata.items() if k in names})


def _normal_outputs(outputs):
    """One stream per name; no widget state; of metadata the size of pictures; no tracebacks."""
    kept, streams = [], {}
    for output in outputs:
        if output.output_type == "stream":
            output.text = "".join(output.text)
            if output.name in streams:
                streams[output.name].text += output.text
                continue
            streams[output.name] = output
        elif output.output_type == "error":
            output.traceback = [f"{output.ename}: {output.evalue}"]
        else:
            output.data.pop(WIDGET, None)
            output.metadata = _only(output.metadata, ("image/png",))
        kept.append(output)
    return kept


# ---- the rules -----------------------------------------------------------------------------------


def problems(path):
    """What is wrong with the stored notebook at `path`, one sentence each; empty if nothing is."""
    text = Path(path).read_text(encoding="utf-8")
    notebook = normalise(read(text))
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    found = [] if text == write(notebook) else ["is not in the stored form: run the notebook tool"]
    if len(text.encode()) >= MAX_BYTES:
        found.append(f"is {len(text.encode()):,} bytes; less than {MAX_BYTES:,} are allowed")
    found += _run_problems(code) + _picture_problems(code) + _path_problems(notebook)
    found += _exercise_problems(code)
    if code and not code[0].source.startswith(INSTALL):
        found.append("does not begin with form.INSTALL in its first code cell")
    exempt, allowed = sum(map(_is_exempt, code)), max(3, math.floor(0.2 * len(code)))
    if exempt > allowed:
        count = f"{exempt} of {len(code)} code cells"
        found.append(f"exempts {count} from comparison; {allowed} are allowed")
    return found


def _run_problems(code):
    found = []
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        found.append("was not run once from top to bottom")
    for number, cell in enumerate(code, start=1):
        failed = any(output.output_type == "error" for output in cell.outputs)
        if failed and not {"raises-exception", "nbval-raises-exception"} & _tags(cell):
            found.append(f"code cell {number} ends in an error and has no tag raises-exception")
    return found


def _picture_problems(code):
    found = []
    for number, cell in enumerate(code, start=1):
        mimes = {mime for output in cell.outputs for mime in output.get("data", {})}
        alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
        if any(mime.startswith("image/") for mime in mimes) and not alt.strip():
            lacks = "no alt text (metadata mystnb.image.alt)"
            found.append(f"code cell {number} draws a picture and has {lacks}")
        stored = "".join(_strings(cell.get("outputs", [])))
        if _is_exempt(cell) and '"controls":[{' in stored:     # a `picture` has no controls
            found.append(f"code cell {number} has a live figure and is exempt from comparison")
    return found


def _exercise_problems(code):
    """A stub says how long an answer is and fails its check; a solution is folded and passes."""
    found, open_stub = [], None
    for number, cell in enumerate(code, start=1):
        if "exercise" in _tags(cell):
            if open_stub:
                found.append(f"the exercise in code cell {open_stub} has no solution")
            open_stub = number
            if "..." not in cell.source or not re.search(r"# about \d+ lines?\b", cell.source):
                lacks = "a stub `...` and a comment `# about N lines`"
                found.append(f"the exercise in code cell {number} lacks {lacks}")
            if not _verdict(cell).startswith("Not done yet"):
                found.append(f"the stub in code cell {number} does not fail its check")
        elif "solution" in _tags(cell):
            if not open_stub:
                found.append(f"the solution in code cell {number} has no exercise before it")
            open_stub = None
            if "hide-cell" not in _tags(cell):
                found.append(f"the solution in code cell {number} is not folded (tag hide-cell)")
            if not _verdict(cell).startswith("Right"):
                found.append(f"the solution in code cell {number} does not pass its check")
    if open_stub:
        found.append(f"the exercise in code cell {open_stub} has no solution")
    return found


def _verdict(cell):
    """What the check at the end of a cell says."""
    texts = [output.data.get("text/plain", "") for output in cell.outputs if "data" in output]
    return "".join(texts[-1]) if texts else ""


def _path_problems(notebook):
    found = []
    for number, cell in enumerate(notebook.cells, start=1):
        text = EMBEDDED.sub("", "\n".join(_strings([cell.source, cell.get("outputs", [])])))
        if f"{ROOT}/" in text or ABSOLUTE.search(text):
            found.append(f"cell {number} shows an absolute path")
    return found


def _strings(node):
    """Every text inside nested lists and dicts, pictures left out."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict):
        for key, value in node.items():
            if key not in ("image/png", "image/jpeg"):
                yield from _strings(value)
    elif isinstance(node, list):
        for value in node:
            yield from _strings(value)


def _tags(cell):
    return set(cell.metadata.get("tags", []))


def _is_exempt(cell):
    return bool(NOT_COMPARED & _tags(cell) or NOT_COMPARED_COMMENT.search(cell.source))
