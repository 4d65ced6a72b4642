"""Does a port of Kimi K3 compute what the release computes, and if not, which of forty known
mistakes is it? `python -m k3_teach.conformance my_port:adapter` tells.

`pitfalls.toml` lists the mistakes, `models` the special models that show them, `probes_math`
and `probes_use` how they are looked for; `reference` is K3 once more in NumPy, from which
the expected values come; `adapters` says what a port must bring, `trace` what of its inside
is compared, and `report` what is concluded.
"""

from k3_teach.conformance.adapters import k3_teach, k3_teach_float32, written_out
from k3_teach.conformance.kit import PITFALLS, Pitfall, Result, run
from k3_teach.conformance.report import describe
