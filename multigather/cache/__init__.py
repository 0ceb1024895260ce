"""Measured winners and the heuristic beside them: what is fastest for which gather.

`key` says what a choice is filed under, `model` what a file holds, `store` where files are and how
they are read and written, `rules` what serves where nothing was measured, `record` which gathers a
program made. Nothing here knows a backend: a config is a dict of knobs.
"""
