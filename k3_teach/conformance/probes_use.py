"""Probes of use: the same text in pieces, in batches, behind padding, after a retreat. Each
compares the port with itself, reading the text at once: an equation that is wrong fails the
probes of `probes_math`, not these.
"""

import numpy as np

from k3_teach.conformance.models import golden, text
from k3_teach.conformance.port import NotChecked, Port, PortError

PAD = 58


def other(ids: np.ndarray) -> np.ndarray:
    """Another text of the same length, different at every token."""
    return (ids + 17) % PAD


def in_pieces(name: str, *cuts: list[int]):
    """The probe that reads a text in pieces of these sizes, the last taking the rest."""
    def probe(port: Port):
        whole = port.once(name)
        for sizes in cuts:
            shown = ", ".join(map(str, sizes[:4])) + (", ..." if len(sizes) > 4 else "")
            logits, _ = port.pieces(name, text(name), sizes)
            yield f"logits in pieces of {shown} and the rest", logits, whole
    return probe


def behind_padding(port: Port, name: str, rows, fill, steps: int = 0):
    """Rows of different lengths in one batch, padding on the left, then `steps` tokens one by
    one: each row as it is alone. rows: texts, each `steps` longer than what is read at first;
    fill(n): n tokens of padding."""
    width = max(map(len, rows)) - steps
    first = [row[:len(row) - steps] for row in rows]
    ids = np.stack([np.concatenate([fill(width - len(row)), row]) for row in first])
    mask = np.stack([np.arange(width) >= width - len(row) for row in first]).astype(np.int64)
    logits, state = port.run(port.model(name), ids, mask)
    out = [[row[width - len(r):]] for row, r in zip(logits, first)]
    for i in range(steps):
        ids = np.stack([row[len(row) - steps + i] for row in rows])[:, None]
        mask = np.concatenate([mask, np.ones_like(ids)], 1)
        logits, state = port.run(port.model(name), ids, mask, state)
        for row, new in zip(out, logits):
            row.append(new)
    for i, (row, got) in enumerate(zip(rows, out)):
        shown = f"row {i} of {len(rows)}, padding on the left"
        yield shown, np.concatenate(got), port.once(name, row)


def before_padding(port: Port, name: str, row, fill):
    """The same with padding on the right of the shorter of two rows."""
    ids = np.stack([np.concatenate([row, fill]), other(np.concatenate([row, fill]))])
    mask = np.ones_like(ids)
    mask[0, len(row):] = 0
    logits, _ = port.run(port.model(name), ids, mask)
    yield "row 0 of 2, padding on the right", logits[0, :len(row)], port.once(name, row)


def packed(port: Port):
    """63 and 65 tokens: where rows are packed, one ends inside a tile of the other."""
    for name in "fast", "slow", "very_fast":
        if name == "very_fast" and port.refuses(name):
            continue
        rows = [text(name)[:63], text(name)[:65]]
        for what, got, right in behind_padding(port, name, rows, lambda n: np.full(n, PAD)):
            yield f"{what}, model {name}", got, right


def nothing_from_later(port: Port):
    """Other tokens at the end change no bit of what comes before them."""
    ids, whole = text("mixed"), port.once("mixed")
    for start in 20, 33, 55:
        changed = np.concatenate([ids[:start], other(ids[start:])])
        yield f"logits before token {start}, when it and later ones change", \
            port.once("mixed", changed)[:start], whole[:start]


def first_token_alone(port: Port):
    """After another text, a first piece of one token: nothing old may be found in its state."""
    ids = text("odd")
    right = port.once("odd", other(ids)[:12])
    port.run(port.model("odd"), np.stack([ids, ids]))
    port.pieces("odd", ids, [40])
    logits, _ = port.pieces("odd", other(ids)[:12], [1, 1])
    yield "logits of a text that begins with a piece of one token", logits, right


def back_to_a_prefix(port: Port):
    """A state that was kept is continued after the text has gone on from it."""
    ids, whole = text("odd"), port.once("odd")
    _, kept = port.pieces("odd", ids[:40], [])
    port.pieces("odd", other(ids)[:30], [7, 1, 1], kept)
    logits, _ = port.pieces("odd", ids[40:], [], kept)
    yield "logits after going back to the first 40 tokens", logits, whole[40:]


def rejected_drafts(port: Port):
    """Four drafts are read, two are rejected; the text goes on from the state before."""
    ids, whole = text("odd"), port.once("odd")
    _, kept = port.pieces("odd", ids[:40], [39])
    port.pieces("odd", other(ids[40:44]), [1, 1, 1], kept)      # a step may write in place
    drafts = np.concatenate([ids[40:42], other(ids[42:44])])
    logits, _ = port.pieces("odd", drafts, [], kept)
    yield "logits of the two drafts that are kept", logits[:2], whole[40:42]
    logits, state = port.pieces("odd", ids[40:42], [], kept)
    yield "logits of the kept drafts, read again", logits, whole[40:42]
    logits, _ = port.pieces("odd", ids[42:50], [1] * 8, state)
    yield "logits of single tokens after the rejection", logits, whole[42:50]


def padding_as_tokens(port: Port):
    """Nearly a chunk of other tokens under a mask of 0, beside a row without padding."""
    ids, fill = text("slow"), other(text("slow"))
    rows = [ids[:24], ids[:80]]
    yield from behind_padding(port, "slow", rows, lambda n: fill[:n], steps=5)
    yield from on_the_right(port, "slow", ids[:24], fill[:40])


def on_the_right(port: Port, name: str, row, fill):
    """`before_padding`, if the port allows padding on the right."""
    try:
        found = list(before_padding(port, name, row, fill))
    except PortError as e:
        raise NotChecked(f"padding on the right: {e}") from e
    yield from found


def padding_of_nan(port: Port):
    """The embedding of the padding token is NaN, and no real token may notice."""
    ids, pads = text("odd"), lambda n: np.full(n, PAD)
    yield from behind_padding(port, "blind", [ids[:20], ids[:30]], pads, steps=3)
    yield from on_the_right(port, "blind", ids[:20], pads(10))


def left_padding(port: Port):
    """A batch of three lengths, then five tokens one by one."""
    ids = text("odd")
    rows = [ids[:15], ids[:35], other(ids)[:27]]
    yield from behind_padding(port, "odd", rows, lambda n: np.full(n, PAD), steps=5)


def texts_in_turn(port: Port):
    """A first text, one that grows, another beside them, and two that part: buffers are not
    shared or dropped."""
    ids = np.resize(golden()["odd.input_ids"], 300)
    right, pair = port.once("odd", ids), np.stack([other(ids)[:20], other(ids)[20:40]])
    first, a = port.pieces("odd", ids[:20], [])
    second, b = port.run(port.model("odd"), pair[:, :12])
    fork, onward = port.pieces("odd", ids[20:25], [1, 1], a)
    port.pieces("odd", other(ids)[20:25], [1, 1], a)        # may not show in the other branch
    more, a = port.pieces("odd", ids[25:290], [1, 3], onward)
    third, b = port.run(port.model("odd"), pair[:, 12:], None, b)
    last, _ = port.pieces("odd", ids[290:], [1, 1, 1], a)
    grown = np.concatenate([first, fork, more, last])
    yield "logits of a text that grows to 300 tokens", grown, right
    both = np.concatenate([second, third], 1)
    for row, got in zip(pair, both):
        yield "logits of a second text, in turn with it", got, port.once("odd", row)
