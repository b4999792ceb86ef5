"""Simulate a recipe on a cluster before it is rented.

    rates.py      the speed of each part, given by hand or by the package; measured.py measures it in a run,
                  and estimates dollars and hours to a pass rate
    job.py        the work that a recipe gives the loop, and the lengths of its completions
    bounds.py     seconds per step if one part alone were the limit, in closed form
    simulate.py   the training loop as one event loop; generator.py the decode slots of one generator
    split.py      how many devices should generate, and how many train

It may import the recipe and the schedules of `scalerl.rl`, records and the fit. Imported by `cli`.
"""
