"""``multigather bench``: side by side with what people use today.

`workloads` names gathers that people do, `sweep` makes series of them, `ways` are multigather's
calls and its peers, `timing` takes times, `run` checks and measures, `report` and `plots` show.
`host` takes apart what a repeated call costs the host.
"""
