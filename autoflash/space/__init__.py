"""Which variants there are."""
