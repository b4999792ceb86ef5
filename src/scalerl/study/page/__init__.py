"""The report of a study: one page, and its tables in Markdown, LaTeX and CSV.

It may import `scalerl.study.verdict` and `scalerl.view`. Imported by `cli`.
"""
