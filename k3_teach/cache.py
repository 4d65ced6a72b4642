"""What decoding keeps: a state of fixed size for KDA, a narrow row per token for MLA.

A cache can be copied, reordered (for beam search), and rolled back to a snapshot. It
cannot be cut back to an arbitrary length: the KDA state is a sum over all tokens so
far, and no token can be taken out of it again.

`Cache` holds one state per layer and calls the same five methods of each: copy, reorder
(the rows of the batch), snapshot, restore, and tensors (all that is kept).

Shapes: B batch, T tokens, H heads, K width of a key, V of a value, W width of a
convolution, P = H K its channels.
"""

from contextlib import contextmanager

import torch
from torch import Tensor

from k3_teach.errors import InputError, shown

GROWTH = 256  # rows of the smallest LatentCache buffer


class KDAState:
    """What a KDA layer keeps: `S` [B,H,K,V] in float32, and `taps`, the last inputs of
    its three convolutions, [B,W-1,P] each. None: nothing seen.

    The layer replaces both and never writes into them, so a reference is a snapshot.
    """

    def __init__(self, S: Tensor | None = None,
                 taps: tuple[Tensor, Tensor, Tensor] | None = None):
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
    """What an MLA layer keeps: rows [B, length, width], one per token.

    They lie in a buffer that grows by half or more, so that appending stays cheap. Rows
    are added at the end and stay as they are, so a length is a snapshot.
    """

    def __init__(self):
        self.buffer: Tensor | None = None
        self.length = 0

    def __len__(self) -> int:
        return self.length

    def append(self, rows: Tensor) -> Tensor:
        """Add rows [B,T,width]; return all rows so far [B,length,width], as a view."""
        end = self.length + rows.shape[1]
        frozen = False      # a tensor of inference mode is not to be written outside it
        if self.buffer is not None and not torch.compiler.is_compiling():
            outside = not torch.is_inference_mode_enabled()
            frozen = self.buffer.is_inference() and outside
        if self.buffer is None or end > self.buffer.shape[1] or frozen:
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

    def __init__(self, owner: object, length: int, rollbacks: int, mask: Tensor | None,
                 states: list):
        self.owner, self.length, self.rollbacks = owner, length, rollbacks
        self.mask, self.states = mask, states


class Cache:
    """One state per layer, and which of the tokens so far are padding."""

    def __init__(self, states: list, batch_size: int):
        self.states, self.batch_size = states, batch_size
        self.length = 0
        self.mask: Tensor | None = None  # [B, length], False at padding; None: all True
        self._owner = object()           # a snapshot fits one cache, one order of rows
        self._cut: list[int] = []        # the lengths to which it was rolled back

    def __len__(self) -> int:
        """Tokens so far, padding included."""
        return self.length

    def __bool__(self) -> bool:
        return True     # an empty cache is a cache: `cache or other` must not lose it

    def nbytes(self) -> int:
        """Bytes that the kept numbers take, without the room to grow."""
        kept = [t for s in self.states for t in s.tensors()]
        return sum(t.numel() * t.element_size() for t in kept)

    @contextmanager
    def all_or_nothing(self):
        """If the block inside fails or is interrupted, the states stay as they are."""
        saved = [s.snapshot() for s in self.states]
        try:
            yield
        except BaseException:
            for s, before in zip(self.states, saved):
                s.restore(before)
            raise

    def advance(self, num_tokens: int, mask: Tensor | None) -> None:
        """Called by the model after a forward pass, with the mask over all tokens."""
        self.length += num_tokens
        self.mask = mask

    def copy(self) -> "Cache":
        """An independent cache with the same contents."""
        new = Cache([s.copy() for s in self.states], self.batch_size)
        new.length, new.mask = self.length, self.mask
        return new

    def reorder(self, rows: Tensor) -> None:
        """Let row i become what row `rows[i]` was. Ends all snapshots.

        rows int64 [n]; they may repeat, and n may differ from the batch size.
        InputError for another shape or dtype, and for a row that there is not.
        """
        integers = isinstance(rows, Tensor) and rows.dtype in (torch.int32, torch.int64)
        integers = integers and not (rows.is_meta or rows.is_sparse)
        if not integers or rows.ndim != 1 or not rows.numel():
            raise InputError(f"rows is {shown(rows)}; "
                             "it must be a list of row numbers, an int64 tensor [n]")
        if rows.min() < 0 or rows.max() >= self.batch_size:
            raise InputError(f"rows holds {rows.tolist()}; "
                             f"row numbers must be from 0 to {self.batch_size - 1}")
        for s in self.states:
            s.reorder(rows)
        self.mask = None if self.mask is None else self.mask[rows]
        self.batch_size, self._owner = len(rows), object()

    def snapshot(self) -> Snapshot:
        """Remember this point. Nothing is copied: the KDA states of now stay alive, and
        the number of MLA rows is noted."""
        states = [s.snapshot() for s in self.states]
        return Snapshot(self._owner, self.length, len(self._cut), self.mask, states)

    def rollback(self, to: Snapshot) -> None:
        """Return to a snapshot of this cache, exactly.

        InputError for a snapshot of another cache or order of rows, and for one that
        lies beyond a later rollback: tokens that it knew may have been replaced since.
        """
        if getattr(to, "owner", None) is not self._owner:
            raise InputError("this snapshot was taken from another cache, "
                             "or before this one was reordered")
        cut = self._cut[to.rollbacks:]
        if min(cut, default=to.length) < to.length:
            raise InputError(f"this snapshot was taken at {to.length} tokens, some of "
                             f"which were replaced after a rollback to {min(cut)}")
        for s, saved in zip(self.states, to.states):
            s.restore(saved)
        self.length, self.mask = to.length, to.mask
        self._cut.append(to.length)
