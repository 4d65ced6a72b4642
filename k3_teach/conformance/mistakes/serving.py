"""Mistakes of serving: the cache, padding and batches, speculation."""

from k3_teach.cache import KDAState, LatentCache
from k3_teach.conformance.mistakes.mistake import Edit, Mistake
from k3_teach.model import K3Model
from k3_teach.parts.kda_layer import KDA, short_conv
from k3_teach.parts.kda_step import step_kda

STATE = "S = None if state is None else state.S"
HAND_ON = "state.S, state.taps = S, (q_taps, k_taps, v_taps)"
# The model leaves padding out in two places; a port that has neither has the mistake.
PADDING_IS_EMBEDDED = Edit(
    K3Model._run,
    "x = x.masked_fill(~mask[:, -ids.shape[1]:, None], 0)",
    "pass")

STATES = [
    Mistake(13, "the state handed on as [V, K]", (Edit(
        KDA.forward, HAND_ON,
        "state.S, state.taps = S.mT, (q_taps, k_taps, v_taps)"),),
        "one pass over the whole text hands nothing on"),
    Mistake(14, "a call with several tokens starts from an empty state", (Edit(
        KDA.forward, STATE,
        "S = None if state is None or T > 1 else state.S"),),
        "one pass over the whole text hands nothing on"),
    Mistake(14, "the inputs of the convolutions are not kept", (Edit(
        KDA.forward, HAND_ON,
        "state.S, state.taps = S, None"),),
        "one pass over the whole text hands nothing on"),
    Mistake(15, "a first call with one token reads a recycled state", (Edit(
        KDA.forward, STATE, """
        S = None if state is None else state.S
        if T == 1 and state is not None and S is None:
            H, K = self.num_heads, self.head_dim
            S = x.new_full((len(x), H, K, K), torch.nan)    # what the memory holds
        """),),
        "it takes a text that begins with a single token"),
    Mistake(16, "a cache is cut back, but not its KDA states", (Edit(
        KDAState.copy,
        "return KDAState(self.S, self.taps)",
        "return self"),),
        "it takes a cache that is used a second time"),
    Mistake(21, "a step writes into the state that was kept", (Edit(
        step_kda,
        "S = (S * decay[..., None]).addcmul_(k[..., None], u[..., None, :])",
        "S = S.mul_(decay[..., None]).addcmul_(k[..., None], u[..., None, :])"),),
        "it takes a cache that is used a second time"),
    Mistake(21, "the convolutions write into the inputs that were kept", (Edit(
        short_conv,
        "return F.silu(y).to(x.dtype), padded[:, T:].clone()", """
        new = padded[:, T:].clone() if taps is None else taps.copy_(padded[:, T:])
        return F.silu(y).to(x.dtype), new
        """),),
        "it takes a cache that is used a second time"),
    Mistake(40, "a buffer grows without its contents", (Edit(
        LatentCache.append,
        """
        if self.length:
            grown[:, :self.length] = self.rows
        """, """
        grown.zero_()
        """),),
        "one pass over the whole text keeps no buffer"),
    Mistake(40, "a copy of a cache shares its buffers", (Edit(
        LatentCache.copy,
        "new.buffer = None if self.buffer is None else self.rows.clone()",
        "new.buffer = self.buffer"),),
        "it takes two continuations of one text"),
]

PADDING = [
    Mistake(17, "padding is written into the state", (
        PADDING_IS_EMBEDDED,
        Edit(KDA.forward,
             "padding = None if mask is None else ~mask[:, -T:, None]",
             "padding = None")),
        "without padding there is nothing to see"),
    Mistake(18, "padding multiplied by 0, which leaves NaN what it is", (
        Edit(K3Model._run,
             "x = x.masked_fill(~mask[:, -ids.shape[1]:, None], 0)",
             "x = x * mask[:, -ids.shape[1]:, None]"),
        Edit(KDA.forward,
             "x = x.masked_fill(padding, 0)",
             "x = x * ~padding")),
        "without padding there is nothing to see"),
]

MISTAKES = [*STATES, *PADDING]
