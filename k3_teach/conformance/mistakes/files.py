"""Mistakes in reading and writing the released files."""

from k3_teach.checkpoint import _misshapen, fitted, load_checkpoint
from k3_teach.config import K3Config, _linear_attn
from k3_teach.conformance.mistakes.mistake import Edit, Mistake

MISTAKES = [
    Mistake(1, "A_log cut without a look at what is cut off", (Edit(
        fitted,
        "if x[shape[0]:].any():",
        "if False:"),),
        "the released tail is zero"),
    Mistake(1, "A_log shared out with its padding", (Edit(
        fitted,
        "return x[:shape[0]]",
        "return x[-shape[0]:]"),),
        "without padding the last entries are all of them"),
    Mistake(1, "A_log must have one entry for each head", (Edit(
        _misshapen,
        'padded = name.endswith(".A_log") and prod(shape) >= wanted[0]',
        "padded = False"),),
        "it shows where a file has padding"),
    Mistake(5, "gate_lower_bound lost when the configuration is written", (Edit(
        K3Config.to_dict,
        "linear = {f.name: getattr(inner, f.name) for f in fields(LinearAttnConfig)}", """
        linear = {f.name: getattr(inner, f.name) for f in fields(LinearAttnConfig)
                  if f.name != "gate_lower_bound"}
        """),),
        "it shows in the model that is read back"),
    Mistake(5, "gate_lower_bound lost when the configuration is read", (Edit(
        _linear_attn,
        "known = {k: v for k, v in data.items() if k in names and v is not None}", """
        known = {k: v for k, v in data.items() if k in names and v is not None}
        known.pop("gate_lower_bound", None)
        """),)),
    Mistake(26, "routed_expert_norm is not loaded", (Edit(
        load_checkpoint,
        "target.copy_(fitted(name, x, target.shape))", """
        if name.endswith("routed_expert_norm.weight"):
            target.fill_(1)
        else:
            target.copy_(fitted(name, x, target.shape))
        """),)),
]
