"""Text to learn from, without a download: what every Python carries, or any file.

    corpus -> text -> tokenizer -> ids, nine tenths to learn from, one tenth to be asked

Python comes with its reference manual (`pydoc_data.topics`, 0.4 MB without repetitions)
and with the docstrings of its library (1 MB): English about one subject. Both differ a
little between versions of Python, and so does what is learned from them.

Two tokenizers with the same four methods: `Bytes`, where a token is a byte, and `BPE`,
where frequent sequences of bytes have become tokens. Losses per token cannot be compared
between them, losses per byte can.
"""

import ast
import re
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from k3_teach.arguments import COUNT, NUMBER, check_arguments
from k3_teach.errors import InputError, shown

TOKENIZER = "tokenizer.json"
BLOCK = 4000            # characters; every tenth block of the text is kept for validation


# --- text -----------------------------------------------------------------------------

def corpus(source: str | Path | None = None) -> str:
    """A text: "topics" (also None), "library", or the UTF-8 file at a path.

    topics: Python's reference manual; library: that and the docstrings of the standard
    library. InputError for a file that cannot be read as text, or that is empty.
    """
    if source is None or source == "topics":
        return _without_repetitions(_topics())
    if source == "library":
        return _without_repetitions(_topics() + _docstrings())
    try:
        text = Path(source).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"{source}: not a text to learn from ({e}); it must be 'topics', "
                         "'library' or a UTF-8 file") from None
    if not text.strip():
        raise InputError(f"{source}: holds no text")
    return text


def _topics() -> list[str]:
    from pydoc_data.topics import topics
    return [topics[name] for name in sorted(topics)]


def _docstrings(shortest: int = 200) -> list[str]:
    """Of the modules, classes and functions of the library, in the order of its files."""
    library = Path(sysconfig.get_paths()["stdlib"])
    leave = {"test", "tests", "site-packages", "idlelib", "lib2to3", "__pycache__"}
    found = []
    for path in sorted(library.rglob("*.py")):
        if leave & set(path.relative_to(library).parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):    # kept broken on purpose
            continue
        kinds = ast.Module, ast.ClassDef, ast.FunctionDef
        nodes = (n for n in ast.walk(tree) if isinstance(n, kinds))
        found += [doc for n in nodes if len(doc := ast.get_docstring(n) or "") >= shortest]
    return found


def _without_repetitions(texts: list[str]) -> str:
    """The paragraphs, each once: the manual prints many sections several times, and what
    stands in both halves of a split would be known by heart, not understood."""
    seen, kept = set(), []
    for paragraph in re.split(r"\n\s*\n", "\n\n".join(texts)):
        words = " ".join(paragraph.split())
        if words and words not in seen:
            seen.add(words)
            kept.append(paragraph.rstrip())
    return "\n\n".join(kept)


# --- tokens ---------------------------------------------------------------------------

class Bytes:
    """A token is a byte of UTF-8: 256 of them, nothing to learn."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for."""
        return bytes([token])

    def decode(self, ids) -> str:
        """The text of some tokens; what is no UTF-8 becomes U+FFFD."""
        joined = b"".join(self.token_bytes(int(i)) for i in ids)
        return joined.decode("utf-8", errors="replace")

    def save(self, folder) -> None:
        """No file says that tokens are bytes."""
        (Path(folder) / TOKENIZER).unlink(missing_ok=True)


