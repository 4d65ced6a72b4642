"""Probes of the equations: a special model, read at once, against what `reference` computed.

A probe is a function of a `Port` that yields comparisons `(what, actual, expected)`, logits
[..., vocab] or other arrays. It raises `NotChecked` if the port lacks what the rest needs.
"""

import re
from fnmatch import fnmatchcase

import numpy as np

from k3_teach.conformance.models import build, expected, golden, text
from k3_teach.conformance.port import NotChecked, Port, PortError
from k3_teach.conformance.trace import as_computed, matching, with_experts

SAW_NOTHING = "the adapter gives no {} in its trace"


def at_once(*names: str):
    """The probe that reads the texts of these models at once."""
    def probe(port: Port):
        for name in names:
            yield f"logits of the model {name}", port.once(name), expected()[name]
            yield from traced(port, name)
    return probe


def traced(port: Port, name: str, length: int | None = None):
    """Compare what the port has of the trace of a model with the stored one."""
    prefix = f"{name}."
    stored = {k.removeprefix(prefix): x for k, x in expected().items() if k.startswith(prefix)}
    if not stored:
        return
    stored, theirs = with_experts(stored), port.trace(name, text(name)[:length])
    try:
        theirs = with_experts(theirs)
    except (ValueError, IndexError) as e:
        raise PortError(f"topk_idx, topk_w and scores do not fit together: {e}") from e
    for key in sorted(stored.keys() & theirs.keys(), key=as_computed):
        yield f"{key} of the model {name}", matching(theirs[key], stored[key]), stored[key]


def has_trace(port: Port, name: str, *entries: str) -> None:
    keys = port.trace(name, text(name)[:4])
    for entry in entries:
        if not any(key.endswith(f".{entry}") for key in keys):
            raise NotChecked(SAW_NOTHING.format(entry))


def equal_to_the_release(port: Port):
    """Not a pitfall: the two stored models, against what the released model computed. The
    trace comes first, for it tells where a difference begins."""
    yield from traced(port, "odd", 8)
    for name in "odd", "official":
        for row in 0, 1:
            ids = golden()[f"{name}.input_ids"][row]
            yield f"released logits of {name}, row {row}", port.once(name, ids), \
                golden()[f"{name}.logits"][row]
    mask = golden()["odd.padded.attention_mask"]
    logits, state = port.run(port.model("odd"), golden()["odd.padded.input_ids"], mask)
    real = mask.astype(bool)
    yield "released logits of a padded batch", logits[real], golden()["odd.padded.logits"][real]
    ids = golden()["odd.padded.next_ids"]
    mask = np.concatenate([mask, np.ones_like(ids)], 1)
    logits, _ = port.run(port.model("odd"), ids, mask, state)
    yield "released logits of the token after it", logits, golden()["odd.padded.next_logits"]


def padded_a_log(port: Port):
    yield from at_once("padded")(port)
    if not port.refuses("official_tail"):
        yield "A_log with a tail that is not zero was loaded without an error", np.inf, 0


def saved_fields(port: Port):
    yield from at_once("bound_3")(port)
    if not callable(getattr(port.adapter, "save", None)):
        raise NotChecked("the adapter has no save(model, folder); the field is read, at least")
    path = port.folder / "saved"
    path.mkdir(exist_ok=True)
    port.call("save", port.model("bound_3"), path)
    port.models["saved"] = port.call("load", path)
    yield "logits after save and load", port.once("saved", text("bound_3")), port.once("bound_3")


def any_gate(port: Port):
    """Fast gates; once more with a bound of -40, which float64 notices, if the port takes it."""
    yield from at_once("fast")(port)
    if not port.refuses("very_fast"):
        yield from at_once("very_fast")(port)


def depth_by_layers(port: Port):
    yield from at_once("uniform")(port)
    has_trace(port, "uniform", "prefix", "nblocks")


def every_tensor(port: Port):
    """Each kind of tensor, changed alone, must move the logits; none may be missing."""
    _, tensors, _ = build("whole")
    for i, kind in enumerate(sorted({re.sub(r"\d+", "*", n) for n in tensors})):
        yield from moved(port, f"moved-{i}", kind)
    if not port.refuses("lost"):
        yield "a folder without routed_expert_norm was loaded without an error", np.inf, 0


def moved(port: Port, folder: str, kind: str):
    """Does the port notice that the numbers in all tensors of a kind stand elsewhere?"""
    config, tensors, _ = build("whole")
    before = port.once("whole")
    for n in [n for n in tensors if fnmatchcase(n, kind)]:
        tensors[n] = np.roll(tensors[n].flatten(), 1).reshape(tensors[n].shape)
    port.models[folder] = port.load(folder, config, tensors)
    after = port.once(folder, text("whole"))
    if np.abs(after - before).max() <= 1e-6 * np.abs(before).max():
        yield f"{kind.replace('*', 'N')}: other numbers give the same logits", np.inf, 0


def nothing_in_evaluation(port: Port):
    """A text leaves no trace in the model; and all experts may be chosen."""
    first = port.once("bias_ties")
    for again in "second", "third":
        yield f"logits of bias_ties, {again} time", port.once("bias_ties"), first
    if not np.isfinite(port.once("all_experts")).all():
        yield "logits of a model that uses all its experts: NaN or infinite", np.inf, 0


def kinds_of_layers(port: Port):
    """Which layers are KDA and which MLA, counted from 0."""
    try:
        port.model("odd")
    except PortError as e:
        yield f"the base could not be loaded: {e}", np.inf, 0
        return
    keys = port.trace("odd", text("odd")[:4])
    layers = lambda entry: {int(k[1:].split(".")[0]) for k in keys if k.endswith(f".{entry}")}
    kda, mla = layers("g") | layers("state"), layers("attn_weights")
    if not kda and not mla:
        raise NotChecked(SAW_NOTHING.format("g and no attn_weights"))
    for name, found, right in ("KDA", kda, {0, 1, 2, 4, 5, 6}), ("MLA", mla, {3, 7}):
        if found and found != right:
            yield f"{name} layers are {sorted(found)}, counted from 0; right: {sorted(right)}", \
                np.inf, 0


def decay_on_both_paths(port: Port):
    yield from at_once("strong_gate")(port)
    logits, _ = port.pieces("strong_gate", text("strong_gate"), [1] * 24)
    yield "logits of strong_gate, token by token", logits, expected()["strong_gate"]
