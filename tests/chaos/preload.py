"""What every process would load for itself, some of it in the middle of a round."""

import torch.distributed.tensor  # noqa: F401

import tests.chaos.kv.worker
import tests.chaos.weights
import tests.chaos.worker  # noqa: F401
