"""Text in, text out, as it comes.

A token is a piece of the bytes of a text, and a letter such as é has several: what a
token leaves unfinished waits for the next one.
"""

from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from k3_teach.errors import InputError, shown
from k3_teach.generate.tokens import STOPPED, generate, pad_left
from k3_teach.model import K3Model


class _Writer:
    """The text of one row: tokens in, finished letters out, up to an ending."""

    def __init__(self, tokenizer, endings: list[str]):
        self.tokenizer, self.endings = tokenizer, endings
        self.decoder = getincrementaldecoder("utf-8")(errors="replace")
        self.text, self.ended = "", False

    def write(self, token: int) -> str:
        """The letters that this token finishes."""
        if token == STOPPED:
            return self.close()
        known = token < self.tokenizer.vocab_size
        return self._add(self.tokenizer.token_bytes(token) if known else b"\xff")

    def close(self) -> str:
        """The last letters: U+FFFD for one that will not be finished."""
        piece, self.ended = self._add(b"", final=True), True
        return piece

    def _add(self, data: bytes, final: bool = False) -> str:
        before = len(self.text)
        self.text += self.decoder.decode(data, final)
        found = [self.text.find(e) + len(e) for e in self.endings if e in self.text]
        self.ended = bool(found)
        self.text = self.text[:min(found, default=None)]
        return self.text[before:]


def complete(model: K3Model, tokenizer, prompt: str | list[str], max_new_tokens: int,
             *, stop: str | Iterable[str] = (), **options
             ) -> Iterator[str | list[str]]:
    """Continue a text: yields the new text in pieces, each as soon as it is written.

    For a list of prompts it yields a list of pieces a step, one for each prompt, which
    may be empty.

    stop: strings that end a text. It ends with the first of them, and what its last
        token held beyond is left out. What `generate` calls stop may stand among them.
    options: those of `generate`; a cache serves one prompt.
    tokenizer: with vocab_size, encode and token_bytes, as in `k3_teach.train.text`.
    InputError for an empty prompt, and for a tokenizer that knows more tokens than the
    model; and those of `generate`.
    """
    single = not isinstance(prompt, Sequence) or isinstance(prompt, str)
    several = isinstance(stop, Iterable) and not isinstance(stop, (str, Tensor))
    stop = list(stop) if several else [stop]
    endings = [s for s in stop if isinstance(s, str)]
    if "" in endings:
        raise InputError("stop holds an empty string; every text would end at once")
    prompts = [_encode(model, tokenizer, p) for p in ([prompt] if single else prompt)]
    if not single and not (prompts and options.get("cache") is None):
        raise InputError("prompt is a list; it must hold a string, and a cache serves "
                         "one prompt only")
    ids, mask = pad_left(prompts)
    ids = ids.to(model.embed_tokens.weight.device)
    tokens = generate(model, ids, max_new_tokens, attention_mask=mask, **options,
                      stop=[s for s in stop if not isinstance(s, str)])
    steps = _write(tokens, [_Writer(tokenizer, endings) for _ in prompts])
    return (pieces[0] for pieces in steps if pieces[0]) if single else steps


def _write(tokens, writers: list[_Writer]) -> Iterator[list[str]]:
    for step in tokens:
        yield [w.write(token) for w, token in zip(writers, step.tolist())]
        if all(w.ended for w in writers):
            return
    if any(rest := [w.close() for w in writers]):
        yield rest


def _encode(model, tokenizer, prompt) -> list[int]:
    known, V = tokenizer.vocab_size, model.config.vocab_size
    if known > V:
        raise InputError(f"the tokenizer knows {known} tokens and the model {V}; it "
                         "must be the one that the model was trained with")
    if not isinstance(prompt, str) or not prompt:
        raise InputError(f"prompt is {shown(prompt)}; it must be a string that is not "
                         "empty, or a list of such")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError:      # half of a surrogate pair
        raise InputError(f"prompt is {shown(prompt)}, which UTF-8 cannot write") from None
    return tokenizer.encode(prompt)
