"""Admission control: the in-flight limit that enforces k.

With P groups a trainer step, group g is consumed by the step that starts at version g // P, whatever the
order in which groups complete. A slot of the limit comes back only when every generator has installed the
weights of the step that consumed it. So `PipelineRL(k)`, with k + 1 batches in flight, admits group g once
version g // P - k is installed: the group is sampled by that version or a later one, and no trained token is
older than k versions (PipelineRL, arXiv 2509.19128; PipelineRL-k, arXiv 2510.13786). `OffPolicy(k)` has k
batches in flight, all of a phase sampled by the weights at its start: the last of its batches is trained at
staleness k - 1.

Where groups without signal are replaced (`scalerl.rl.loop.verified`), a step consumes more than P groups. A
group that is replaced gives its slot back as soon as that is known: it is no group of the P. Of each step at
most so many do as leave P groups of all that it may consume. Then at most u + q // P is the version that
trains a group, with u steps begun and q groups before it that are in flight, and the bound is as above.
"""

from dataclasses import dataclass

from scalerl.rl.algo.schedule import AnySchedule


@dataclass
class AdmissionControl:
    """Decides whether another group may be admitted; `admitted` are all so far."""

    schedule: AnySchedule
    prompts: int
    """Groups that a trainer step consumes."""
    admitted: int = 0

    def allows(self, installed: int, replaced: int = 0) -> bool:
        """Return whether a group may be admitted, `installed` being the version that every generator has, and
        `replaced` the groups so far whose place others take.

        Every version is the result of one batch: so many groups have come back as installed weights.
        """
        consumed = installed * self.prompts + replaced
        return self.admitted < consumed + self.schedule.in_flight_limit(self.prompts)
