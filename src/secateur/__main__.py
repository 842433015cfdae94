"""`python -m secateur` is `secateur`."""

from secateur.cli import app

app(prog_name="secateur")
