"""The worker pool: what it starts, watches, replaces and gives work. Rollout workers, evaluators, verifiers,
trackers and the runs of a study are its users.

    pool.py          the pool; supervision.py has deadlines, back-off, and time without a poll
    backend.py       what a pool requires of a backend; child.py is that of this machine, by multiprocessing,
                     fresh_python.py that of a Python that is started afresh
    process.py       signals; ranks.py makes ranks fail together
    ray/             the Ray cluster of a run: its session, the backend of actors, the timeline

It may import `scalerl.rl.config`. Imported by `cli`, `rl`, `rl.engine.vllm`, `rl.learner`, `rl.loop`,
`rl.placement`, `rl.placement.ray`, `rl.sync`, `rl.tracking`, `rl.verify`, `study`.
"""
