"""What processes of tests are forked with: all that any of them imports, whichever test starts the first.

The kernels too, which each would compile.
"""

import learner_work  # noqa: F401

import scalerl.rl.placement.evaluate_aside
import scalerl.rl.placement.rollout_worker
import scalerl.rl.workers.preload
import scalerl.study.run.preload  # noqa: F401
