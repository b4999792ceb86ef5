"""The health of a run: alarms from the lines of steps.jsonl and the evaluations.

    watch.py      when warnings and alarms are reported, and when they are over
    figures.py    the definition of every figure; thresholds are in `scalerl.rl.config.health`

It may import `scalerl.record` and `scalerl.rl.config`. Imported by `rl`, `rl.loop`.
"""
