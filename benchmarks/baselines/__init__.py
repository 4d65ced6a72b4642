"""The usual ways, written for this comparison: one file for each operator."""
