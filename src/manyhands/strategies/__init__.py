"""How the work is divided: one file or folder per strategy.

The row of each strategy is in `core/registry/strategies.py`, its options beside it: reports read them too,
and import nothing of this room. A strategy knows the interface of transports, and nothing of launchers.
"""

from manyhands.core.registry.strategies import STRATEGIES, StrategyEntry

__all__ = ["STRATEGIES", "StrategyEntry"]
