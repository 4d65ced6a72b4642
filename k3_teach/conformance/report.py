"""What the command prints: which probes failed, and what mistake that points to.

A wrong equation fails many probes, for many models have it. A failed probe is likely the cause
if it implies all others that failed; of several, that which implies the fewest, then that with
the largest error, comes first.
"""

import textwrap

from k3_teach.conformance.kit import BASE, PITFALLS, Result

MOST = 4        # likely causes that are told at length
FAR = 100       # one whose own model is less off, by this factor, than another's is not told
STATUSES = ("passed", "failed", "not checked", "by reading")


def likely(results: list[Result]) -> list[Result]:
    """At most MOST failed probes, each of which explains all failures, the most telling first.
    None if there are several mistakes, or a new one."""
    failed = [r for r in results if r.status == "failed"]
    numbers = {r.number for r in failed}
    implied = lambda r: {*pitfall(r).implies, r.number}
    causes = [r for r in failed if numbers <= implied(r)]
    most = max((r.error for r in causes), default=0.0)
    causes = [r for r in causes if r.error >= most / FAR]
    return sorted(causes, key=lambda r: (len(implied(r)), -r.error))[:MOST]


def pitfall(result: Result):
    return [BASE, *PITFALLS][result.number]


def describe(results: list[Result]) -> str:
    """The likely causes, then the other failures, what was not checked, and the count."""
    failed, causes = [r for r in results if r.status == "failed"], likely(results)
    paragraphs = [finding(r) for r in causes]
    if failed and not causes:
        paragraphs.append("No single one of the pitfalls explains these failures: there are "
                          "several, or it is another mistake.")
    paragraphs += [f"Equality with the released model is lost first at: {r.message}"
                   for r in failed if r.number == 0]
    others = sorted((r for r in failed if r not in causes and r.number), key=lambda r: -r.error)
    if others:
        lines = [f"{r.error:8.1e}  {r.number:2} {pitfall(r).name}" for r in others]
        paragraphs.append("\n".join(["Also failed:" if causes else "Failed:", *lines]))
    rest = [r for r in results if r.status in ("not checked", "by reading")]
    paragraphs += [fill(f"{r.status}: {r.number} {pitfall(r).name}: {r.message}") for r in rest]
    counts = {s: sum(r.status == s for r in results) for s in STATUSES}
    paragraphs.append(", ".join(f"{n} {s}" for s, n in counts.items() if n))
    return "\n\n".join(paragraphs)


def finding(r: Result) -> str:
    """A paragraph on one failed probe."""
    p = pitfall(r)
    lines = [f"FAILED {r.number}: {p.name}",
             f"found: {r.message}; error {r.error:.1e}, allowed {r.tolerance:.0e}",
             f"likely: {p.cause}", f"look at: {p.look_at}"]
    lines += [f"reported: {p.report}"] if p.report else []
    return "\n".join([lines[0], *(fill(line, "    ") for line in lines[1:])])


def fill(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 96, initial_indent=indent, subsequent_indent=indent + "    ",
                         break_long_words=False, break_on_hyphens=False)


def listing() -> str:
    """All pitfalls, a paragraph each."""
    parts = [f"{p.number:2} {p.name}\n" + "\n".join(fill(line, "   ") for line in (
        f"symptom: {p.symptom}", f"cause: {p.cause}", f"probe: {p.probe}", p.report))
        for p in PITFALLS]
    return "\n\n".join(parts)
