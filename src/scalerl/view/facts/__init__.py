"""The facts shown about a run, in numbers and words, for pages, terminals and notebooks.

    frozen.py, notices.py   forecasts as frozen; the ceiling, alarms and claims in words
    facts.py, fit_rows.py   rows about a record, and about a fit
    shown.py, standing.py   a run with its fit; the status of a run in progress
    sampled.py              which evaluations are drawn

It may import `scalerl.curve`, `scalerl.forecast` and the modules of `scalerl.view`. Imported by `cli`,
`study`, `view`, `view.runs`, `view.serve`, `view.terminal`.
"""
