"""One module for each kind of work; each has `cases(quick)`, an iterator of rows."""
