"""Data sets: generated ones here, images and folders beside them."""
