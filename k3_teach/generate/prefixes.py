"""A beginning that many prompts share is read once.

An MLA cache can be cut back to any length, a KDA state to none: it is a sum over all
tokens so far. So states are kept at stored points, every few tokens and at the end, and
a new prompt begins at the last of them up to which it says the same.
"""

from torch import Tensor

from k3_teach.cache import Cache, Snapshot
from k3_teach.errors import InputError, shown
from k3_teach.generate.tokens import check_room, read
from k3_teach.model import K3Model
from k3_teach.validate import check_ids


class Prefixes:
    """What the last `most` prompts have left behind, at every `every` tokens of each.

    A prompt keeps one cache; a point in it adds the KDA states of that moment, and for
    MLA only a length. Give `start` every new prompt, and its result to `generate`.
    """

    def __init__(self, model: K3Model, every: int = 64, most: int = 8):
        for name, value in (("every", every), ("most", most)):
            if not isinstance(value, int) or value < 1:
                raise InputError(f"{name} is {shown(value)}; it must be a positive integer")
        if not hasattr(model, "config"):
            raise InputError(f"model is {shown(model)}; it must be a K3Model")
        self.model, self.every, self.most = model, every, most
        self.seen: list[tuple[list[int], Cache, list[Snapshot]]] = []     # newest first

    def start(self, ids: Tensor) -> tuple[Cache, Tensor]:
        """A cache that has seen ids [1,T] but its last token, and that token [1,1].

        Only what comes after the stored point is read; the new points are stored. The
        cache is the caller's own. InputError for ids that are no such prompt.
        """
        check_ids(ids, self.model.config.vocab_size, values=True)
        if len(ids) != 1:
            raise InputError(f"ids has {len(ids)} rows; it must be [1, T]")
        check_room(self.model.config, 0, ids.shape[1], 0)
        tokens, end = ids[0].tolist(), ids.shape[1] - 1
        cache, points = self._longest(tokens)
        while len(cache) < end:
            stop = min(len(cache) // self.every * self.every + self.every, end)
            read(self.model, ids[:, len(cache):stop], cache)
            points = [*points, cache.snapshot()]
        if points:
            self._store(tokens[:end], cache.copy(), points)
        return cache, ids[:, end:]

    def stored(self, ids: Tensor) -> int:
        """How many tokens of ids [1,T] `start` would not have to read."""
        check_ids(ids, self.model.config.vocab_size, values=True)
        return len(self._longest(ids[0].tolist())[0])

    def nbytes(self) -> int:
        """Bytes that are kept: of a prompt its MLA rows, of a point its KDA states."""
        tensors = [t for _, cache, _ in self.seen for s in cache.states
                   for t in s.tensors()]
        states = [saved for _, _, points in self.seen for at in points
                  for saved in at.states if isinstance(saved, tuple)]       # of KDA
        tensors += [t for S, taps in states for t in (S, *taps)]
        return sum({t.data_ptr(): t.nbytes for t in tensors}.values())      # each once

    def _longest(self, tokens: list[int]) -> tuple[Cache, list[Snapshot]]:
        """A copy of the cache at the last point that fits, and the points up to it."""
        best, points, source = 0, [], None
        for text, cache, stored in self.seen:
            same = _common(text, tokens[:-1])
            fits = [p for p in stored if p.length <= same]
            if fits and fits[-1].length > best:
                best, points, source = fits[-1].length, fits, cache
        if source is None:
            return self.model.new_cache(), []
        return _copy_at(source, points[-1]), points

    def _store(self, tokens: list[int], cache: Cache, points: list[Snapshot]) -> None:
        """In front; what it continues or repeats is dropped, and the oldest."""
        others = [s for s in self.seen if s[0] != tokens[:len(s[0])]]
        self.seen = [(tokens, cache, points), *others][:self.most]


def _common(a: list[int], b: list[int]) -> int:
    """With how many equal tokens both begin."""
    differ = (i for i, (x, y) in enumerate(zip(a, b)) if x != y)
    return next(differ, min(len(a), len(b)))


def _copy_at(cache: Cache, point: Snapshot) -> Cache:
    """An independent cache as `cache` was at that point."""
    new = cache.copy()
    for state, saved in zip(new.states, point.states):
        state.restore(saved)
    new.length, new.mask = point.length, point.mask
    return new
