"""The training loop: what happens in one step, and how a run is kept.

    loss -> gradients -> mean over processes -> clip -> [all finite?] -> optimisers
         -> QK-Clip -> balance the experts

    trainer = Trainer(model, data, Recipe(steps=500), folder="run")
    for row in trainer.run():
        print(row["step"], row["loss"])

A run is a function of its recipe: the batch of a step depends on seed and step alone, and
a checkpoint holds all that the next step reads, so that a resumed run gives the same bits.
A step is done whole or not at all: Ctrl-C waits for its end, and a loss that is no number
stops before anything is changed.

With several processes (`torchrun`), each takes its rows of every batch, and gradients,
counts of the experts and largest logits are put together.
"""

import hashlib
import math
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from k3_teach.errors import InputError, TrainingError
from k3_teach.model import next_token_loss
from k3_teach.parts.balancer import Balancer
from k3_teach.train import store
from k3_teach.train.muon import apply_qk_clip_, largest_logits, qk_clip
from k3_teach.train.optimiser import learning_rate, make_optimisers, mla_layers
from k3_teach.train.text import Data


VALIDATION_TOKENS = 8192        # in one forward pass


@dataclass(frozen=True)
class Recipe:
    """How to train. InputError for values that describe no run."""

    steps: int
    rows: int = 16                  # pieces of text in a batch, over all processes
    length: int = 128               # tokens in a piece
    lr: float = 4e-3                # the largest learning rate
    optimiser: str = "muon"         # "muon" (and AdamW for what is no matrix), or "adamw"
    per_head: bool = True           # Muon on queries, keys and values head by head
    weight_decay: float = 0.1
    warmup: float = 0.01            # share of the steps in which the rate goes up
    last_lr: float = 0.1            # where it ends, as a share of `lr`
    clip: float = 1.0               # longest gradient, over all parameters
    qk_clip: float | None = 100.0   # largest attention logit; None: no QK-Clip
    balance: str = "quantile"       # method of `Balancer`
    autocast: bool = False          # matrix products in bfloat16
    seed: int = 0                   # of the batches
    validate_every: int = 0         # steps between two validations; 0: never
    save_every: int = 0             # steps between two checkpoints; 0: at the end only

    def __post_init__(self):
        least = dict(steps=1, rows=1, length=2, validate_every=0, save_every=0, seed=0)
        for name, low in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise InputError(f"{name} is {value!r}; it must be an integer of at least "
                                 f"{low}")
        positive = {"lr": self.lr, "clip": self.clip, "qk_clip": self.qk_clip or 1}
        for name, value in positive.items():
            if not 0 < value < math.inf:
                raise InputError(f"{name} is {value}; it must be above 0, and finite")
        shares = {"warmup": self.warmup, "last_lr": self.last_lr,
                  "weight_decay": self.weight_decay}
        for name, value in shares.items():
            if not 0 <= value <= 1:
                raise InputError(f"{name} is {value}; it must be from 0 to 1")


