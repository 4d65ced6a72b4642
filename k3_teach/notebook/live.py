"""Figures that move without a kernel: a cell computes every stop and stores the marks to draw.

    live(lambda bias: draw.bars(...), bias=[0, 0.1, 0.2], alt="What the picture shows.")
    picture(draw.blocks(...), alt="A picture without controls, drawn in the same way.")

The output is HTML with its data and a small script, so it works in the built page, in JupyterLab,
Notebook, VS Code and Colab, on a phone, and with no network. Where scripts do not run, the first
stop is shown as a still. With a kernel, `kernel=True` adds a widget whose sliders take any value
between the stops.
"""

import base64
import itertools
import json
from html import escape
from pathlib import Path

from .draw import WIDTH, Drawing, number
from .palette import DARK, LIGHT, tokens

SCRIPT = Path(__file__).with_name("live.js").read_text(encoding="utf-8")
# Dark pages: the book's, JupyterLab's and Notebook's, VS Code's, Colab's.
ON_DARK = ('html[data-theme="dark"]', '[data-jp-theme-light="false"]', ".vscode-dark",
           ".vscode-high-contrast:not(.vscode-high-contrast-light)", "html[theme=dark]")
STYLE = (f".k3-live{{{tokens(LIGHT)}}}"
         + ",".join(f"{dark} .k3-live" for dark in ON_DARK) + f"{{{tokens(DARK)}}}\n"
         + Path(__file__).with_name("live.css").read_text(encoding="utf-8"))
MOST_STOPS = 2000
FEW = 40  # letters of all words of a control, up to which they all stand there to choose from
STILL = "A still picture: run this cell, or open the page of the book, to move it."


class Live:
    """What `live` returns. `frame(name=value, ...)` is the Drawing at a stop, for assertions."""

    def __init__(self, fn, alt: str, controls: dict[str, list], start: dict,
                 steps: str | None = None, pick: dict | None = None, kernel: bool = False):
        self.fn, self.alt, self.controls, self.kernel = fn, alt, controls, kernel
        self.start = {name: start.get(name, 0) for name in controls}
        self.steps, self.pick = steps, pick
        stops = itertools.product(*controls.values())
        self.drawings = {stop: _checked(fn(**dict(zip(controls, stop)))) for stop in stops}

    def frame(self, **values) -> Drawing:
        return self.drawings[tuple(values[name] for name in self.controls)]

    @property
    def first(self) -> Drawing:
        start = {name: values[self.start[name]] for name, values in self.controls.items()}
        return self.frame(**start)

    def data(self) -> dict:
        """What the script needs: controls, a table of all different marks, and each stop's rows."""
        table: dict[str, int] = {}
        row = lambda mark: table.setdefault(json.dumps(mark, ensure_ascii=False), len(table))
        frames = [
            {"height": round(d.height, 1), "marks": [row(m) for m in d.marks], "says": d.says}
            for d in self.drawings.values()
        ]
        data = {
            "alt": self.alt,
            "controls": [self._control_data(name) for name in self.controls],
            "frames": frames,
            "marks": [json.loads(m) for m in table],
            "width": WIDTH,
        }
        for name, box in (self.pick or {}).items():
            data["pick"] = {"control": list(self.controls).index(name), "box": list(box)}
        return data

    def _control_data(self, name: str) -> dict:
        words = [_word(v) for v in self.controls[name]]
        few = all(isinstance(v, str) for v in self.controls[name]) and sum(map(len, words)) <= FEW
        kind = "steps" if name == self.steps else "choice" if few else "slider"
        label = name.replace("_", " ")
        return {"kind": kind, "label": label, "start": self.start[name], "values": words}

    def to_html(self) -> str:
        compact = {"separators": (",", ":"), "sort_keys": True, "ensure_ascii": False}
        data = json.dumps(self.data(), **compact).replace("<", "\\u003c")
        alt = escape(self.alt + " " + self.first.says, quote=True)
        still = base64.b64encode(self.first.svg().encode()).decode()
        hint = f"<em>{STILL}</em>" if self.controls else ""
        return (f'<div class="k3-live"><style>{STYLE}</style>'
                f'<div class="k3-picture"><img alt="{alt}" '
                f'src="data:image/svg+xml;base64,{still}"></div>'
                f'<div class="k3-controls">{hint}</div>'
                f'<div class="k3-words" aria-live="polite"></div>'
                f'<script type="application/json">{data}</script><script>{SCRIPT}</script></div>')

    def __repr__(self) -> str:
        stops = ", ".join(f"{name}: {len(values)} stops" for name, values in self.controls.items())
        return f"<live figure; {stops}>" if stops else "<picture>"

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        bundle = {"text/html": self.to_html(), "text/plain": repr(self)}
        if self.kernel:
            # ipywidgets 7 has no such method: there the HTML is all.
            widget = getattr(self._widget(), "_repr_mimebundle_", dict)()
            widget = widget[0] if isinstance(widget, tuple) else widget
            key = "application/vnd.jupyter.widget-view+json"
            bundle |= {key: widget[key]} if key in widget else {}
        return bundle

    def _widget(self):
        """Sliders that compute `fn` at any value; the stored notebook keeps the HTML only."""
        import ipywidgets as widgets

        controls = {
            name: _control(widgets, name, values, self.start[name])
            for name, values in self.controls.items()
        }
        picture = widgets.HTML()

        def update(_=None):
            drawing = self.fn(**{name: control.value for name, control in controls.items()})
            shown = f"{drawing.svg()}<p>{escape(drawing.says)}</p>"
            look = f"max-width:{WIDTH * 1.4:g}px;background:#fff;color:#000"
            picture.value = f'<div style="{look}">{shown}</div>'

        for control in controls.values():
            control.observe(update, "value")
        update()
        return widgets.VBox([*controls.values(), picture])


