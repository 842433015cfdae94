"""Plans, removal, the loop around them, and files."""
