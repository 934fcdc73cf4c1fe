"""Checks before a run is resumed from a folder that may come from a stranger."""

from __future__ import annotations

import os
from collections.abc import Callable

from manyhands.core.errors import ManyhandsError, UsageError
from manyhands.records import signing
from manyhands.records.record import RunRecord
from manyhands.records.run_folder import RunFolder
from manyhands.records.spec import RunSpec


def check_trust(folder: RunFolder, stored: RunSpec, trusted: bool, notice: Callable[[str], None]) -> None:
    """Announce the user's files that resuming imports; raise a UsageError if the folder is not trusted."""
    if not stored.user_files:
        return
    files = {str(file.absolute()): what for file, what in stored.user_files.items()}
    if not trusted:
        why = (
            "its signature was not made by this account, or not for this spec.json"
            if os.path.lexists(folder.path / "spec.sig")
            else "it was started by another account, or by a version of manyhands that did not sign runs"
        )
        raise UsageError(
            f"{folder.path} is not known to be yours ({why}), and resuming it imports {' and '.join(files)}: "
            f"look at {'that file' if len(files) == 1 else 'these files'}, and if you trust "
            f"{'it' if len(files) == 1 else 'them'}, add --trust"
        )
    for file, what in files.items():
        notice(f"importing {file}, the {what} file of {folder.path}")


def warn_if_unsigned(spec: RunSpec, notice: Callable[[str], None]) -> None:
    """Report that the account has no key, if resuming the run would need one."""
    if spec.user_files and (reason := signing.why_not()):
        notice(f"{reason}; so the run cannot be signed, and resuming it will need --trust")


def own_result(folder: RunFolder, before: RunSpec, notice: Callable[[str], None]) -> RunRecord | None:
    """Return the earlier result of a run that is resumed; None if it is damaged or of another run."""
    try:
        record = folder.record()
    except ManyhandsError as error:
        notice(f"{error}; continuing without it")
        return None
    if record is not None and record.spec.id != before.id:
        other = f"of another run ({record.spec.task}, {record.spec.id})"
        notice(f"{folder.path / 'result.json'} is {other}; continuing without it")
        return None
    return record
