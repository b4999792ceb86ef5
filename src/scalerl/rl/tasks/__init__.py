"""Tasks: prompts and their verifiers.

    task.py       the protocol `Task`; docs/extend/task.md adds a task
    chain.py      the demonstration's arithmetic, made from a seed
    dataset.py    prompts from files and the Hugging Face Hub
    code.py       programming problems, whose answers are run in `scalerl.rl.sandbox`
    reasoning_gym.py  procedural problems
    taskset.py    tasksets of the package verifiers
    verifiers.py  exact, math, a function of your own, and those of TRL and verl
    mix.py        several tasks in one run
    shorthand.py  tasks in one line

Imported by `cli`, `plan`, `rl.config`, `rl.engine`, `rl.loop`, `rl.model`, `rl.verify`, `study`.
"""
