"""The Ray cluster of a run: joined or started, watched, and its actors as the driver sees them.

It may import `scalerl.rl.workers` and what is below. `scalerl.rl.sync` and `scalerl.rl.placement.ray` import
it.
"""
