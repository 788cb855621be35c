"""Imported once, by the server that ranks are forked from."""

import torch.distributed.tensor  # noqa: F401
import torch.nn.parallel  # noqa: F401

import squinchcomm.torch.process_group
import squinchcomm.torch.join  # noqa: F401
