"""What the command prints: where the released model is lost, and what mistake that points to.

A wrong equation fails many probes, for many models have it. A failed probe is likely the cause
if it implies all others that failed, and if the trace of the released model is off first where
that mistake begins, and as little as it does there. One that is no matter of degree (a tensor
that is not read) leaves no room for others; of several, that which implies the fewest comes
first, then that with the largest error.
"""

import re
import textwrap

from k3_teach.conformance.kit import BASE, PITFALLS, Pitfall, Result
from k3_teach.conformance.trace import known, place

MOST = 4        # likely causes that are told at length
LISTED = 8      # other failures that are told with their errors
FAR = 100       # one whose own model is less off, by this factor, than another's is not told
ECHO = 1e-4     # failures that much smaller than the largest explain nothing
FAINT = 0.02    # more than rounding to bfloat16 does in one step
ROUNDING = 1e-5     # more than rounding to float32 does in one step
STATUSES = ("passed", "failed", "not checked", "by reading")
BEYOND_TRACE = {    # what it means if the released logits are lost with nothing in the trace
    "logits of odd": "the trace is right, or `trace` gives nothing of it: what it does not show "
                     "(longer texts, lm_head), or let it give more",
    "logits of official": "the other model is right: how this folder is stored (text_config, "
                          "language_model. before the names, MXFP4 experts, A_log padded)",
    "padded batch": "single texts are right: padding on the left, in every kind of layer",
    "token after it": "all is right at once: the state that `forward` gives back, or the mask "
                      "with it",
}


def likely(results: list[Result]) -> list[Result]:
    """At most MOST failed probes, each of which explains all failures, the most telling first.
    None if there are several mistakes, or a new one."""
    failed = [r for r in results if r.status == "failed"]
    base = next((r for r in failed if r.number == 0), None)
    largest = max((r.error for r in failed if r.error < float("inf")), default=0.0)
    numbers = {r.number for r in failed if r.error > ECHO * largest}
    implied = lambda r: {*pitfall(r).implies, r.number}
    causes = [r for r in failed if r.number and numbers <= implied(r) and fits(r, base)]
    causes = [r for r in causes if r.error == float("inf")] or causes
    most = max((r.error for r in causes), default=0.0)
    causes = [r for r in causes if r.error >= most / FAR]
    return sorted(causes, key=lambda r: (len(implied(r)), -r.error))[:MOST]


def fits(r: Result, base: Result | None) -> bool:
    """Can the pitfall of `r` make the released model lose equality where, and as much as, it
    does?"""
    p = pitfall(r)
    if base is None:
        return True
    if base.first is None:                  # the port stops there
        return p.number in (1, 37) and base.message.startswith("load")
    if base.first < ROUNDING and r.error < ROUNDING:
        return False
    key = lost_at(base)
    if not key:                             # logits that are no numbers fit nothing
        return base.first < float("inf") or "padded" in base.message
    return key.split(".")[-1] in p.begins and (not p.faint or base.first < FAINT)


def lost_at(base: Result) -> str:
    """The entry of the trace where the released model is lost, or "" if it is not there."""
    key = re.split("[ :]", base.message)[0]
    return key if known(key) else ""


def pitfall(result: Result) -> Pitfall:
    return [BASE, *PITFALLS][result.number]


def describe(results: list[Result]) -> str:
    """Where the released model is lost, the likely causes, the other failures, what was not
    checked, and the count."""
    failed, causes = [r for r in results if r.status == "failed"], likely(results)
    paragraphs = [beginning(r) for r in failed if r.number == 0]
    paragraphs += [finding(r) for r in causes]
    compared = [r for r in failed if r.first is not None]
    if compared and not causes:
        paragraphs.append("None of the forty mistakes explains these failures: it is another one, "
                          "or there are several.")
    paragraphs += others([r for r in compared if r not in causes and r.number], bool(causes))
    paragraphs += without_a_number([r for r in results if r not in causes])
    by_hand = [f"{r.number} {pitfall(r).name}" for r in results if r.status == "by reading"]
    if by_hand:
        paragraphs.append(fill(f"by reading, see --list: {'; '.join(by_hand)}"))
    counts = {s: sum(r.status == s for r in results) for s in STATUSES}
    paragraphs.append(", ".join(f"{n} {s}" for s, n in counts.items() if n))
    return "\n\n".join(paragraphs)


def others(failed: list[Result], also: bool) -> list[str]:
    """The other failures, the largest first, if there are any."""
    failed = sorted(failed, key=lambda r: -r.error)
    lines = [f"{r.error:8.1e}  {r.number:2} {pitfall(r).name}" for r in failed[:LISTED]]
    lines += [fill("and " + numbered(failed[LISTED:]), " " * 10)] if failed[LISTED:] else []
    return ["\n".join(["Also failed:" if also else "Failed:", *lines])] if lines else []


def without_a_number(results: list[Result]) -> list[str]:
    """A line for all probes that stop with the same message, or are not checked for the same
    reason; if the released model stops, one for all that stop."""
    failed = [r for r in results if r.status == "failed" and r.first is None]
    stops = failed and failed[0].number == 0
    lines = [fill(f"stop, too: {numbered(failed[1:])}")] if stops and failed[1:] else []
    rest = [r for r in results if r.status == "not checked" or r in failed and not stops]
    for status, message in dict.fromkeys((r.status, r.message) for r in rest):
        same = [r for r in rest if (r.status, r.message) == (status, message)]
        lines.append(fill(f"{status}: {numbered(same)}: {message}"))
    return lines


def numbered(results: list[Result]) -> str:
    """Their numbers, with their names if they are few."""
    return ", ".join(f"{r.number} {pitfall(r).name}" if len(results) < 4 else str(r.number)
                     for r in results)


def beginning(r: Result) -> str:
    """A paragraph on where the released model is lost."""
    if r.first is None:
        return fill(f"STOPS with the released model: {r.message}")
    key = lost_at(r)
    lines = [place(key)] if key else [x for k, x in BEYOND_TRACE.items() if k in r.message]
    if r.first < ROUNDING:
        lines.append("as small as rounding in float32; a port that computes in it needs "
                     "--dtype float32")
    head = f"Equality with the released model is lost at {r.message}; error {r.first:.1e}"
    return "\n".join([fill(head), *(fill(line, "    ") for line in lines)])


def finding(r: Result) -> str:
    """A paragraph on one failed probe."""
    p = pitfall(r)
    lines = [f"FAILED {r.number}: {p.name}",
             f"found: {r.message}; error {r.error:.1e}, allowed {r.tolerance:.0e}",
             f"likely: {p.cause}", f"look at: {p.look_at}", f"reported: {p.report}"]
    return "\n".join([lines[0], *(fill(line, "    ") for line in lines[1:])])


def fill(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 88, initial_indent=indent, subsequent_indent=indent + "    ",
                         break_long_words=False, break_on_hyphens=False)


def listing() -> str:
    """All pitfalls, a paragraph each."""
    parts = [f"{p.number:2} {p.name}\n" + "\n".join(fill(line, "   ") for line in (
        f"symptom: {p.symptom}", f"cause: {p.cause}", f"look at: {p.look_at}",
        f"probe: {p.probe}", p.report)) for p in PITFALLS]
    return "\n\n".join(parts)