class Trainer:
    """Trains any model that maps ids [B,T] to logits [B,T,vocab], in place.

    step: how many steps are done. folder: where checkpoints go (for a K3Model); None
    keeps nothing. InputError for a vocabulary that the model does not have.
    """

    def __init__(self, model: nn.Module, data: Data, recipe: Recipe, folder=None):
        self.model, self.data, self.recipe, self.folder = model, data, recipe, folder
        config = getattr(model, "config", None)
        if config is not None and data.tokenizer.vocab_size > config.vocab_size:
            raise InputError(f"the tokenizer has {data.tokenizer.vocab_size} tokens; the "
                             f"model knows {config.vocab_size}")
        self.device = next(model.parameters()).device
        self.rank, self.world = _processes()
        if recipe.rows % self.world:
            raise InputError(f"rows is {recipe.rows}; it must be a multiple of the "
                             f"{self.world} processes")
        self.optimisers = make_optimisers(model, recipe.optimiser, recipe.per_head,
                                          recipe.weight_decay)
        self.balancer = Balancer(model, recipe.balance)
        self.mla, self.seen, self.step = mla_layers(model), {}, 0
        if recipe.qk_clip is not None:
            for name, layer in self.mla.items():
                layer.register_forward_pre_hook(lambda _, args, n=name: self._see(n, args[0]))

    def run(self, steps: int | None = None):
        """Yields a row after each step, until the recipe's end or `steps` more.

        A row has step, loss (in nats a token, before the step), lr, grad_norm, max_vio
        (mean over the layers with experts), seconds, and at times validation_loss, also as
        nats_per_byte.
        However it ends, also by Ctrl-C, the last whole step is saved. TrainingError for a
        loss or a gradient that is no number.
        """
        end = self.recipe.steps if steps is None else self.step + steps
        saved = None
        try:
            while self.step < min(end, self.recipe.steps):
                with interrupt_waits():
                    row = self.train_step()
                if _due(self.step, self.recipe.validate_every, self.recipe.steps):
                    row["validation_loss"] = loss = self.validation_loss()
                    row["nats_per_byte"] = loss / self.data.bytes_per_token
                if _due(self.step, self.recipe.save_every, 0):
                    saved = self.save()
                yield row
        finally:
            if self.folder is not None and saved != self.step and self.step:
                self.save()

    def train_step(self) -> dict:
        """One step on the next batch. -> its row."""
        start, r = time.perf_counter(), self.recipe
        self.model.train()
        ids = self.data.batch(self.step, r.rows, r.length, r.seed)
        ids = ids[self.rank::self.world].to(self.device)
        try:
            loss, norm = self._gradients(ids)
        except InputError as error:     # a router has met scores that are no numbers
            raise self._failure(error) from error
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise self._failure(f"the loss is {float(loss)} and the length of the gradient "
                                f"{float(norm)}; both must be finite")
        lr = learning_rate(self.step, r.steps, r.lr, r.warmup, r.last_lr)
        self._update(lr)
        self.step += 1
        vio = list(self.balancer.max_vio.values())
        return dict(step=self.step, loss=float(loss), lr=lr, grad_norm=float(norm),
                    max_vio=sum(vio) / len(vio) if vio else 0.0,
                    seconds=time.perf_counter() - start)

    def _gradients(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Leaves the clipped gradients in the parameters. -> the loss and their length."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.autocast):
            logits = self.model(ids)
        loss = next_token_loss(logits, ids)
        loss.backward()
        loss = self._mean_over_processes(loss.detach())
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        return loss, nn.utils.clip_grad_norm_(parameters, self.recipe.clip)

    def _failure(self, why) -> TrainingError:
        """Undo what the step has left so far. -> the error to raise."""
        self._forget()
        return TrainingError(f"step {self.step + 1}: {why}. The step was not taken, the model "
                             f"is that of step {self.step}. A smaller lr than "
                             f"{self.recipe.lr} may help")

    def _update(self, lr: float) -> None:
        """Weights, then QK-Clip by the logits that the old weights gave, then biases."""
        gammas = {name: qk_clip(self._largest(name), self.recipe.qk_clip)
                  for name in self.seen}
        for optimiser in self.optimisers.values():
            for group in optimiser.param_groups:
                group["lr"] = lr
            optimiser.step()
        for name, gamma in gammas.items():
            apply_qk_clip_(self.mla[name], gamma)
        self.balancer.step()
        self._forget()

    def _see(self, name: str, x: Tensor) -> None:
        if self.mla[name].training:
            self.seen[name] = x.detach()

    def _largest(self, name: str) -> Tensor:
        """The largest logit of each head of a layer in this step: [H]."""
        largest = largest_logits(self.mla[name], self.seen[name])
        if self.world > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest

    def _forget(self) -> None:
        """Nothing of a step stays but its result."""
        self.seen.clear()
        self.balancer.tallies.clear()
        for optimiser in self.optimisers.values():
            optimiser.zero_grad()

    def _mean_over_processes(self, loss: Tensor) -> Tensor:
        """Put gradients and loss of all processes together; every row counts alike."""
        if self.world > 1:
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            for x in (*grads, loss):
                dist.all_reduce(x)
                x /= self.world
        return loss

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Mean over the validation text, in nats a token."""
        training, r = self.model.training, self.recipe
        self.model.eval()
        total, pieces = 0.0, self.data.pieces(r.length)
        for ids in pieces.split(max(1, VALIDATION_TOKENS // r.length)):
            ids = ids.to(self.device)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=r.autocast):
                logits = self.model(ids)
            total += float(next_token_loss(logits, ids)) * len(ids)
        self.model.train(training)
        return total / len(pieces)

    # --- keeping it -------------------------------------------------------------------

    def fingerprint(self) -> str:
        """Of the tokens, by which a resumed run knows that the text is the same."""
        digest = hashlib.sha256()
        for ids in (self.data.train, self.data.validation):
            digest.update(ids.numpy().tobytes())
        return digest.hexdigest()[:16]

    def save(self) -> int:
        """Write the checkpoint of this step to the folder. -> the step."""
        if self.rank == 0:
            with interrupt_waits():
                store.save(self.folder, self.model, self.optimisers, self.data.tokenizer,
                           self.step, self.recipe, self.fingerprint())
        return self.step

    @classmethod
    def resume(cls, folder, data: Data, device="cpu") -> "Trainer":
        """Go on from the newest checkpoint of a folder, as if there had been no stop.

        InputError for another text; CheckpointError for a folder without a whole one.
        """
        newest = store.newest(folder)
        model, step, recipe, fingerprint = store.load(newest, device)
        trainer = cls(model, data, Recipe(**recipe), folder)
        if trainer.fingerprint() != fingerprint:
            raise InputError(f"{newest} was trained on another text, or with another "
                             "tokenizer; a run is resumed with the data it began with")
        store.load_optimisers(newest, model, trainer.optimisers)
        trainer.step = step
        return trainer


@contextmanager
def interrupt_waits():
    """Ctrl-C inside this block takes effect at its end."""
    if threading.current_thread() is not threading.main_thread():
        yield       # only the main thread is interrupted
        return
    asked = []
    before = signal.signal(signal.SIGINT, lambda *_: asked.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt


def _due(step: int, every: int, last: int) -> bool:
    return every > 0 and (step % every == 0 or step == last)


def _processes() -> tuple[int, int]:
    """Rank and number of the processes of this run."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
