"""One run or several: as a page, as tables, as figures.

    page.py            the page, whose parts are answer.py (its first sentence), details.py, tables.py
    overlay.py         the chart as JSON; groups.py: colours and mean curves
    panels.py, roles.py     metrics over steps; who did what when
    gathered.py        what is shown together, and compared
    figures.py         the same as files for papers

It may import `scalerl.view.facts` and `scalerl.view.plotting`. Imported by `cli`, `study`, `view`,
`view.serve`.
"""
