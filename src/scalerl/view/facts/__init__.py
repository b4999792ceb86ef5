"""What is shown of a run, in numbers and words, whatever shows it.

    frozen.py, notices.py   forecasts as frozen; the ceiling, alarms and claims in words
    facts.py, fit_rows.py   rows of a record, and of a fit
    standing.py, sampled.py     how a run stands; which evaluations are drawn

It may import `scalerl.curve`, `scalerl.forecast` and the modules of `scalerl.view`. Imported by `cli`,
`study`, `view`, `view.runs`, `view.serve`, `view.terminal`.
"""
