"""Published claims, each tested by a study of the same name: `manyhands claims run large-batch`."""

from __future__ import annotations

from manyhands.claims.averaging import AVERAGING
from manyhands.claims.base import Claim, Finding, Part, Settled
from manyhands.claims.critical_batch import CRITICAL_BATCH
from manyhands.claims.large_batch import LARGE_BATCH
from manyhands.claims.noise_and_batch import NOISE_SCALE
from manyhands.claims.offload import OFFLOAD
from manyhands.claims.plots import Dot, Line, Plot
from manyhands.claims.stale_updates import ASYNCHRONY
from manyhands.claims.workers import DATA_OR_MODEL, MORE_WORKERS
from manyhands.records.study_results import Results

CLAIMS: dict[str, Claim] = {
    claim.name: claim
    for claim in (
        LARGE_BATCH,
        CRITICAL_BATCH,
        NOISE_SCALE,
        DATA_OR_MODEL,
        MORE_WORKERS,
        ASYNCHRONY,
        AVERAGING,
        OFFLOAD,
    )
}


def settle(results: Results) -> Settled | None:
    """Return the claim that a study tests and what the study found; None if it tests no claim."""
    claim = CLAIMS.get(results.claim or "")
    return Settled(claim, claim.judge(results)) if claim is not None else None


__all__ = ["CLAIMS", "Claim", "Dot", "Finding", "Line", "Part", "Plot", "Settled", "settle"]
