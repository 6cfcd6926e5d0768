"""Rows that store repeated observations once."""
