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
from dataclasses import fields, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from k3_teach.errors import InputError, TrainingError
from k3_teach.model import next_token_loss
from k3_teach.parts.balancer import Balancer
from k3_teach.train import store
from k3_teach.train.muon import apply_qk_clip_, largest_logits, qk_clip
from k3_teach.train.optimiser import learning_rate, make_optimisers, mla_layers
from k3_teach.train.recipe import Recipe
from k3_teach.train.text import Data


VALIDATION_TOKENS = 8192        # in one forward pass


class Trainer:
    """Trains any model that maps ids [B,T] to logits [B,T,vocab], in place.

    step: how many steps are done. folder: where checkpoints go (for a K3Model); None
    keeps nothing. It watches the model by hooks until `remove()`. InputError for data that
    do not fit the model or the recipe.
    """

    _clip = staticmethod(apply_qk_clip_)

    def __init__(self, model: nn.Module, data: Data, recipe: Recipe, folder=None):
        self.model, self.data, self.recipe, self.folder = model, data, recipe, folder
        self.device = next(model.parameters()).device
        self.rank, self.world = _processes()
        self._check()
        self.optimisers = make_optimisers(model, recipe.optimiser, recipe.per_head,
                                          recipe.weight_decay)
        self.balancer = Balancer(model, recipe.balance)
        self.mla, self.seen, self.hooks = mla_layers(model), {}, []
        self.step, self.saved = 0, 0        # steps done, and those of the last checkpoint
        if recipe.qk_clip is not None:
            for name, layer in self.mla.items():
                see = lambda _, args, n=name: self._see(n, args[0])
                self.hooks.append(layer.register_forward_pre_hook(see))

    def _check(self) -> None:
        data, recipe = self.data, self.recipe
        config = getattr(self.model, "config", None)
        if config is not None and data.tokenizer.vocab_size > config.vocab_size:
            raise InputError(f"the tokenizer has {data.tokenizer.vocab_size} tokens; the "
                             f"model knows {config.vocab_size}")
        if recipe.rows % self.world:
            raise InputError(f"rows is {recipe.rows}; it must be a multiple of the "
                             f"{self.world} processes")
        data.batch(0, 1, recipe.length)     # is the text long enough?
        if recipe.validate_every:
            data.pieces(recipe.length)
        if self.folder is not None:
            store.check(self.folder, self.model)

    def remove(self) -> None:
        """Stop watching the model."""
        self.balancer.remove()
        for hook in self.hooks:
            hook.remove()

    def run(self, steps: int | None = None):
        """Yields a row after each step, until the recipe's end or `steps` more.

        A row has step, loss (in nats a token, before the step), lr, grad_norm, max_vio
        (mean over the layers with experts), seconds, and at times validation_loss, also as
        nats_per_byte. Ctrl-C is raised behind the row of the step that it came in. When
        the run ends, is left or interrupted, its last step is saved; after an error it is
        not. TrainingError for a loss or a gradient that is no number.
        """
        end = self.recipe.steps if steps is None else self.step + steps
        try:
            while self.step < min(end, self.recipe.steps):
                with interrupt_waits(then_raise=False) as asked:
                    row = self._step_and_what_is_due()
                yield row
                if asked:
                    raise KeyboardInterrupt
        except (KeyboardInterrupt, GeneratorExit):
            self._keep()
            raise
        self._keep()

    def _step_and_what_is_due(self) -> dict:
        row, recipe = self.train_step(), self.recipe
        if _due(self.step, recipe.validate_every, recipe.steps):
            row["validation_loss"] = loss = self.validation_loss()
            row["nats_per_byte"] = loss / self.data.bytes_per_token
        if _due(self.step, recipe.save_every, 0):
            self._keep()
        return row

    def _keep(self) -> None:
        if self.folder is not None and self.saved != self.step:
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
        kept = f"; {self.folder} holds that of step {self.saved}" if self.saved else ""
        return TrainingError(
            f"step {self.step + 1}: {why}. The step was not taken: the model is that of step "
            f"{self.step}{kept}. Go on from there with a smaller lr than {self.recipe.lr}")

    def _update(self, lr: float) -> None:
        """Weights, then QK-Clip by the logits that the old weights gave, then biases."""
        gammas = {name: qk_clip(self._largest(name), self.recipe.qk_clip)
                  for name in self.seen}
        for optimiser in self.optimisers.values():
            for group in optimiser.param_groups:
                group["lr"] = lr
            optimiser.step()
        for name, gamma in gammas.items():
            self._clip(self.mla[name], gamma)
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
        """Mean over the validation text, in nats a token. Leaves the model in evaluation
        mode; every process takes all of it."""
        recipe, total = self.recipe, 0.0
        pieces = self.data.pieces(recipe.length)
        self.model.eval()
        for ids in pieces.split(max(1, VALIDATION_TOKENS // recipe.length)):
            ids = ids.to(self.device)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=recipe.autocast):
                logits = self.model(ids)
            total += float(next_token_loss(logits, ids)) * len(ids)
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
        with interrupt_waits():
            if self.rank == 0:
                store.save(self.folder, self.model, self.optimisers, self.data.tokenizer,
                           self.step, self.recipe, self.fingerprint())
            self.saved = self.step
        return self.step

    @classmethod
    def resume(cls, folder, data: Data, device="cpu", **changes) -> "Trainer":
        """Go on from the newest checkpoint of a folder, as if there had been no stop.

        changes: of fields of the recipe, such as lr; without them, and with as many
        processes on the same machine, the bits are those of one run. InputError for another
        text; CheckpointError for a folder without a whole checkpoint.
        """
        if unknown := changes.keys() - {f.name for f in fields(Recipe)}:
            raise InputError(f"a recipe has no {min(unknown)}; what may change are its fields")
        newest = store.newest(folder)
        model, step, recipe, fingerprint = store.load(newest, device)
        trainer = cls(model, data, replace(Recipe(**recipe), **changes), folder)
        if trainer.fingerprint() != fingerprint:
            raise InputError(f"{newest} was trained on another text, or with another "
                             "tokenizer; a run is resumed with the data it began with")
        store.load_optimisers(newest, model, trainer.optimisers)
        trainer.step = trainer.saved = step
        return trainer


@contextmanager
def interrupt_waits(then_raise: bool = True):
    """Ctrl-C inside this block takes effect at its end. Yields a list that then is not
    empty, for one who wants to raise it later."""
    asked = []
    if threading.current_thread() is not threading.main_thread():
        yield asked     # only the main thread is interrupted
        return
    before = signal.signal(signal.SIGINT, lambda *_: asked.append(True))
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
        if asked and then_raise:
            raise KeyboardInterrupt


def _due(step: int, every: int, last: int) -> bool:
    return every > 0 and (step % every == 0 or step == last)


def _processes() -> tuple[int, int]:
    """Rank and number of the processes of this run."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
