"""What all worker processes share.

    supervision.py   deadlines, back-off, and time in which the driver did not poll
    process.py       signals; child.py is a process of this machine; ranks.py makes ranks fail together
    ray/             the Ray cluster of a run: its session, its actors and pools of them, the timeline

It may import `scalerl.rl.config`. Rooms that start processes import it.
"""
