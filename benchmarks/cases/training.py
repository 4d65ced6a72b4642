"""One training step of a toy K3 against one of a plain GPT of the same active size."""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.baselines.gpt import gpt_like
from benchmarks.case import Case, Disagreement
from k3_teach.config import K3Config
from k3_teach.model import K3Model
from k3_teach.parts.balancer import Balancer
from k3_teach.scale.flops import BACKWARD, multiply_adds

OURS = "K3 toy"


def toy(d: int) -> K3Config:
    """Eight layers of width d, six of them KDA, all with 32 experts, of which 4 are chosen.

    4.5 M parameters at d = 128, of which a token uses 1.7 M; 10.7 M and 5.2 M at 256.
    """
    head, latent = d // 4, d // 2
    return K3Config.toy(
        num_hidden_layers=8, kda_layers=(1, 2, 3, 5, 6, 7), full_attn_layers=(4, 8),
        hidden_size=d, num_heads=4, head_dim=head, num_attention_heads=4,
        kv_lora_rank=latent, q_lora_rank=3 * head, qk_nope_head_dim=head,
        qk_rope_head_dim=head // 2, v_head_dim=head, first_k_dense_replace=0,
        num_experts=32, num_experts_per_token=4, moe_intermediate_size=64,
        routed_expert_hidden_size=latent)


def cases(quick: bool) -> Iterator[Case]:
    for d in (32,) if quick else (128, 256):
        yield step(d, *((2, 32) if quick else (16, 128)))


def step(d: int, B: int, T: int) -> Case:
    """AdamW in float32; the K3's biases are balanced by quantiles at every step.

    The two learn the same random tokens, again and again: what they learn is not
    compared, only that both do.
    """
    c = toy(d)
    torch.manual_seed(0)
    k3, gpt = K3Model(c), gpt_like(c, T)
    ids = torch.randint(0, c.vocab_size, (B, T))
    macs = sum(multiply_adds(c, (T + 1) // 2).values())
    return Case("Training step", f"d {d}, B {B}, T {T}",
                {OURS: training_step(k3, ids, Balancer(k3, "quantile")),
                 "GPT": training_step(gpt, ids)}, OURS,
                flops=2 * BACKWARD * B * T * macs, tokens=B * T,
                check=lambda losses: untrained(losses, c.vocab_size), seconds=12)


def training_step(model: nn.Module, ids: Tensor, balancer: Balancer | None = None
                  ) -> Callable[[], Tensor]:
    """A contender: one whole step on `ids` [B,T], which gives the loss before it."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def call():
        optimiser.zero_grad()
        logits = model(ids)[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimiser.step()
        if balancer is not None:
            balancer.step()
        return loss.detach()

    return call


def untrained(losses: dict[str, Tensor], vocab: int) -> None:
    """Disagreement unless every first loss is that of a guess, ln(vocab), within 0.5."""
    for name, loss in losses.items():
        if not abs(loss - math.log(vocab)) < 0.5:
            raise Disagreement(f"{name}: the first loss is {loss:.3f}; a model that knows "
                               f"nothing has {math.log(vocab):.3f}")
