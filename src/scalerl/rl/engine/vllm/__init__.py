"""Generation by vLLM: docs/howto/vllm.md.

    generator.py       the `Generator`: groups, counters, resume
    server_pool.py     the pool of servers, in a thread; server_state.py: what it keeps, and calls to servers
    completions.py     what is asked of vLLM, and what it returned; turns.py: completions of several turns
    launch.py          what starts workers; worker.py runs in them, served.py in vLLM's own processes
    http_client.py     servers over HTTP; protocol.py what both sides agree on
    requirements.py    what a server must be

Imported by `rl`, `rl.loop`, `rl.placement`, `rl.placement.ray`.
"""
