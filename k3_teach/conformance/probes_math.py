"""Probes of the equations: a special model, read at once, against what `reference` computed.

A probe is a function of a `Port` that yields comparisons `(what, actual, expected)`, logits
[..., vocab] or other arrays. It raises `NotChecked` if the port lacks what the rest needs.
"""

import re
from fnmatch import fnmatchcase

import numpy as np

from k3_teach.conformance.models import build, expected, golden, text
from k3_teach.conformance.port import NotChecked, Port, PortError

# In the order in which a layer computes them, so that the first that is off is the culprit.
ORDER = ("attn_read", "attn_in", "g", "beta", "state", "attn_weights", "attn_out", "mlp_read",
         "mlp_in", "scores", "experts", "latent", "mlp_out", "prefix", "nblocks")
SAW_NOTHING = "the adapter gives no {} in its trace"


def at_once(*names: str):
    """The probe that reads the texts of these models at once."""
    def probe(port: Port):
        for name in names:
            yield f"logits of the model {name}", port.once(name), expected()[name]
            yield from traced(port, name)
    return probe


def layer_of(key: str) -> tuple:
    """Sorts the keys of a trace: by layer, then as a layer computes them; the end last."""
    layer, _, entry = key.rpartition(".")
    if not layer:
        return 10 ** 6, 0, key
    return int(layer[1:]), ORDER.index(entry), key


def with_experts(trace: dict) -> dict:
    """A trace with `experts` [T,E], the weight of each expert, instead of topk_idx and topk_w,
    whose columns may come in any order."""
    trace = dict(trace)
    for key in [k for k in trace if k.endswith(".topk_idx")]:
        layer = key.removesuffix("topk_idx")
        idx, weights = trace.pop(key), trace.pop(f"{layer}topk_w", None)
        scores = trace.get(f"{layer}scores")
        if weights is not None and scores is not None:
            spread = np.zeros(scores.shape)
            np.put_along_axis(spread, idx.reshape(weights.shape).astype(int), weights, -1)
            trace[f"{layer}experts"] = spread
    return {k: x for k, x in trace.items() if not k.endswith(".topk_w")}


def traced(port: Port, name: str, length: int | None = None):
    """Compare what the port has of the trace of a model with the stored one."""
    prefix = f"{name}."
    stored = {k.removeprefix(prefix): x for k, x in expected().items() if k.startswith(prefix)}
    if not stored:
        return
    theirs, stored = with_experts(port.trace(name, text(name)[:length])), with_experts(stored)
    for key in sorted(stored.keys() & theirs.keys(), key=layer_of):
        yield f"{key} of the model {name}", matching(theirs[key], stored[key]), stored[key]


def matching(theirs: np.ndarray, ours: np.ndarray) -> np.ndarray:
    """`theirs` without the axis of the batch, if it has one."""
    one_more = theirs.ndim == ours.ndim + 1 and len(theirs) == 1
    return (theirs[0] if one_more else theirs).astype(np.float64)


def has_trace(port: Port, name: str, *entries: str) -> None:
    keys = port.trace(name, text(name)[:4])
    for entry in entries:
        if not any(key.endswith(f".{entry}") for key in keys):
            raise NotChecked(SAW_NOTHING.format(entry))


def equal_to_the_release(port: Port):
    """Not a pitfall: the two stored models, against what the released model computed. The
    trace comes first, for it tells where a difference begins."""
    yield from traced(port, "odd", 8)
    for name in "official", "odd":
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
    path.mkdir()
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
    yield from at_once("gains")(port)
    if not port.refuses("lost"):
        yield "a folder without routed_expert_norm was loaded without an error", np.inf, 0
    _, tensors, _ = build("whole")
    for i, kind in enumerate(sorted({re.sub(r"\d+", "*", n) for n in tensors})):
        yield from moved(port, f"moved-{i}", kind)


def moved(port: Port, folder: str, kind: str):
    """Does the port notice that the numbers in all tensors of a kind stand elsewhere?"""
    config, tensors, _ = build("whole")
    before = port.once("whole")
    for n in [n for n in tensors if fnmatchcase(n, kind)]:
        tensors[n] = np.roll(tensors[n].flatten(), 1).reshape(tensors[n].shape)
    port.models[folder] = port.load(folder, config, tensors)
    after = port.once(folder, text("whole"))
    if not np.abs(after - before).max() > 1e-6 * np.abs(before).max():
        yield f"{kind.replace('*', 'N')}: other numbers give the same logits", np.inf, 0


def nothing_in_evaluation(port: Port):
    for again in "first", "second", "third":
        yield f"logits of bias_ties, {again} time", port.once("bias_ties"), expected()["bias_ties"]
    yield from at_once("all_experts")(port)


def kinds_of_layers(port: Port):
    """Which layers are KDA and which MLA, counted from 0."""
    try:
        keys = port.trace("odd", text("odd")[:4])
    except PortError as e:
        yield f"the base could not be read: {e}", np.inf, 0
        return
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
