"""The verdict of a study: curves of arms over their seeds, comparisons with the base, scores of forecasts.

    verdict.py, arm_fits.py          the verdict on every arm, and the fits behind it
    differences.py                   differences as measured, without a curve
    forecast_scores.py               frozen forecasts against their outcomes
    answers.py, cautions.py          the verdict in sentences, and the table of measured pass rates

It may import `scalerl.forecast`, `scalerl.view` and `scalerl.study.record`, but nothing that trains. Imported
by `study`, `study.page`, `study.run`.
"""
