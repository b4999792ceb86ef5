"""Verification in processes that cannot harm the run.

    verifier.py   rewards of groups, by the task's verifier
    verifier_pool.py distributes completions over a pool of workers: supervisors here, or actors on a cluster
    supervisor.py a trusted process that runs no code of a task; it uses forks.py and proc.py
    worker.py     runs the task's code

It may import `scalerl.rl.tasks`, `scalerl.rl.config` and `scalerl.rl.workers`. Imported by `cli`, `rl`,
`rl.engine`, `rl.engine.vllm`, `rl.loop`, `rl.placement`, `rl.placement.ray`.
"""
