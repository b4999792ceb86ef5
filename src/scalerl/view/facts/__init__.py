"""What is shown of a run, in numbers and words, whatever shows it.

    frozen.py, ceiling.py, curve_view.py   forecasts as frozen, the ceiling in words, the main figure's data
    facts.py, standing.py, fit_rows.py, alarm_rows.py

It may import `scalerl.curve`, `scalerl.forecast` and the modules of `scalerl.view`.
"""
