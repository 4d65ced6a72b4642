"""How a run of many processes ends when something is wrong: with one sentence.

An error that all processes meet is said by the first that comes. When a worker is lost, the
others notice at different times: some find its connection closed, some wait for one that
waits, until `torchrun` ends them. Whoever still can leaves an answer in the store that all
share, and who has left none is named.
"""

import os
import signal
import socket
import sys
import threading
import time

import torch.distributed as dist

PATIENCE = 6        # seconds to wait for answers; torchrun waits 30 between SIGTERM and SIGKILL


class Notices:
    """store: one that outlives the workers; where: says how far the run is, and what to do."""

    def __init__(self, store: dist.Store, rank: int, world: int, where=lambda: ""):
        self.store, self.rank, self.world, self.where = store, rank, world, where
        self.speaking = threading.Lock()

    def say(self, message: str) -> None:
        """Print an error, unless another process has."""
        try:
            first = self.store.add("errors", 1) == 1
        except RuntimeError:                # the store was lost, too
            first = True
        if first:
            print(f"error: {message}", file=sys.stderr, flush=True)

    def say_who_is_lost(self) -> None:
        with self.speaking:
            gone = self.without_answer()
            who = f"worker {', '.join(map(str, gone))} of {self.world} was lost"
            self.say(f"{who if gone else 'the run was ended'}{self.where()}")

    def without_answer(self) -> list[int]:
        end, gone = time.monotonic() + PATIENCE, [-1]
        try:
            self.store.set(f"answer {self.rank}", "")
            while gone and time.monotonic() < end:
                time.sleep(0.1)
                gone = [r for r in range(self.world) if not self.store.check([f"answer {r}"])]
        except RuntimeError:
            return [0]                      # it keeps the store, where torchrun does not
        return gone

    def listen(self) -> None:
        """Answer when `torchrun` ends this process, which may be waiting in C++ for another: a
        thread of its own does."""
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        signal.set_wakeup_fd(theirs.fileno())
        signal.signal(signal.SIGTERM, lambda *_: None)

        def wait():
            with ours, theirs:
                while ours.recv(1) != bytes([signal.SIGTERM]):
                    pass
                self.say_who_is_lost()
                os._exit(1)

        threading.Thread(target=wait, daemon=True).start()
