"""What several test files share."""

from pathlib import Path

import torch

import k3_teach as k3

GOLDEN = Path(__file__).parent / "golden"


def randomize(model: torch.nn.Module, seed: int = 0, scale: float = 0.3) -> torch.nn.Module:
    """Give every parameter a value that matters: an initial model has zero queries, unit norms and equal biases."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(scale * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype))
    return model


def toy(seed: int = 0, dtype=torch.float64, **changes) -> k3.K3Model:
    """A toy K3 with random parameters, in evaluation mode."""
    torch.manual_seed(seed)
    return randomize(k3.K3Model(k3.K3Config.toy(**changes), dtype=dtype), seed).eval()


def tokens(B: int, T: int, seed: int = 0, vocab: int = 256) -> torch.Tensor:
    return torch.randint(vocab, (B, T), generator=torch.Generator().manual_seed(seed))
