"""The speed that a worker is priced at: its own once it measured it, before that its like's.

A worker that has not run a turn states what it assumes. Beside one that has measured itself on a
slower or busier machine it would look many times as fast, and sessions would leave their state for
it. Workers of one spec digest are taken to be alike until they say otherwise. One of them gives the
measure: a fleet of N that measures itself for the first time is not priced anew N x N times.
"""

from __future__ import annotations

from msgspec.structs import replace

from ownerserve.router.worker import Profile, Speed, Worker


class PresumedSpeeds:
    """The worker that gives the measure for each spec digest, and its speed when last told."""

    def __init__(self) -> None:
        self._by_digest: dict[str, tuple[Worker, Speed]] = {}

    def speed_of(self, profile: Profile) -> Speed:
        """What a worker of this profile is priced at. What state takes in its memory and over its
        media is always its own statement."""
        known = self._by_digest.get(profile.spec_digest)
        if profile.is_measured or known is None:
            return profile.speed
        like = known[1]
        return replace(
            profile.speed,
            prefill=like.prefill,
            step_ms=like.step_ms,
            step_ms_per_sequence=like.step_ms_per_sequence,
        )

    def measured(self, worker: Worker) -> bool:
        """Take in a worker's statement; whether it changes what others are presumed to be.

        A worker that states no digest is like none. The first that measured itself gives the
        measure until it is down.
        """
        profile = worker.profile
        digest = profile.spec_digest
        if not profile.is_measured or not digest:
            return False
        known = self._by_digest.get(digest)
        if known is not None:
            giver, speed = known
            if (giver is not worker and giver.up) or speed == profile.speed:
                return False
        self._by_digest[digest] = worker, profile.speed
        return True
