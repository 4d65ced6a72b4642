"""Speculative decoding: a small model drafts, the model itself decides.

    keep the draft x ~ q with probability min(1, p(x) / q(x))
    else take a token of      r(x) = (p(x) - q(x))_+ / sum_v (p(v) - q(v))_+

p is the target's law of the next token and q the draft's (Leviathan et al. 2022, arXiv
2211.17192; Chen et al. 2023, arXiv 2302.01318). The token has the law p, whatever q is:
x is drafted and kept with probability q(x) min(1, p(x)/q(x)) = min(p(x), q(x)), and a
rejection, of probability 1 - sum_v min(p, q) = sum_v (p - q)_+, adds (p(x) - q(x))_+.

One pass of the target gives the laws after each of m drafts, so that one reading of its
weights yields up to m + 1 tokens. After the first rejection the later drafts are void:
their laws were asked for behind another token. The caches then go back to a snapshot
and read what was kept once more, for a KDA state cannot forget a token.

Shapes: m drafts, V tokens of the vocabulary, T tokens so far. Laws are float [..., V],
not negative, of sum 1.
"""

import torch
from torch import Tensor

from k3_teach.cache import Cache, Snapshot
from k3_teach.errors import InputError, shown
from k3_teach.generate.sampling import check_sampling, draw, generators, sampling_law
from k3_teach.generate.tokens import check_evaluating, check_room
from k3_teach.model import K3Model
from k3_teach.validate import check_ids


def _check_laws(p: Tensor, q: Tensor) -> None:
    """InputError unless both are laws over the same vocabulary."""
    for name, law in (("p", p), ("q", q)):
        if law.ndim < 1 or not law.is_floating_point() or law.shape[-1] != p.shape[-1]:
            got = f"{law.dtype} of shape {list(law.shape)}"
            raise InputError(f"{name} is {got}; it must be a float [..., V], and V the "
                             "same in p and q")
        off = (law.double().sum(-1) - 1).abs()
        if law.numel() and not (bool((law >= 0).all()) and bool((off < 1e-2).all())):
            low = float(law.min())
            raise InputError(f"{name} has the least value {low:.3g} and a sum that is "
                             f"{float(off.max()):.3g} off; it must be a law: not "
                             "negative, of sum 1")


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """sum_v min(p_v, q_v), how often a draft of q is kept: [..., V] -> [...].

    It is 1 less the distance of the laws in total variation (arXiv 2211.17192, 3.2).
    """
    _check_laws(p, q)
    return torch.minimum(p, q).sum(-1)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """(p - q)_+ / sum (p - q)_+, the law after a rejection: [..., V] -> [..., V].

    What p still lacks when min(p, q) has been given. For p = q nothing is rejected and
    nothing lacks; then it is p.
    """
    _check_laws(p, q)
    lack = (p - q).clamp_min(0)
    total = lack.sum(-1, keepdim=True)
    return torch.where(total > 0, lack / total.where(total > 0, 1), p)


def coin(chance: float, generator: torch.Generator | None = None) -> bool:
    """True with probability `chance`."""
    return float(torch.rand((), dtype=torch.float64, generator=generator)) < chance


def accept(p: Tensor, q: Tensor, drafts: Tensor,
           generator: torch.Generator | None = None) -> tuple[int, int]:
    """How many drafts are kept, and the token after them (arXiv 2211.17192, alg. 1).

    p [m+1, V], the target's laws at the m drafts and after them; q [m, V], the laws the
    drafts were drawn from; drafts int64 [m]. If all are kept, the token is one of the
    target's last law, free of charge. InputError for other shapes, for what is not a
    law, and for a draft that its q cannot have drawn.
    """
    m = len(drafts)
    if drafts.ndim != 1 or p.shape[:-1] != (m + 1,) or q.shape[:-1] != (m,):
        got = [list(x.shape) for x in (p, q, drafts)]
        raise InputError(f"p, q, drafts have the shapes {got}; they must be [m+1, V], "
                         "[m, V] and [m]")
    _check_laws(p, q)
    for i, x in enumerate(drafts.tolist()):
        if not 0 <= x < q.shape[-1] or q[i, x] <= 0:
            raise InputError(f"draft {i} is {x}; its q gives that token no probability")
        if not coin(min(1.0, float(p[i, x]) / float(q[i, x])), generator):
            return i, draw(residual(p[i], q[i]), generator)
    return m, draw(p[m], generator)


def expected_tokens(rate: float, drafts: int) -> float:
    """1 + a + ... + a^m = (1 - a^(m+1)) / (1 - a), the tokens from one verification.

    rate a: the chance that a draft is kept, taken as the same for each and independent
    (arXiv 2211.17192, eq. 1); drafts m. For a = 1 it is m + 1. InputError outside.
    """
    if not 0 <= rate <= 1 or drafts < 0:
        raise InputError(f"rate is {rate} and drafts {drafts}; they must be "
                         "from 0 to 1 and at least 0")
    return float(sum(rate ** i for i in range(drafts + 1)))


