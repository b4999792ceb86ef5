"""The Ray cluster of a run: its session, a watch on it, and the backend of its actors.

It may import `scalerl.rl.workers` and what is below. Imported by `rl`, `rl.placement.ray`, `rl.sync`.
"""