def live(fn, *, alt: str, start: dict | None = None, steps: str | None = None,
         pick: dict | None = None, kernel: bool = False, **controls) -> Live:
    """A live figure of `fn(**controls)`, a function of the package's code that returns a Drawing.

    controls: name -> the values at its stops; all combinations are computed now. `start`: name ->
    index of the first stop shown. `steps`: the control that gets "back" and "next" buttons in place
    of a slider; one with a few short words gets radio buttons. `pick`: {control: (x0, y0, x1,
    y1)}, a part of the picture that moves this control when it is pointed at: its width is divided
    among the stops. `alt`: what the picture shows, whatever the stop; the drawing adds what it
    shows at this one. ValueError names what is wrong.
    """
    for name, values in controls.items():
        if isinstance(values, (set, frozenset)):
            raise ValueError(f"control {name} is a set; it must be a list, which has an order")
    controls = {name: list(values) for name, values in controls.items()}
    if not alt.strip() or not controls:
        raise ValueError("a live figure needs alt, the text alternative, and at least one control")
    stops = 1
    for name, values in controls.items():
        stops *= len(values)
        if len(values) < 2:
            raise ValueError(f"control {name} has {len(values)} values; it must have at least two")
        words = [_word(v) for v in values]
        twice = [word for word in words if words.count(word) > 1]
        if twice:
            own = "every stop needs words of its own"
            raise ValueError(f"control {name} says {twice[0]!r} at two stops; {own}")
    if stops > MOST_STOPS:
        raise ValueError(f"the controls make {stops} stops; at most {MOST_STOPS} are stored")
    names = ", ".join(controls)
    for name, index in (start or {}).items():
        known = name in controls and isinstance(index, int)
        if not known or not 0 <= index < len(controls[name]):
            allowed = f"the index of a stop of one of {names}"
            raise ValueError(f"start[{name!r}] is {index}; it must be {allowed}")
    if steps is not None and steps not in controls:
        raise ValueError(f"steps is {steps!r}; it must be one of {names}")
    if pick is not None and not _is_pick(pick, controls):
        allowed = f"it must be {{one of {names}: (x0, y0, x1, y1)}} with x0 < x1"
        raise ValueError(f"pick is {pick!r}; {allowed}")
    return Live(fn, alt, controls, start or {}, steps, pick, kernel)


def picture(drawing: Drawing, *, alt: str) -> Live:
    """A drawing that does not move, in the colours of the page around it."""
    if not alt.strip():
        raise ValueError("a picture needs alt, the text alternative")
    return Live(lambda: drawing, alt, {}, {})


def _word(value) -> str:
    return value if isinstance(value, str) else number(value, 4)


def _is_pick(pick: dict, controls: dict) -> bool:
    """One control and a box with a width."""
    boxes = [tuple(box) for name, box in pick.items() if name in controls]
    return len(pick) == len(boxes) == 1 and len(boxes[0]) == 4 and boxes[0][0] < boxes[0][2]


def _checked(drawing) -> Drawing:
    if not isinstance(drawing, Drawing):
        kind = type(drawing).__name__
        raise ValueError(f"the function of a live figure must return a Drawing, not {kind}")
    return drawing


def _control(widgets, name: str, values: list, start: int):
    shared = {"value": values[start], "description": name}
    if all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values):
        low, high = min(values), max(values)
        if all(isinstance(v, int) for v in values):
            return widgets.IntSlider(min=low, max=high, step=1, **shared)
        return widgets.FloatSlider(min=low, max=high, step=(high - low) / 200, **shared)
    return widgets.SelectionSlider(options=values, **shared)
