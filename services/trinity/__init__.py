"""Converts Trinity-RFT's configuration: a table of its keys, with modules that read and convert by it.

Nothing of Trinity is imported. Names and defaults are those of its release 0.6, with the names of its older layouts.
"""
