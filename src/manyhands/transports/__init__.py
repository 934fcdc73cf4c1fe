"""How workers exchange tensors: one file or folder per transport.

The row of each transport is in `core/registry/transports.py`. A transport knows nothing of strategies, and of
launchers only the `RankInfo` that they give each rank.
"""

from manyhands.core.registry.transports import TRANSPORTS, TransportEntry

__all__ = ["TRANSPORTS", "TransportEntry"]
