"""What all worker processes share.

    supervision.py   progress, deadlines, and workers that are replaced
    process.py       signals; outbox.py sends messages by a thread; ranks.py makes ranks fail together
    ray/             the Ray cluster of a run: its session, its actors as the driver sees them, the timeline

It may import `scalerl.rl.config`. Rooms that start processes import it.
"""
