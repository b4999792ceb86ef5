"""The parts of a run on a cluster, as Ray actors; `scalerl.rl.config.cluster` has their settings.

Imported by `rl.loop`.
"""
