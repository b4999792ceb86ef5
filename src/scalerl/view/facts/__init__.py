"""What is shown of a run, in numbers and words, whatever shows it.

    frozen.py, notices.py   forecasts as frozen; the ceiling, alarms and claims in words
    facts.py, standing.py, fit_rows.py, sampled.py

It may import `scalerl.curve`, `scalerl.forecast` and the modules of `scalerl.view`.
"""
