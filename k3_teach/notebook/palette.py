"""The book's colours, in one place: for code, for live figures and for the pages' style sheet.

`PALETTE` stays apart with each kind of colour blindness and shows on white and on the dark page, so
pictures that cannot know their page use it. `LIGHT` and `DARK` are the same colours for one page
each: every one has a contrast of 4.5:1 with its page, and `on`, the colour of words in a box, has
it with every one of them. `strong` is for words on a shade of blue.
"""

PALETTE = {
    "blue": "#2378fd",
    "rust": "#a54b01",
    "green": "#2b8060",
    "pink": "#d8489f",
    "ochre": "#b38b10",
}
INK = "#757c86"  # axes, words, whatever is not data

LIGHT = {
    "blue": "#1b66d6",
    "rust": "#a54b01",
    "green": "#2b8060",
    "pink": "#b83280",
    "ochre": "#856800",
    "purple": "#8a3f86",
    "ink": "#5f6670",
    "strong": "#1a1d21",
    "on": "#ffffff",
}
DARK = {
    "blue": "#6aa5ff",
    "rust": "#e58c4c",
    "green": "#55b990",
    "pink": "#f07fc3",
    "ochre": "#d9b44c",
    "purple": "#cd93d8",
    "ink": "#a4acb6",
    "strong": "#f2f4f7",
    "on": "#10151c",
}


def tokens(colours: dict[str, str]) -> str:
    """The colours as declarations of a style sheet: `--k3-blue:#1b66d6;...`."""
    return "".join(f"--k3-{name}:{value};" for name, value in colours.items())
