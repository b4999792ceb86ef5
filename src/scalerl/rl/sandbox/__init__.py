"""The sandbox: Python that a model wrote, run where it reaches nothing.

    find.py       what works on this machine; backend.py encloses processes by bubblewrap, or by namespaces
    sandbox.py    programs and tests, run and judged from outside
    jail.py       the way in, run inside; namespaces.py, kernel.py and seccomp.py are its means
    harness.py    evaluates tests inside, on values (plain.py) that come from candidate.py in another sandbox

It imports `scalerl.errors` alone, and what runs inside not even that. `scalerl.rl.tasks` uses it.

Imported by `rl.tasks`.
"""
