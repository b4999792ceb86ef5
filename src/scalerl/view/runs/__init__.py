"""One run or several: as a page, as tables, as figures.

    page.py            the page, whose parts are answer.py (its first sentence), details.py, tables.py
    overlay.py         the chart as JSON; groups.py: groups of runs and their mean curves
    panels.py, roles.py     metrics over steps; the work of each role over time
    gathered.py        the runs shown together, and their comparison
    figures.py         figures as files for papers

It may import `scalerl.view.facts` and `scalerl.view.plotting`. Imported by `cli`, `study`, `view`,
`view.serve`.
"""
