"""The commands, one file each: `add(commands)` says its arguments, `run(args)` does it.

What a command needs is imported inside of `run`, so that the light ones never wait for the heavy.
"""
