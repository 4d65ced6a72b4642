"""Text from a model: which law, which token, which letters, and what is read only once.

`sampling` makes a law of logits and draws from it, `tokens` goes on token by token,
`text` does so with strings, `prefixes` keeps what beginnings have left behind.

`k3_teach.generate` is two things: the function, after `import k3_teach`, and this
package, in `from k3_teach.generate import ...` and `python -m k3_teach.generate`.
"""

from k3_teach.generate.prefixes import Prefixes
from k3_teach.generate.sampling import draw, generators, sampling_law
from k3_teach.generate.text import complete
from k3_teach.generate.tokens import generate, pad_left

__all__ = ["Prefixes", "complete", "draw", "generate", "generators", "pad_left",
           "sampling_law"]
