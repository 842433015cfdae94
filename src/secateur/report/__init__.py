"""Pages about a run: charts, tables and heat maps in one file."""

from secateur.report.document import Page

__all__ = ["Page"]
