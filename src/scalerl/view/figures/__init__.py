"""Figures by matplotlib: the curve, the health of the training, recipes over one another.

It may import `scalerl.view.facts` and the modules of `scalerl.view`.
"""
