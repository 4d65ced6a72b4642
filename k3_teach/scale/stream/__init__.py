"""K3 on a machine that holds a fiftieth of it: layer by layer, expert by expert.

    source.py    where a tensor comes from: a folder in the released format, or a seed
    model.py     the ordinary model, whose modules borrow their weights for one call
    memory.py    what it takes, computed beforehand, and the ceiling
    clock.py     where the time goes
    run.py       prompt and new tokens, saved after any layer and taken up again

`python -m k3_teach.scale.stream --help` is the command line.
"""

from k3_teach.scale.stream.model import StreamedModel
from k3_teach.scale.stream.run import Run, Stopped
from k3_teach.scale.stream.source import FolderSource, VirtualSource, first_layers

__all__ = ["FolderSource", "Run", "Stopped", "StreamedModel", "VirtualSource", "first_layers"]
