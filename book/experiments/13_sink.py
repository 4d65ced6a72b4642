"""Chapter 13: where does a head look that has nothing to read, with the output gate and without?

One layer of attention and one feed-forward learn texts that all begin with the same token.
Most next tokens follow from the current one alone (a fixed table); after one of three asking tokens
comes once more the token that stood before it. Only there is attention needed, and everywhere else
whatever a head reads, the first token excepted, says something that is not wanted. To look one
token back a layer must know places, so the slot is rotated here, unlike in K3.
Three forms: without a gate, with K3's gate, and with KDA's order, a norm per head before the gate.
What a gate has in parameters, the form without it has in its feed-forward.
Three learning rates, four seeds each; about 4 minutes on one core.

    python book/experiments/13_sink.py --output book/experiments/13_sink.json
"""

import torch
import torch.nn.functional as F
from torch import nn

import k3_teach as k3
from k3_teach.notebook.experiment import command
from k3_teach.parts.norm import rms_normalize

FORMS = ("no gate", "gate", "norm, gate")
RATES, SEEDS, STEPS, BATCH, TOKENS = (0.003, 0.01, 0.03), range(4), 500, 64, 32
VOCAB, ASKS, EARLY = 36, 3, 4       # token 0 begins a text, 1 to 3 ask, 4 to 35 are plain
WIDTH, HEADS, LATENT, PART, VALUE = 32, 2, 16, 8, 16
SETTINGS = {
    "rates": list(RATES), "seeds": list(SEEDS), "steps": STEPS, "batch": BATCH, "tokens": TOKENS,
    "vocabulary": VOCAB, "asking tokens": ASKS, "width": WIDTH, "heads": HEADS, "latent": LATENT,
    "own and shared part of a key": PART, "value": VALUE, "precision": "float32",
    "optimizer": "AdamW, betas 0.9 and 0.95, decay 0.01, clip 1; 50 steps up, then to a tenth",
    "measured on": f"256 new texts of seed 1000, the first {EARLY} tokens of each left out"}


def texts(seed, number, tokens=TOKENS):
    """Texts [number, tokens + 1], and [number, tokens], True where the next token is asked for."""
    g = torch.Generator().manual_seed(seed)
    plain = VOCAB - ASKS - 1
    table = torch.randn(plain, plain, generator=torch.Generator().manual_seed(99),
                        dtype=torch.float32)            # the same texts in any precision
    table = (4 * table).softmax(-1)
    ids = torch.zeros(number, tokens + 1, dtype=torch.long)
    ids[:, 1] = torch.randint(ASKS + 1, VOCAB, (number,), generator=g)
    for t in range(2, tokens + 1):
        now, before = ids[:, t - 1], ids[:, t - 2]
        asked = now <= ASKS
        row = table[(now - ASKS - 1).clamp(0)]
        new = ASKS + 1 + torch.multinomial(row, 1, generator=g)[:, 0]
        ask = torch.rand(number, generator=g, dtype=torch.float32) < 0.1
        new = torch.where(ask, torch.randint(1, ASKS + 1, (number,), generator=g), new)
        ids[:, t] = torch.where(asked, before, new)
    return ids, (ids[:, :-1] >= 1) & (ids[:, :-1] <= ASKS)


class Mixer(k3.MLA):
    """MLA; with a norm per head before the gate, as in KDA, if `form` is "norm, gate"."""

    form = "gate"

    def forward(self, x, state=None, mask=None, trace=None):
        if self.form != "norm, gate":
            return super().forward(x, state, mask, trace)
        if trace is not None:
            super().forward(x, trace=trace)                         # the weights are the same
        q, latent = self.rotate(self.queries(x), self.latents(x), 0, None)
        kv_b = self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1))
        o = k3.mla_expanded(q, latent, kv_b, self.v_dim, self.scale).transpose(1, 2)
        o = rms_normalize(o, 1e-5).flatten(2)                       # [B, T, H V]
        return self.o_proj(o * torch.sigmoid(self.g_proj(x)))


