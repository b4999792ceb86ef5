"""Runs a study: every arm and seed, in processes beside one another, resumed where it was killed.

It may import `scalerl.rl` and the rest of `scalerl.study` but its page.
"""
