"""Deliberate mistakes: K3's pitfalls, made in this package for as long as a block runs.

`MISTAKES` has them in the order of a tour. Each names its pitfall by the number in
`k3_teach.conformance.PITFALLS`, whose probe must catch it; 0 is none of the forty, and
equality with the released model must catch it.
"""

from k3_teach.conformance.mistakes import depth, experts, files, kda, mla, others, serving
from k3_teach.conformance.mistakes.mistake import Edit, Mistake

MISTAKES = [*files.MISTAKES, *kda.MISTAKES, *serving.MISTAKES, *mla.MISTAKES,
            *depth.MISTAKES, *experts.MISTAKES, *others.MISTAKES]
