"""How every parameter begins: a table, of which the first pattern that fits a name decides.

| parameter                       | "report"                  | "released" (the code)     |
|---------------------------------|---------------------------|---------------------------|
| AttnRes query (`*_res_proj`)    | 0: all sources count alike| N(0, std)                 |
| `A_log`                         | 0                         | log U(1, 16)              |
| `dt_bias`                       | softplus^-1(t), t log-    | the same (1)              |
|                                 | uniform in [0.001, 0.1]   |                           |
| convolutions                    | U(-1/sqrt(W), 1/sqrt(W))  | the same                  |
| norms                           | 1                         | the same                  |
| `e_score_correction_bias`       | 0                         | the same (1)              |
| router (`gate.weight`)          | U(-1/sqrt(d), 1/sqrt(d))  | the same                  |
| embedding, all other matrices   | N(0, std)                 | the same; 0 in the row of |
|                                 |                           | the padding token         |

(1) The released code leaves it unset. std is `initializer_range`, d the model width, W the
width of a convolution.

A zero query makes a depth read the mean of its sources, which after the norm that follows
is the ordinary residual (Attention Residuals, arXiv 2603.15031, section 5). Without a gate
bound, `dt_bias` makes the first decays e^-t, as in Kimi Linear; with one, it is no more
than a starting value. The trained values of K3 are about -4.6, near its middle.
"""

import math

import torch
from torch import nn

from k3_teach.errors import InputError, shown


def _zeros(p, std):
    p.zero_()


def _ones(p, std):
    p.fill_(1)


def _normal(p, std):
    p.normal_(0, std)


def _uniform_fan_in(p, std):
    bound = p.shape[-1] ** -0.5
    p.uniform_(-bound, bound)


def _log_uniform_1_16(p, std):
    p.uniform_(1, 16).log_()


def _inverse_softplus_of_time_step(p, std):
    t = p.uniform_(math.log(1e-3), math.log(1e-1)).exp_().clamp_(min=1e-4)
    t.add_(torch.log(-torch.expm1(-t)))       # softplus^-1(t) = t + log(1 - e^-t)


RULES = (  # name ends with, "report", "released"
    ("_res_proj.weight", _zeros, _normal),
    ("A_log", _zeros, _log_uniform_1_16),
    ("dt_bias", _inverse_softplus_of_time_step, _inverse_softplus_of_time_step),
    ("conv1d.weight", _uniform_fan_in, _uniform_fan_in),
    ("norm.weight", _ones, _ones),
    ("e_score_correction_bias", _zeros, _zeros),
    ("gate.weight", _uniform_fan_in, _uniform_fan_in),
    ("", _normal, _normal),
)


@torch.no_grad()
def init_parameters(module: nn.Module, variant: str = "report", std: float = 0.02,
                    pad_token_id: int | None = None) -> None:
    """Fill every parameter of `module` by the table above, from torch's default generator.

    InputError for a variant other than "report" and "released".
    """
    if variant not in ("report", "released"):
        raise InputError(f"init is {shown(variant)}; it must be 'report' or 'released'")
    for name, p in module.named_parameters():
        _, report, released = next(rule for rule in RULES if name.endswith(rule[0]))
        (report if variant == "report" else released)(p, std)
        padded = name.endswith("embed_tokens.weight") and pad_token_id is not None
        if variant == "released" and padded:
            p[pad_token_id] = 0
