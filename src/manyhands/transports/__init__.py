"""How workers exchange tensors: one file a transport, one row each here."""

from manyhands.axes import Member

TRANSPORTS: dict[str, Member] = {
    "solo": Member("manyhands.transports.solo:Solo", "one worker: nobody to talk to"),
}
