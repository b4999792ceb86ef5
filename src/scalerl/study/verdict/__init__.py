"""The answer of a study: curves of arms over their seeds, verdicts against the base, decisions scored.

    verdict.py, arm_fits.py          the verdict of every arm, and the fits that it rests on
    differences.py                   what was measured, without a curve
    forecast_scores.py               frozen forecasts against what came
    answers.py, cautions.py          all of it in sentences, and the table of what was measured

It may import `scalerl.forecast`, `scalerl.view` and `scalerl.study.record`; never what trains. Imported by
`study`, `study.page`, `study.run`.
"""
