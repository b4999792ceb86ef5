"""A run in a terminal: the curve, how it stands, the closing table.

It may import `scalerl.view.facts`. Imported by `cli`.
"""
