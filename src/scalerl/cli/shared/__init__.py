"""What commands share: their arguments and output, and the data of those that fit.

Imported by `cli`.
"""
