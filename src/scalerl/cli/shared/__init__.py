"""What commands share: their arguments, amounts of compute, data, and printed text.

Imported by `cli`.
"""
