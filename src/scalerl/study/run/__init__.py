"""Runs a study: every arm and seed, in processes beside one another, resumed where it was killed.

    runner.py, decisions.py     the runs in order, and what is decided between them
    jobs.py, preload.py         their processes
    estimate.py                 what they will cost

It may import `scalerl.rl` and the rest of `scalerl.study` but its page. Imported by `cli`, `study`.
"""
