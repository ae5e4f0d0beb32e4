"""`python -m hvdkit COMMAND`, where the console command is not on PATH."""

from hvdkit.cli import main

main()
