"""`python -m secateur`: the same as the command `secateur`."""

from secateur.cli import app

app(prog_name="secateur")
