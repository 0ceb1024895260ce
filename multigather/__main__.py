"""``python -m multigather``: the command line."""

from multigather.cli import main

main()
