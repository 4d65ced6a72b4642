"""What a quoted figure is, here: two strings and how they hang together."""

from dataclasses import dataclass

import torch

VERDICTS = {
    "agrees": "the figure follows as it stands",
    "with a convention": "it follows under the convention that the note names",
    "rounded": "it is a rounding, and the note says what is lost by it",
    "corrected": "it does not hold as it is quoted; the note says what does",
    "not reproducible": "the source does not say how it was obtained",
}


@dataclass(frozen=True)
class Figure:
    """One quoted figure. `page` is how its chapter shows it, if not as it is quoted."""

    chapter: str
    what: str
    quoted: str
    computed: str
    verdict: str = "agrees"
    note: str = ""
    page: str | None = None


def column(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)
