"""One thread: the tensors are small, and a second thread costs more than it brings."""

import torch

torch.set_num_threads(1)
