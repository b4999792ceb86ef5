"""Training: prompts -> rollouts -> verified groups -> advantages -> loss -> weights -> generators.

    train.py      a run, from recipe to run folder; types.py what flows along the arrows
    config/ algo/ tasks/             what a recipe says
    model/ kernels/ engine/ learner/ sync/ verify/ workers/ checkpoint/     the parts
    placement/ loop/ health/ tracking/                                      where they are, and the run

Rooms import only those before them in `tests/test_imports.py`. `scalerl.study`, `scalerl.plan` and
`scalerl.cli` import this; it imports `scalerl.record`, and none of the rooms that fit, show or compare.
"""
