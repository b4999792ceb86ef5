"""What is shown of a run, in numbers and words, whatever shows it.

    frozen.py, notices.py   forecasts as frozen; the ceiling, alarms and claims in words
    facts.py, fit_rows.py   rows of a record, and of a fit
    shown.py, standing.py   a run as it is shown, and as it stands
    sampled.py              which of its evaluations are drawn

It may import `scalerl.curve`, `scalerl.forecast` and the modules of `scalerl.view`. Imported by `cli`,
`study`, `view`, `view.runs`, `view.serve`, `view.terminal`.
"""
