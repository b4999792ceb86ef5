"""The sandbox: runs Python written by a model, isolated from the machine.

    find.py       finds what works on this machine; backend.py encloses processes by bubblewrap or namespaces
    sandbox.py    runs programs and tests, and verifies them from outside
    jail.py       enters the sandbox, from inside, by namespaces.py, kernel.py and seccomp.py
    harness.py    evaluates tests inside, on values (plain.py) that come from candidate.py in another sandbox

It imports only `scalerl.errors`, and the code that runs inside not even that. `scalerl.rl.tasks` uses it.

Imported by `rl.tasks`.
"""
