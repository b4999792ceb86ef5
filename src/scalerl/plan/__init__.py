"""Simulate a recipe on a cluster before it is rented.

    rates.py      how fast the parts are, by hand or of the package; measured.py takes them from a run,
                  and dollars and hours to a pass rate
    job.py        what a recipe asks of the loop, and the tokens of its completions
    bounds.py     seconds of a step by each part alone, in closed form
    simulate.py   the training loop as one event loop; generator.py the decode slots of one generator
    split.py      how many of some devices should generate

It may import the recipe and the schedules of `scalerl.rl`, records and the fit. Imported by `cli`.
"""
