"""The commands, one file each: `add(parser)` adds its arguments, and `run(args)` runs it.

The imports of a command are inside `run`, so that light commands never wait for heavy imports.
"""
