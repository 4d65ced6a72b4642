"""Two tasks that ask what a model can find again: associative recall and copying.

    mqar      k3 v1 k7 v4 k1 v4 | k7 k3 k1       asked at the last three: v4 v1 v4
    copying   a c a d COPY a c a                 asked from COPY on: a c a d

Every text is new, so nothing can be learned by heart: what is asked stands in the text, once.
Attention keeps a record of each token; a state of fixed size must hold all pairs, or the whole
string, in the same numbers. A model that has no idea of places cannot tell which value followed
which key, whatever it keeps.

`targets` is -100, which `torch.nn.functional.cross_entropy` leaves out, where nothing is asked.
Shapes: B batch, T tokens.
"""

import torch
from torch import Tensor

from k3_teach.errors import InputError

NOTHING = -100      # the target of a token at which nothing is asked


def mqar(batch: int, pairs: int, queries: int, keys: int, values: int,
         generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Multi-query associative recall: which value followed this key? (Zoology, Arora et al.,
    arXiv 2312.04927; there the queries stand apart, with gaps that follow a power law.)

    `pairs` different keys, each followed by a value; then `queries` of these keys, each at
    most once. A value may follow several keys.
    -> ids, targets [batch, 2 pairs + queries]. Keys are the ids below `keys`, values the next
    `values` ids; the target at a query is the id of its value. InputError for numbers that
    make no such text.
    """
    at_least_one(batch=batch, pairs=pairs, queries=queries, keys=keys, values=values)
    if pairs > keys:
        raise InputError(f"pairs is {pairs}; there are only {keys} keys")
    if queries > pairs:
        raise InputError(f"queries is {queries}; each of {pairs} pairs is asked at most once")
    key = some_of(keys, pairs, batch, generator)                        # [B, pairs]
    value = keys + torch.randint(values, (batch, pairs), generator=generator)
    asked = some_of(pairs, queries, batch, generator)                   # [B, queries]
    shown = torch.stack((key, value), 2).flatten(1)                     # [B, 2 pairs]
    ids = torch.cat((shown, key.gather(1, asked)), 1)
    targets = torch.cat((torch.full_like(shown, NOTHING), value.gather(1, asked)), 1)
    return ids, targets


def copying(batch: int, length: int, alphabet: int, generator: torch.Generator
            ) -> tuple[Tensor, Tensor]:
    """Say a string of random symbols once more (Jelassi et al., arXiv 2402.01032).

    The string, the id `alphabet`, which means COPY, and the string again but for its last
    symbol -> ids, targets [batch, 2 length]. From COPY on, the target is the next symbol; what
    stands before it is always right, whatever the model would have said. InputError for
    numbers below 1.
    """
    at_least_one(batch=batch, length=length, alphabet=alphabet)
    string = torch.randint(alphabet, (batch, length), generator=generator)
    copy = torch.full((batch, 1), alphabet)
    ids = torch.cat((string, copy, string[:, :-1]), 1)
    return ids, torch.cat((torch.full_like(string, NOTHING), string), 1)


def share_right(logits: Tensor, targets: Tensor) -> float:
    """The share of the asked tokens whose largest logit is the target's.

    logits [B,T,vocab], targets [B,T] -> a number between 0 and 1.
    """
    asked = targets != NOTHING
    return (logits[asked].argmax(-1) == targets[asked]).double().mean().item()


def some_of(total: int, number: int, batch: int, generator: torch.Generator) -> Tensor:
    """`number` different integers below `total`, in random order: [batch, number].

    Drawn in float32, so that a seed gives the same ones in any default precision.
    """
    drawn = torch.rand(batch, total, generator=generator, dtype=torch.float32)
    return drawn.argsort(1)[:, :number]


def at_least_one(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise InputError(f"{name} is {number}; it must be at least 1")
