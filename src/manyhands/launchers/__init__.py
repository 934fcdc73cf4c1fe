"""Where workers run: one file a launcher, one row each here."""

from manyhands.axes import Member

LAUNCHERS: dict[str, Member] = {
    "inline": Member("manyhands.launchers.inline:Inline", "one worker, in this process"),
}
