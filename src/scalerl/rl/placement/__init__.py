"""Where the parts of a run are: generators and evaluations in processes, or in Ray actors.

    rollouts.py         groups assigned to rollout workers, wherever these run
    local.py            rollout workers in processes of this machine
    evaluate.py         an evaluation; evaluate_aside.py has it made in a process of its own
    ray/                generators, learner ranks, verifiers and evaluations as Ray actors

It may import engines, learners, verification and what is below. `scalerl.rl.loop` imports it.
"""
