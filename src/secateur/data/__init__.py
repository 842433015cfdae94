"""Images in folders: reading, views, which output means which class."""
