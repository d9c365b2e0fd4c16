"""Tuning tables in and out, for machines that must not tune."""
