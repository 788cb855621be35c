"""Imported once, by the server that ranks are forked from."""

import torch.distributed.tensor
import torch.nn.parallel  # noqa: F401
