"""The answer of a study: curves of arms over their seeds, verdicts against the base, decisions scored.

It may import `scalerl.forecast`, `scalerl.view` and `scalerl.study.record`; never what trains.
"""
