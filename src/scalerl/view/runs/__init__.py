"""Several runs shown together: gathered, as a page, as tables, as figures.

It may import `scalerl.view.facts` and `scalerl.view.plotting`.
"""
