"""Placeholder of the public names."""
