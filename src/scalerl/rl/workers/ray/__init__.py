"""The Ray cluster of a run: joined or started, watched, and the backend of its actors.

It may import `scalerl.rl.workers` and what is below. `scalerl.rl.sync` and `scalerl.rl.placement.ray` import
it.
"""
