"""Code shared by the commands: arguments and output, and the data of commands that fit.

Imported by `cli`.
"""
