"""Which variant to try next, and the loop that tries it."""