# --- with two models ------------------------------------------------------------------

def _catch_up(model: K3Model, cache: Cache, ids: Tensor) -> Snapshot:
    """Feed what `cache` has not seen of ids [1,T], but the last; a snapshot there."""
    unseen = ids[:, len(cache):-1]
    if unseen.shape[1]:
        model(unseen, cache=cache)
    return cache.snapshot()


def propose(model: K3Model, cache: Cache, ids: Tensor, drafts: int, law,
            generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Continue ids [1,T] one by one; the cache has seen all but the last token.

    law: logits [..., V] -> laws [..., V]. -> the drafts int64 [m], and the laws [m, V]
    that they were drawn from.
    """
    laws, tokens, newest = [], [], ids[:, -1:]
    for _ in range(drafts):
        laws.append(law(model(newest, cache=cache)[0, -1]))
        tokens.append(draw(laws[-1], generator))
        newest = ids.new_tensor([[tokens[-1]]])
    V = model.config.vocab_size
    empty = torch.zeros(0, V, dtype=torch.float64, device=ids.device)
    return ids.new_tensor(tokens), torch.stack(laws) if laws else empty


def speculate(target: K3Model, draft: K3Model, ids: Tensor, num_tokens: int,
              drafts: int, temperature: float = 1.0, seed=None,
              top_k: int | None = None, top_p: float | None = None
              ) -> tuple[Tensor, int]:
    """Continue ids [1,T] by num_tokens of the target's own law, whatever the draft.

    -> ids int64 [1, T + num_tokens], and how often the target verified. The law is
    `sampling_law` of temperature, top_k and top_p, for the target and for the draft;
    seed: an integer or a torch.Generator, see `generators`. Without drafts the text is
    that of `generate`, with them another of the same law.

    A verification reads m + 1 tokens and yields 1 to m + 1; the last ones draft fewer,
    so that none is thrown away. After a rejection both caches roll back and read again
    what was kept: a pass more of the target, which is not counted. Models in evaluation
    mode. InputError for other shapes, counts below 0, options out of range, a text that
    is longer than either model takes, and different vocabularies.
    """
    _check_call(target, draft, ids, num_tokens, drafts)
    check_sampling(temperature, top_k, top_p)
    generator = generators(seed, 1)[0]

    def law(logits: Tensor) -> Tensor:
        return sampling_law(logits, temperature, top_k, top_p)

    cache, draft_cache = target.new_cache(), draft.new_cache()
    end, verifications = ids.shape[1] + num_tokens, 0
    while ids.shape[1] < end:
        point = _catch_up(target, cache, ids)
        draft_point = _catch_up(draft, draft_cache, ids)
        m = min(drafts, end - ids.shape[1] - 1)
        x, q = propose(draft, draft_cache, ids, m, law, generator)
        logits = target(torch.cat((ids[:, -1:], x[None]), 1), cache=cache)  # [1,m+1,V]
        verifications += 1
        kept, token = accept(law(logits[0]), q, x, generator)
        if kept < m:
            cache.rollback(point)
            draft_cache.rollback(draft_point)
        new = torch.cat((x[:kept], x.new_tensor([token])))
        ids = torch.cat((ids, new[None]), 1)
    return ids, verifications


def speculate_greedy(target: K3Model, draft: K3Model, ids: Tensor, num_tokens: int,
                     drafts: int) -> tuple[Tensor, int]:
    """`speculate` at temperature 0: the target's most likely tokens, one by one.

    A draft is kept where it is the target's own choice.
    """
    return speculate(target, draft, ids, num_tokens, drafts, temperature=0)


def _check_call(target, draft, ids, num_tokens, drafts) -> None:
    for name, model in (("target", target), ("draft", draft)):
        if not hasattr(model, "config"):
            raise InputError(f"{name} is {shown(model)}; it must be a K3Model")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or len(ids) != 1 or not ids.numel():
        shape = list(ids.shape) if isinstance(ids, Tensor) else shown(ids)
        raise InputError(f"ids has the shape {shape}; it must be [1, T], and T at least 1")
    check_ids(ids, target.config.vocab_size, values=True)
    for name, value in (("num_tokens", num_tokens), ("drafts", drafts)):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2 ** 31:
            raise InputError(f"{name} is {shown(value)}; "
                             "it must be an integer of at least 0, below 2^31")
    sizes = [model.config.vocab_size for model in (target, draft)]
    if sizes[0] != sizes[1]:
        raise InputError(f"target and draft know {sizes} tokens; they must share one "
                         "vocabulary")
    for model in target, draft:
        check_evaluating(model)
        check_room(model.config, 0, ids.shape[1], num_tokens)
