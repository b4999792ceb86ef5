"""The worker pool: what it starts, watches, replaces and gives work. Rollout workers, vLLM, evaluators,
verifiers, trackers and the runs of a study are its users.

    pool.py          the pool: back-off, replacement, deadlines; timeline.py: what each did
    loop_pool.py     the pool in an event loop of a thread of its own: its work consists of many calls
    backend.py       what a pool requires of a backend; processes.py has those of this machine: forked
                     by multiprocessing after preload.py, and of a Python that is started afresh
    signals.py       who handles and who ignores them; ranks.py makes ranks fail together
    ray/             the Ray cluster of a run: its session, and the backend of actors

It may import `scalerl.rl.config`. Imported by `cli`, `rl`, `rl.engine.vllm`, `rl.learner`, `rl.loop`,
`rl.placement`, `rl.placement.ray`, `rl.sync`, `rl.tracking`, `rl.verify`, `study`.
"""
