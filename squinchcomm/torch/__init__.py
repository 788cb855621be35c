"""torch.distributed over squinchcomm: importing this makes `torch.distributed.init_process_group("squinch")` work."""

from __future__ import annotations

from squinchcomm.torch.guards import compressed as compressed
from squinchcomm.torch.guards import lossless as lossless
from squinchcomm.torch.options import Options as Options
from squinchcomm.torch.registration import register as register

register()
