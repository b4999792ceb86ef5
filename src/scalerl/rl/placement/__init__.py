"""Where the parts of a run are: generators and evaluations in processes, or in Ray actors.

    rollouts.py         the pool of rollout workers, wherever these run; rollout_worker.py runs in each
    evaluate.py         an evaluation in this process; evaluate_aside.py has it made in a process of its own
    vllm.py             generation and evaluation by vLLM
    ray/                the same as Ray actors; learner ranks and verifiers

It may import engines, learners, verification and what is below. Imported by `cli`,
`rl`, `rl.loop`.
"""
