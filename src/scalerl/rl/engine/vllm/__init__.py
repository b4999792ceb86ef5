"""Generation by vLLM: docs/howto/vllm.md.

    generator.py       the `Generator`: groups, counters, resume
    server_pool.py     the pool of servers, in a thread; server_state.py: its servers, requests and queue
    completions.py     sampling parameters for vLLM, and its results; turns.py: completions of several turns
    launch.py          starts workers; worker.py runs in them, served.py in vLLM's own processes
    http_client.py     servers over HTTP; protocol.py: definitions that both sides share
    requirements.py    arguments that a server needs, and their check

Imported by `rl`, `rl.loop`, `rl.placement`, `rl.placement.ray`.
"""
