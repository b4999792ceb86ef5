"""Running a study: every arm and seed, in parallel processes, resumed where they were killed.

    runner.py, decisions.py     the runs in order, and the decisions between them
    jobs.py, preload.py         their processes
    estimate.py                 their cost

It may import `scalerl.rl` and the rest of `scalerl.study` except its page. Imported by `cli`, `study`.
"""
