"""Placement of the parts of a run: generators and evaluators in processes or Ray actors.

    rollouts.py         the pool of rollout workers, wherever they run; rollout_worker.py runs in each
    evaluate.py         evaluation in this process; evaluate_aside.py runs it in a process of its own
    vllm.py             generation and evaluation by vLLM
    ray/                the same as Ray actors; learner ranks and verifiers

It may import engines, learners, verification and what is below. Imported by `cli`,
`rl`, `rl.loop`.
"""