class Toy(nn.Module):
    """ids [B,T] -> logits [B,T,VOCAB]: one MLA and one feed-forward, each behind a norm."""

    def __init__(self, form):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mixer = Mixer(WIDTH, HEADS, LATENT, PART, PART, VALUE,
                           output_gate=form != "no gate", rope_base=100.0)
        self.mixer.form = form
        self.ffn = k3.GatedMLP(WIDTH, 75 if form == "no gate" else 64, k3.Activation("silu"))
        self.norms = nn.ModuleList(k3.RMSNorm(WIDTH, 1e-5) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids, trace=None):
        h = self.embed(ids)
        x = self.norms[0](h)
        a = self.mixer(x, trace=trace)
        h = h + a
        h = h + self.ffn(self.norms[1](h))
        if trace is not None:
            trace.update(input=x, mixer=a, stream=h)
        return self.head(self.norms[2](h))


@torch.no_grad()
def measure(model, seed=1000):
    """What a model does on 256 new texts, `EARLY` tokens left out; `head` is the head whose weight
    on the first token is the larger one where nothing is asked."""
    ids, asked = texts(seed, 256)
    trace, mixer = {}, model.mixer
    logits, x = model(ids[:, :-1], trace), trace["input"]
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    loss, late = loss.view_as(asked), torch.arange(TOKENS) >= EARLY
    idle, busy = ~asked & late, asked & late
    first = trace["attn_weights"][..., 0].transpose(0, 1)           # [H, B, T]
    head = int(first[:, idle].mean(1).argmax())
    kv_b = mixer.kv_b_proj.weight.unflatten(0, (HEADS, -1))[:, PART:]
    v = torch.einsum("btl,hvl->hbtv", mixer.latents(x)[..., :LATENT], kv_b)
    rms = lambda w: w.square().mean().sqrt()
    out = {"first idle": first[head][idle].mean(), "first busy": first[head][busy].mean(),
           "other head": first[1 - head][idle].mean(),
           "value of first": rms(v[head, :, 0]) / rms(v[head, :, 1:]),
           "output idle": rms(trace["mixer"][idle]), "output busy": rms(trace["mixer"][busy]),
           "largest in stream": trace["stream"].abs().max(),
           "loss idle": loss[idle].mean(), "loss busy": loss[busy].mean()}
    if mixer.g_proj is not None:
        gate = torch.sigmoid(mixer.g_proj(x)).unflatten(-1, (HEADS, -1))[:, :, head]
        out |= {"gate idle": gate[idle].mean(), "gate busy": gate[busy].mean()}
    return {name: round(float(value), 4) for name, value in out.items()}


def train(form, rate, seed, steps=STEPS, stop=None, losses=None):
    """A trained toy; `stop`: so many steps of it only, each loss appended to `losses`."""
    torch.manual_seed(seed)
    model, (ids, _) = Toy(form), texts(seed, steps * BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.01)
    for step, batch in enumerate(ids.split(BATCH)[:stop]):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 50) * (1 - 0.9 * step / steps)
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        if losses is not None:
            losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def first_losses():
    """The 10th and 20th loss of one of the runs, cheap to repeat."""
    losses = []
    train("no gate", RATES[-1], SEEDS[0], stop=20, losses=losses)
    return [round(losses[i], 4) for i in (9, 19)]


def run():
    rows = []
    for form in FORMS:
        size = sum(w.numel() for w in Toy(form).parameters())
        for rate in RATES:
            for seed in SEEDS:
                row = {"form": form, "rate": rate, "seed": seed, "parameters": size}
                rows.append(row | measure(train(form, rate, seed)))
                print(rows[-1], flush=True)
    return {"settings": SETTINGS, "losses": first_losses(), "rows": rows}


if __name__ == "__main__":
    command(run, __doc__)
