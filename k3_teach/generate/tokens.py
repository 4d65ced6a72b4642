"""Going on from a prompt, token by token.

    prefill   read the whole prompt in one pass, or in pieces: the cache fills
    decode    draw a token of the last logits, hand it out, read it, and again

A token is handed out before it is read: whoever stops has paid for nothing that was not
asked for, and the cache has then seen the prompt and all new tokens but the newest.

Shapes: B rows, T tokens of the prompt, V tokens of the vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral

import torch
from torch import Tensor

from k3_teach.cache import Cache
from k3_teach.config import K3Config
from k3_teach.errors import InputError, shown
from k3_teach.generate.sampling import (
    check_logits, check_sampling, draw, generators, sampling_law)
from k3_teach.model import K3Model
from k3_teach.validate import check_cache, check_ids, check_mask

STOPPED = -1        # in place of a token of a row that has come to its end


def generate(model: K3Model, ids: Tensor, max_new_tokens: int, *,
             temperature: float = 1.0, top_k: int | None = None,
             top_p: float | None = None, seed=None,
             stop: int | Iterable[int | Sequence[int]] = (),
             attention_mask: Tensor | None = None, cache: Cache | None = None,
             prefill_chunk: int | None = None) -> Iterator[Tensor]:
    """Continue ids [B,T]: yields int64 [B], a token for each row, max_new_tokens times.

    temperature, top_k, top_p: see `sampling_law`; seed: see `generators`.
    stop: token ids, and sequences of them, that end a row. The last token of what ended
        it is still yielded, and STOPPED (-1) from then on; when all rows have ended, so
        does the iterator. Sequences are looked for in the tokens of this call.
    attention_mask [B, cached + T]: False at padding, on the left (see `pad_left`).
    cache: of the tokens before ids. After each step it has seen ids and all tokens
        yielded but the newest, also if the iterator is left early: to go on, give that
        newest token as ids, the same cache, and as seed the generators that you gave.
        A row that has ended reads padding; leave it out by `cache.reorder`.
    prefill_chunk: read ids in pieces of so many tokens, for less memory at once.

    InputError at once for what cannot be meant, and while it runs for logits that are
    not numbers; then the cache is as it was before that step.
    """
    check_sampling(temperature, top_k, top_p)
    check_ids(ids, model.config.vocab_size)
    _check_counts(model, max_new_tokens, prefill_chunk)
    cache = _check_cache(model, ids, attention_mask, cache)
    check_room(model.config, len(cache), ids.shape[1], max_new_tokens)
    ends, chances = _endings(stop, model.config.vocab_size), generators(seed, len(ids))

    def choose(logits: Tensor, row: int) -> int:
        return draw(sampling_law(logits, temperature, top_k, top_p), chances[row])

    return _steps(model, ids, max_new_tokens, choose, ends, attention_mask, cache,
                  prefill_chunk)


def _steps(model, ids, max_new_tokens, choose, ends, mask, cache, chunk):
    """The loop of `generate`. choose(logits [V], row) -> a token."""
    rows, padding = range(len(ids)), model.config.pad_token_id or 0
    said, ended = [[] for _ in rows], [False for _ in rows]
    for step in range(max_new_tokens):
        if all(ended):
            return
        with _or_as_before(cache):
            place = f" for new token {step + 1}"
            logits = read(model, ids, cache, mask, chunk, place)        # [B, V]
            tokens = [STOPPED if ended[row] else choose(logits[row], row)
                      for row in rows]
        for row, token in enumerate(tokens):
            said[row].append(token)
            ended[row] = ended[row] or any(said[row][-len(e):] == e for e in ends)
        newest = torch.tensor(tokens, device=ids.device)
        yield newest                                                    # [B]
        ids = newest.where(newest != STOPPED, padding)[:, None]         # [B, 1]
        mask, chunk = None, None        # the cache knows where padding was


def read(model: K3Model, ids: Tensor, cache: Cache, mask: Tensor | None = None,
         chunk: int | None = None, place: str = "") -> Tensor:
    """The logits [B,V] after ids [B,T], read in pieces of `chunk` tokens.

    InputError for logits that are not numbers, with `place` to say where.
    """
    for piece in ids.split(chunk or ids.shape[1], dim=1):
        end = len(cache) + piece.shape[1]
        so_far = None if mask is None else mask[:, :end]
        logits = model(piece, attention_mask=so_far, cache=cache)[:, -1]
    check_logits(logits, place)
    return logits


@contextmanager
def _or_as_before(cache: Cache):
    """If the block inside fails or is interrupted, the cache forgets what it read."""
    before = cache.snapshot()
    try:
        yield
    except BaseException:
        cache.rollback(before)
        raise


def pad_left(prompts: Sequence[Sequence[int]], padding: int = 0
             ) -> tuple[Tensor, Tensor | None]:
    """Prompts of any length as ids [B,T] and mask [B,T]; None if nothing is padding.

    On the left, so that all rows end together, where the next token is to come.
    """
    tokens = isinstance(prompts, Sequence) and all(isinstance(p, Sequence) for p in prompts)
    tokens = tokens and all(_is_token(t) for p in (*prompts, [padding]) for t in p)
    if not tokens:
        raise InputError("prompts must be lists of token ids, and padding a token id")
    T = max(map(len, prompts), default=0)
    ids = torch.tensor([[padding] * (T - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[i >= T - len(p) for i in range(T)] for p in prompts])
    return ids, None if mask.all() else mask


# --- what cannot be meant -------------------------------------------------------------

def _is_token(x) -> bool:
    return isinstance(x, Integral) and not isinstance(x, bool) and 0 <= x < 2 ** 31


def _check_counts(model, max_new_tokens, prefill_chunk) -> None:
    chunk = 1 if prefill_chunk is None else prefill_chunk
    for name, value, least in (("max_new_tokens", max_new_tokens, 0),
                               ("prefill_chunk", chunk, 1)):
        if not _is_token(value) or value < least:
            raise InputError(f"{name} is {shown(value)}; it must be an integer of at least "
                             f"{least}, below 2^31")
    check_evaluating(model)


def check_evaluating(model) -> None:
    """InputError for a model in training mode."""
    if getattr(model, "training", False):
        raise InputError("the model is in training mode, where a balancer counts what "
                         "experts get; call model.eval() first")


def _check_cache(model, ids, mask, cache) -> Cache:
    """The cache, or a new one, if it and the mask fit the model and ids."""
    if cache is None:
        cache = model.new_cache(len(ids))
    layers = range(model.config.num_hidden_layers)
    check_cache(cache, [model.config.is_kda(i) for i in layers])
    if cache.batch_size != len(ids):
        raise InputError(f"the cache holds {cache.batch_size} rows; ids has {len(ids)}")
    if mask is not None:
        mask = check_mask(mask, ids, len(cache), cache.mask, True)
    if mask is not None and not bool(mask[:, -1].all()):
        row = (~mask[:, -1]).nonzero()[0].item()
        raise InputError(f"row {row} of attention_mask is all padding; "
                         "a prompt needs a real token")
    return cache


def check_room(c: K3Config, cached: int, prompt: int, new: int) -> None:
    """InputError unless all tokens, padding included, fit in the length that the
    configuration states."""
    if cached + prompt + new > c.max_position_embeddings:
        raise InputError(f"{cached} tokens in the cache, {prompt} of the prompt and "
                         f"{new} new ones are {cached + prompt + new}; the model takes "
                         f"at most {c.max_position_embeddings} "
                         "(max_position_embeddings)")


def _endings(stop, vocab_size: int) -> list[list[int]]:
    """Every ending as a list of tokens."""
    several = isinstance(stop, Iterable) and not isinstance(stop, Tensor)
    ends = list(stop) if several else [[stop]]
    ends = [[e] if isinstance(e, Integral) else e for e in ends]
    for e in ends:
        ids = isinstance(e, Sequence) and all(isinstance(t, Integral) for t in e)
        if not ids or not e or not all(0 <= t < vocab_size for t in e):
            raise InputError(f"stop holds {shown(e)}; it must be token ids from 0 to "
                             f"{vocab_size - 1}, or sequences of them, not empty")
    return [list(map(int, e)) for e in ends]
