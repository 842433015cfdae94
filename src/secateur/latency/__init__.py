"""How long a model takes."""
