"""A run in a terminal: the curve, its status, the closing table.

It may import `scalerl.view.facts`. Imported by `cli`.
"""
