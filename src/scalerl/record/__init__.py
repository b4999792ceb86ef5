"""The run folder with its evaluations, steps and frozen forecasts: written, read, locked, cut on a resume.

    reader.py     RunRecord, and the compute axes; alarms.py and left_out.py are parts of what is read
    activity.py   what the run is doing at the moment: progress.json
    prompts.py    how prompts differ between evaluations: the sampling noise of a run
    devices.py    runs of which only the hours of one device are known
    writer.py     the one code that writes a run folder; folder.py locks it, cut.py cuts it on a resume

It imports only the modules at the bottom of the package. Imported
by `cli`, `curve`, `forecast`, `ingest`, `integrations`, `plan`, `rl`, `study`, `view`.
"""
