"""What decoding keeps: a fixed-size state for every KDA layer, one narrow row per token for every MLA layer.

A cache can be copied, reordered (for beam search), and rolled back to a snapshot. It cannot be cut back to an arbitrary
length: the KDA state is a sum over all tokens so far, and no token can be taken out of it again.
"""

import torch
from torch import Tensor

from k3_teach.errors import InputError

GROWTH = 256  # rows by which a LatentCache grows at least


class KDAState:
    """`S` [B,H,K,V] in float32 and the last inputs `taps` of the three convolutions, [B,W-1,P] each. None: nothing seen.

    A layer replaces both and never writes into them, so a reference is a snapshot.
    """

    def __init__(self, S: Tensor | None = None, taps: tuple[Tensor, Tensor, Tensor] | None = None):
        self.S, self.taps = S, taps

    def copy(self) -> "KDAState":
        return KDAState(self.S, self.taps)

    def reorder(self, rows: Tensor) -> None:
        if self.S is not None:
            self.S, self.taps = self.S[rows], tuple(t[rows] for t in self.taps)

    def snapshot(self):
        return self.S, self.taps

    def restore(self, saved) -> None:
        self.S, self.taps = saved

    def tensors(self) -> list[Tensor]:
        return [] if self.S is None else [self.S, *self.taps]


class LatentCache:
    """Rows [B, length, width], one per token, in a buffer that grows by at least half, so that appending stays cheap."""

    def __init__(self):
        self.buffer: Tensor | None = None
        self.length = 0

    def __len__(self) -> int:
        return self.length

    def append(self, rows: Tensor) -> Tensor:
        """Add rows [B,T,width]; return all rows so far [B,length,width], as a view."""
        end = self.length + rows.shape[1]
        if self.buffer is None or end > self.buffer.shape[1]:
            room = max(end, GROWTH, self.length * 3 // 2)
            grown = rows.new_empty(rows.shape[0], room, rows.shape[2])
            if self.length:
                grown[:, :self.length] = self.rows
            self.buffer = grown
        self.buffer[:, self.length:end] = rows
        self.length = end
        return self.rows

    @property
    def rows(self) -> Tensor:
        return self.buffer[:, :self.length]

    def copy(self) -> "LatentCache":
        new = LatentCache()
        new.length = self.length
        new.buffer = None if self.buffer is None else self.rows.clone()
        return new

    def reorder(self, order: Tensor) -> None:
        if self.buffer is not None:
            self.buffer = self.rows[order]

    def snapshot(self) -> int:
        return self.length

    def restore(self, length: int) -> None:
        self.length = length

    def tensors(self) -> list[Tensor]:
        return [] if self.buffer is None else [self.rows]


class Snapshot:
    """A point to which a cache can be rolled back. Made by `Cache.snapshot`."""

    def __init__(self, owner: object, length: int, rollbacks: int, mask: Tensor | None, states: list):
        self.owner, self.length, self.rollbacks, self.mask, self.states = owner, length, rollbacks, mask, states


class Cache:
    """One state per layer, and which of the tokens so far are padding."""

    def __init__(self, states: list, batch_size: int):
        self.states, self.batch_size = states, batch_size
        self.length = 0
        self.mask: Tensor | None = None      # [B, length], False at padding; None: no padding so far
        self._owner = object()               # a snapshot is good for one cache in one order of rows
        self._cut: list[int] = []            # the lengths to which this cache was rolled back

    def __len__(self) -> int:
        """Tokens so far, padding included."""
        return self.length

    def nbytes(self) -> int:
        """Bytes that the kept numbers take, without the room to grow."""
        return sum(t.numel() * t.element_size() for s in self.states for t in s.tensors())

    def advance(self, num_tokens: int, mask: Tensor | None) -> None:
        """Called by the model after a forward pass."""
        self.length += num_tokens
        self.mask = mask

    def copy(self) -> "Cache":
        """An independent cache with the same contents."""
        new = Cache([s.copy() for s in self.states], self.batch_size)
        new.length, new.mask = self.length, self.mask
        return new

    def reorder(self, rows: Tensor) -> None:
        """Let row i become what row `rows[i]` was; rows may repeat, and the batch size may change. Ends all snapshots."""
        if rows.ndim != 1 or rows.dtype not in (torch.int32, torch.int64) or len(rows) == 0:
            raise InputError(f"rows is {rows.dtype} of shape {list(rows.shape)}; it must be a list of row numbers, int64 [n]")
        if rows.min() < 0 or rows.max() >= self.batch_size:
            raise InputError(f"rows holds {rows.tolist()}; row numbers must be from 0 to {self.batch_size - 1}")
        for s in self.states:
            s.reorder(rows)
        self.mask = None if self.mask is None else self.mask[rows]
        self.batch_size, self._owner = len(rows), object()

    def snapshot(self) -> Snapshot:
        """Remember this point. Costs no copy: it keeps the present KDA states alive and notes the length."""
        return Snapshot(self._owner, self.length, len(self._cut), self.mask, [s.snapshot() for s in self.states])

    def rollback(self, to: Snapshot) -> None:
        """Return to a snapshot of this cache, exactly. A snapshot of tokens that were since replaced is refused."""
        if to.owner is not self._owner:
            raise InputError("this snapshot was taken from another cache, or before this one was reordered")
        if min(self._cut[to.rollbacks:], default=to.length) < to.length:
            raise InputError(f"this snapshot was taken at {to.length} tokens, some of which were replaced after a rollback "
                             f"to {min(self._cut[to.rollbacks:])}")
        for s, saved in zip(self.states, to.states):
            s.restore(saved)
        self.length, self.mask = to.length, to.mask
        self._cut.append(to.length)
