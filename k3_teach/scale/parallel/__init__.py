"""A K3 on many processes: a model that is cut (`shard`), its weights from and to folders
(`weights`), its optimisers, and training with checkpoints (`run`). All of it is called by all
processes together, which `torchrun` starts; the command is `__main__`.
"""

from k3_teach.scale.parallel.optimiser import clip_gradients, make_optimisers
from k3_teach.scale.parallel.run import ParallelTrainer
from k3_teach.scale.parallel.shard import ParallelExperts, make_mesh, recompute, sharded
from k3_teach.scale.parallel.weights import export, fill, load

__all__ = ["ParallelExperts", "ParallelTrainer", "clip_gradients", "export", "fill", "load",
           "make_mesh", "make_optimisers", "recompute", "sharded"]
