"""A small K3 that was trained on Python's documentation, and a smaller one that drafts for it.

    model, tokenizer = toy.load()
    draft, _ = toy.load(toy.DRAFT)

Each folder is a checkpoint in the released layout, in bfloat16: config.json,
model.safetensors, tokenizer.json, and log.jsonl, a row for each step of its training.
`make toy` makes both again.
"""

from pathlib import Path

import torch

from k3_teach.checkpoint import load_checkpoint
from k3_teach.model import K3Model
from k3_teach.train.text import Bytes, load_tokenizer

FOLDER = Path(__file__).parent
DRAFT = FOLDER / "draft"


def load(folder: Path = FOLDER, dtype: torch.dtype = torch.float32) -> tuple[K3Model, Bytes]:
    """The model in evaluation mode, and its tokenizer."""
    return load_checkpoint(folder, dtype=dtype), load_tokenizer(folder)
