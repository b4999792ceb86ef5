"""The Ray cluster of a run: joined or started, watched, and its actors in pools.

It may import `scalerl.rl.workers` and what is below. `scalerl.rl.sync` and `scalerl.rl.placement.ray` import
it.
"""
