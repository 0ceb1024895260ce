"""The tuner: measures every config of every backend and files the winners.

`shapes` says which gathers, `measure` times the candidates of one, `compiling` makes kernels ahead
on all cores, `tune` is the loop that publishes, `check` measures how good the choices are, `report`
shows them, `online` tunes within a user's call if asked to.
"""
