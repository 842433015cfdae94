"""Models by name: from a zoo, from a file of the user's, or from a folder that secateur saved."""

from secateur.models.origin import Opened, Origin, build, open_model

__all__ = ["Opened", "Origin", "build", "open_model"]
