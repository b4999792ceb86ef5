"""The worker pool: it starts, watches and replaces workers, and assigns work to them. Rollout workers, vLLM,
evaluators, verifiers, trackers and the runs of a study use it.

    pool.py          the pool: back-off, replacement, deadlines; timeline.py: the work of each worker
    loop_pool.py     the pool in an event loop of its own thread, for work that consists of many calls
    backend.py       the interface of backends; processes.py has those of this machine: processes forked
                     by multiprocessing after preload.py, and processes of a fresh Python
    signals.py       signals in the trainer and its processes; ranks.py makes ranks fail together
    ray/             the Ray cluster of a run: its session, and the backend of actors

It may import `scalerl.rl.config`. Imported by `cli`, `rl`, `rl.engine.vllm`, `rl.learner`, `rl.loop`,
`rl.placement`, `rl.placement.ray`, `rl.sync`, `rl.tracking`, `rl.verify`, `study`.
"""
