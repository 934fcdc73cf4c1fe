"""Published claims, each tested by a study: `manyhands claims run large-batch`."""

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


def settle(results: Results) -> list[Settled]:
    """Return the claims that a study tests, and what it found about each."""
    return [
        Settled(claim, claim.judge(results))
        for claim in CLAIMS.values()
        if results.claim and claim.tested_by == results.claim
    ]


__all__ = ["CLAIMS", "Claim", "Dot", "Finding", "Line", "Part", "Plot", "Settled", "settle"]
