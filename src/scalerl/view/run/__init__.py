"""The page of one run.

It may import `scalerl.view.facts`, `scalerl.view.figures` and `scalerl.view.runs`.
"""
