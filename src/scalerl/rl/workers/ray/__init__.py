"""The Ray cluster of a run: joined or started, watched, and the backend of its actors.

It may import `scalerl.rl.workers` and what is below. Imported by `rl`, `rl.placement.ray`, `rl.sync`.
"""
