"""The forty pitfalls, their probes, and the run over a port."""

import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from k3_teach.conformance import adapters, probes_math as m, probes_use as u
from k3_teach.conformance.port import NotChecked, Port, PortError
from k3_teach.errors import InputError


@dataclass(frozen=True)
class Pitfall:
    """A mistake that was made in public, and how the kit looks for it."""

    number: int
    name: str
    symptom: str
    cause: str
    look_at: str
    report: str                 # where it was reported
    probe: str
    by_reading: bool = False    # nothing to observe
    implies: tuple[int, ...] = ()   # probes that fail with it, too
    begins: tuple[str, ...] = ()    # entries of the trace of the base where it can show first
    faint: bool = False             # it shows there by rounding alone


TABLE = Path(__file__).with_name("pitfalls.toml").read_text(encoding="utf-8")
PITFALLS = [Pitfall(**{k: tuple(x) if isinstance(x, list) else x for k, x in p.items()})
            for p in tomllib.loads(TABLE)["pitfall"]]
BASE = Pitfall(0, "equality with the released model", "", "some equation differs",
               "the first entry of the trace that is off", "", "the two stored models")

PROBES = {
    0: m.equal_to_the_release, 1: m.padded_a_log, 2: m.at_once("square"),
    3: m.at_once("bounded"), 4: m.at_once("unbounded", "strong_gate"), 5: m.saved_fields,
    6: m.at_once("small_keys"), 7: m.at_once("slow"), 8: m.at_once("alike"),
    9: m.at_once("sweep"), 10: m.any_gate, 11: u.packed, 12: u.nothing_from_later,
    13: u.in_pieces("memory", [64], [32], [43]), 14: u.in_pieces("odd", [2, 5, 1, 3]),
    15: u.first_token_alone,
    16: u.back_to_a_prefix, 17: u.padding_as_tokens, 18: u.padding_of_nan, 19: u.left_padding,
    20: u.in_pieces("slow", *([n] for n in (1, 31, 33, 63, 64, 65, 129))),
    21: u.rejected_drafts, 22: m.at_once("sharp"), 23: m.depth_by_layers,
    24: m.at_once("loud", "blocks_5"), 25: m.at_once("routed"), 26: m.every_tensor,
    27: m.at_once("near_ties"), 28: m.at_once("bias_ties"), 29: m.at_once("cancel"),
    30: m.at_once("loud_dense", "loud_shared", "loud_routed"),
    31: m.at_once("taps", "taps_bf16"), 32: m.decay_on_both_paths, 33: m.at_once("constants"),
    34: m.nothing_in_evaluation, 35: m.at_once("small_latents"), 37: m.kinds_of_layers,
    40: u.texts_in_turn,
}


@dataclass(frozen=True)
class Result:
    """What a probe found. status: "passed", "failed", "not checked" or "by reading"; error:
    the largest difference, relative to the largest number that was expected (infinite for
    NaN and for an exception), or None; tolerance: what is allowed; message: the comparison
    that failed first, and first: by how much, None if none was made."""

    number: int
    status: str
    error: float | None
    tolerance: float
    message: str
    first: float | None = None


# In float64 two right models differ by 1e-12. In float32 a near-tie may send a token to
# another expert, so the median over the tokens counts, and small mistakes are not seen.
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
# Probes that compare bits; a cancellation that a chunk of 32 tokens in float64 just shows; one
# that costs float32 three digits.
OWN_TOLERANCE = {"float64": {12: 0.0, 8: 1e-11}, "float32": {12: 0.0, 31: 1e-2}}


def difference(actual, expected, dtype: str) -> float:
    """max |actual - expected| / max |expected|; in float32 the median of it over the tokens.

    [..., n] of the same shape; infinite if the shapes differ or a number is not finite.
    """
    actual, expected = np.asarray(actual, float), np.asarray(expected, float)
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return np.inf
    off = np.abs(actual - expected)
    if dtype == "float32" and off.ndim:
        off = np.median(off.reshape(-1, off.shape[-1]).max(-1))
    return float(np.max(off) / max(np.max(np.abs(expected)), 1e-300))


def shown(what: str, actual, expected) -> str:
    """`what`, and why its difference is infinite, if it is."""
    actual, expected = np.asarray(actual, float), np.asarray(expected, float)
    if actual.shape != expected.shape:
        return f"{what}: shape {list(actual.shape)}, right is {list(expected.shape)}"
    return f"{what}: NaN or infinite" if actual.ndim and not np.isfinite(actual).all() else what


def probe(port: Port, number: int, dtype: str) -> Result:
    """Run one probe. What the port raises is a failure."""
    allowed = OWN_TOLERANCE[dtype].get(number, TOLERANCE[dtype])
    error, first, message, status = None, None, "", "passed"
    try:
        for what, actual, expected in PROBES[number](port):
            found = difference(actual, expected, dtype if allowed else "float64")
            if not found <= allowed and status == "passed":
                status, message, first = "failed", shown(what, actual, expected), found
            error = max(found, error or 0.0)
    except PortError as e:
        status, error, message = "failed", np.inf, message or str(e)
    except NotChecked as e:
        if status == "passed":
            status, message = "not checked", str(e)
    return Result(number, status, error, allowed, message, first)


def run(adapter=None, probes=None, dtype: str = "float64") -> list[Result]:
    """The results of an adapter (None: our own), in the order of the numbers.

    probes: numbers of pitfalls, or 0 for equality with the released model; None: all.
    dtype: "float64", or "float32" for a port that has no more. InputError for an adapter
    without its three functions, and for other numbers and dtypes.
    """
    adapter = adapters.checked(adapters.k3_teach if adapter is None else adapter)
    numbers = range(len(PITFALLS) + 1) if probes is None else probes
    wrong = [n for n in numbers if n not in range(len(PITFALLS) + 1)]
    if wrong or dtype not in TOLERANCE:
        raise InputError(f"probes is {probes!r} and dtype {dtype!r}; allowed are numbers from 0 "
                         f"to {len(PITFALLS)}, and {' or '.join(TOLERANCE)}")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        port = Port(adapter, folder)
        for n in numbers:
            if n in PROBES:
                results.append(probe(port, n, dtype))
            else:
                message = PITFALLS[n - 1].look_at
                results.append(Result(n, "by reading", None, TOLERANCE[dtype], message))
    return results
