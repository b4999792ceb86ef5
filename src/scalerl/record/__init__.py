"""The run folder with its evaluations, steps and frozen forecasts: written, read, locked, cut on a resume.

    reader.py     RunRecord; evaluation.py one evaluation, and the compute axes
    alarms.py     alarms and warnings, left_out.py evaluations that do not count: further parts of a record
    activity.py   what the run is doing at the moment: progress.json
    prompts.py    how prompts differ between evaluations: the sampling noise of a run
    devices.py    runs whose log gives the hours of one device only
    writer.py     the only code that writes a run folder; folder.py locks it, cut.py cuts it on a resume

It imports only the modules at the bottom of the package. Imported
by `cli`, `curve`, `forecast`, `ingest`, `integrations`, `plan`, `rl`, `study`, `view`.
"""
