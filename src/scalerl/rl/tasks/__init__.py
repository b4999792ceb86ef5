"""Tasks: prompts and their verifiers.

    task.py       what a task provides (`Task`); docs/extend/task.md adds one
    chain.py      the demonstration's arithmetic, made from a seed
    dataset.py    prompts from files and the Hugging Face Hub
    code.py       programming problems, whose answers are run in `scalerl.rl.sandbox`
    shorthand.py  tasks in one line
    verifiers.py  exact, math, or a function of your own

`scalerl.rl.config` and everything above import it; `scalerl.rl.verify` runs verifiers in processes.
"""
