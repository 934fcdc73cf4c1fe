"""Where workers run: one file or folder per launcher.

The row of each launcher is in `core/registry/launchers.py`. A launcher starts processes, supervises them and
knows nothing of what they compute; it imports no torch.
"""

from manyhands.core.registry.launchers import LAUNCHERS, LauncherEntry

__all__ = ["LAUNCHERS", "LauncherEntry"]