class BPE(Bytes):
    """Byte-pair encoding over bytes, by the `tokenizers` library.

    A token is a byte, or two tokens that stood together often (Sennrich et al. 2016,
    arXiv 1508.07909); words are not joined with the ones before them.
    """

    def __init__(self, tokenizer):
        from tokenizers.pre_tokenizers import ByteLevel
        self.tokenizer, self.vocab_size = tokenizer, tokenizer.get_vocab_size()
        # The library writes each byte as one printable character; undo that.
        printable = [i for r in ((33, 127), (161, 173), (174, 256)) for i in range(*r)]
        others = [i for i in range(256) if i not in printable]
        self.byte = {chr(i): i for i in printable}
        self.byte.update({chr(256 + n): i for n, i in enumerate(others)})
        alphabet, words = set(ByteLevel.alphabet()), tokenizer.get_vocab()
        if set(self.byte) != alphabet or not all(alphabet >= set(w) for w in words):
            raise InputError("not a byte-level encoding: a token holds other characters "
                             "than those that the library writes for bytes")

    @classmethod
    def train(cls, text: str, vocab_size: int) -> "BPE":
        """Learn the merges from a text; a short one may give fewer tokens than asked for.

        InputError for fewer than 256.
        """
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        if vocab_size < 256:
            raise InputError(f"vocab_size is {vocab_size}; bytes alone are 256")
        tokenizer = Tokenizer(models.BPE())
        level = pre_tokenizers.ByteLevel
        tokenizer.pre_tokenizer = level(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False,
                                      initial_alphabet=sorted(level.alphabet()))
        tokenizer.train_from_iterator([text], trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, file) -> "BPE":
        """InputError for a file that is no tokenizer."""
        from tokenizers import Tokenizer
        try:
            return cls(Tokenizer.from_file(str(file)))
        except InputError:
            raise
        except Exception as e:      # the library raises Exception itself
            raise InputError(f"{file}: not a tokenizer ({e})") from None

    def save(self, folder) -> None:
        """Write `tokenizer.json`."""
        self.tokenizer.save(str(Path(folder) / TOKENIZER))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def token_bytes(self, token: int) -> bytes:
        return bytes(self.byte[c] for c in self.tokenizer.id_to_token(int(token)))


def load_tokenizer(folder) -> Bytes:
    """The tokenizer of a folder: its `tokenizer.json`, or bytes where there is none."""
    file = Path(folder) / TOKENIZER
    return BPE.load(file) if file.exists() else Bytes()


# --- batches --------------------------------------------------------------------------

class Data:
    """A text as tokens: `train` and `validation`, int64 [N] each.

    Blocks of 4000 characters; of every ten one is for validation, drawn by `seed`. A
    batch depends on the seed and the number of the step alone, so a run that is resumed
    goes on with the batches that it would have had. InputError for a text that is too
    short to be split.
    """

    def __init__(self, text: str, tokenizer: Bytes, validation: float = 0.1, seed: int = 0):
        between = "between 0 and 1", lambda x: NUMBER[1](x) and 0 < x < 1
        check_arguments(dict(text=("a string", lambda x: isinstance(x, str)), seed=COUNT,
                             validation=between),
                        dict(text=text, seed=seed, validation=validation))
        if not isinstance(tokenizer, Bytes):
            raise InputError(f"tokenizer is {shown(tokenizer)}; it must be Bytes() or a BPE")
        blocks = [text[i:i + BLOCK] for i in range(0, len(text), BLOCK)]
        asked = max(1, round(validation * len(blocks)))
        if asked >= len(blocks):
            raise InputError(f"the text has {len(text)} characters; to be split, it must "
                             f"have more than {BLOCK}")
        order = torch.randperm(len(blocks), generator=_generator(seed, -1)).tolist()
        kept = set(order[:asked])
        parts = [[b for i, b in enumerate(blocks) if (i in kept) == wanted]
                 for wanted in (False, True)]
        self.tokenizer = tokenizer
        self.train, self.validation = (
            torch.tensor([t for b in part for t in tokenizer.encode(b)]) for part in parts)
        size = sum(len(b.encode("utf-8")) for b in parts[1])
        self.bytes_per_token = size / len(self.validation)

    def batch(self, step: int, rows: int, length: int, seed: int = 0) -> Tensor:
        """Pieces of the training text, drawn anew for each step: int64 [rows, length].

        InputError for pieces that are longer than the text.
        """
        self._check(self.train, length)
        starts = torch.randint(len(self.train) - length + 1, (rows,),
                               generator=_generator(seed, step))
        return torch.stack([self.train[s:s + length] for s in starts])

    def pieces(self, length: int) -> Tensor:
        """The validation text in pieces, one after the other: int64 [n, length]."""
        self._check(self.validation, length)
        n = len(self.validation) // length
        return self.validation[:n * length].view(n, length)

    def _check(self, ids: Tensor, length: int) -> None:
        if not 2 <= length <= len(ids):
            raise InputError(f"length is {length}; it must be from 2 to the {len(ids)} "
                             "tokens that there are")


def _generator(seed: int, step: int) -> torch.Generator:
    """One for every pair of seed and step, also for seeds that follow each other."""
    return torch.Generator().manual_seed((seed * 1_000_003 + step + 1) % 2 ** 63)
