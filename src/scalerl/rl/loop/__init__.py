"""The training loop and its counters.

    pipeline.py   the loop, with its diagram; admission.py enforces k and cuts groups into batches
    prompt_pool.py which prompt is drawn next
    parts.py      generator, learner, verifier and evaluator, wherever the recipe places them
    counters.py   the cost of a run, and the lines of steps.jsonl; budget.py its budget
    progress.py   what is reported to the caller: steps, evaluations, and the current activity
    evaluations.py when evaluations are due, and their record; resume.py where a run resumes

It may import every room of `scalerl.rl` but `tracking`. Imported by `cli`, `rl`, `study`.
"""
