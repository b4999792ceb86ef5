"""The health of a run: alarms from the lines of steps.jsonl and the evaluations.

Thresholds and figures are in `scalerl.rl.config.health`. It may import `scalerl.record` and
`scalerl.rl.config`.
"""
