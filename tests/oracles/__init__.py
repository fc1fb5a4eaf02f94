"""Independent references: NumPy and Python integers, written from the papers, importing nothing of the library."""
