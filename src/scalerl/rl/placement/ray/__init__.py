"""The parts of a run on a cluster, as Ray actors; their settings are in `scalerl.rl.config.cluster`.

Imported by `rl.loop`.
"""
