"""Pages that stand alone: charts, tables and heat maps in one HTML file."""
