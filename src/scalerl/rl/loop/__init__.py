"""The training loop and what it keeps count of.

    pipeline.py   the loop, with its diagram; admission.py enforces k, and cuts groups into batches
    prompt_pool.py which prompt is drawn next
    parts.py      generator, learner, verifier and evaluation, wherever the recipe places them
    counters.py   what was spent, and the lines of steps.jsonl
    progress.py   what is reported to the caller: after a step, and what is being done within it
    evaluations.py when evaluations are due, and their record; resume.py where a run goes on

It may import every room of `scalerl.rl` but `tracking`. Imported by `cli`, `rl`, `study`.
"""
